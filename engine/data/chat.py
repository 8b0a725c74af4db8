"""Chats to text, and the character spans that the assistant wrote.

The spans come from the template itself, never from searching for the message in the text: from its {% generation %} blocks where it has them; else from
rendering the chat up to each turn; else (a template that rewrites earlier turns) from where the text changes when a turn's content is changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from engine.data.reading import json_type
from engine.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBES = ("\u2021a", "\u2020z")  # differ from each other in their first and in their last character

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The chat as the model sees it, and [start, end) character spans of what the assistant generates, its end-of-turn token included."""

    text: str
    spans: list[tuple[int, int]]


def check_messages(value: Any, field: str) -> list[Message]:
    """The chat, or DataError naming the message that is wrong."""
    if not isinstance(value, list):
        raise DataError(f"field {field!r} is {json_type(value)}, not a list of messages", field=field)
    if not value:
        raise DataError(f"field {field!r} is an empty chat", field=field)
    messages = [_check_message(m, f"{field}[{i}]") for i, m in enumerate(value)]
    if not any(m["role"] == "assistant" for m in messages):
        raise DataError(f"field {field!r} has no assistant turn, so nothing carries loss", field=field)
    return messages


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {json_type(message)}, not an object with role and content", field=where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise DataError(f"{where}.role is {'missing' if 'role' not in message else json_type(role)}, not a string", field=f"{where}.role")
    if role not in ROLES:
        raise DataError(f"{where}.role is not one of {', '.join(ROLES)}", field=f"{where}.role")
    if isinstance(content, list):
        content = _join_parts(content, where)
    calls = bool(message.get("tool_calls"))
    if content is None and not calls:
        raise DataError(f"{where}.content is {'missing' if 'content' not in message else 'null'}", field=f"{where}.content")
    if content is not None and not isinstance(content, str):
        raise DataError(f"{where}.content is {json_type(content)}, not a string", field=f"{where}.content")
    if role == "assistant" and not calls and not (content or "").strip():
        raise DataError(f"{where} is an empty assistant turn", field=f"{where}.content")
    kept = {k: v for k, v in message.items() if v is not None}  # tables give every message every key
    return {**kept, "content": content or ""}


def _join_parts(parts: list[Any], where: str) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}.content has a part that is not text; only text can be attributed", field=f"{where}.content")
    return "".join(part["text"] for part in parts)


def render_chat(messages: list[Message], tokenizer: Any, fallback: Literal["refuse", "roles"], tools: list[Any] | None = None) -> RenderedChat:
    """Render a checked chat. Raises DataError where there is no template (and no fallback), or the template refuses these messages."""
    if not getattr(tokenizer, "chat_template", None):
        if fallback == "refuse":
            raise DataError(
                "the tokenizer has no chat template; say --chat-fallback roles to write each turn as a line `role: content`, or give a tokenizer that has one",
                code="no-chat-template",
                field="messages",
            )
        return _render_roles(messages)
    try:
        template = tokenizer.get_chat_template(None, tools)
        kwargs = {"tools": tools, "chat_template": template, **tokenizer.special_tokens_map}
        if _GENERATION.search(template):
            rendered, spans = render_jinja_template([messages], return_assistant_tokens_mask=True, **kwargs)
            return RenderedChat(rendered[0], [(int(a), int(b)) for a, b in spans[0]])
        return _render_by_turns(messages, kwargs, _markers(tokenizer))
    except jinja2.exceptions.TemplateError as e:
        raise DataError(f"the chat template refuses these messages: {(str(e) or type(e).__name__).splitlines()[0]}", field="messages") from None
    except (TypeError, KeyError, ValueError) as e:
        raise DataError(f"the chat template fails on these messages: {type(e).__name__}", field="messages") from None


def render_prompt(messages: list[Message], tokenizer: Any, fallback: Literal["refuse", "roles"], tools: list[Any] | None = None) -> str:
    """The text after which the assistant's next turn is generated (messages may end with a user's turn)."""
    if not getattr(tokenizer, "chat_template", None):
        return _render_roles(messages).text + "assistant: "
    kwargs = {"tools": tools, "chat_template": tokenizer.get_chat_template(None, tools), **tokenizer.special_tokens_map}
    return _render(messages, kwargs, prompt=True)


def _render(messages: list[Message], kwargs: dict[str, Any], *, prompt: bool = False) -> str:
    rendered, _ = render_jinja_template([messages], add_generation_prompt=prompt, **kwargs)
    return str(rendered[0])


def _render_roles(messages: list[Message]) -> RenderedChat:
    text, spans = "", []
    for message in messages:
        text += f"{message['role']}: "
        start = len(text)
        text += message["content"] + "\n"
        if message["role"] == "assistant":
            spans.append((start, len(text)))
    return RenderedChat(text, spans)


def _markers(tokenizer: Any) -> tuple[str, ...]:
    """The tokenizer's special tokens as text: what may close a turn."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return tuple({*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)} - {""})


def _render_by_turns(messages: list[Message], kwargs: dict[str, Any], markers: tuple[str, ...]) -> RenderedChat:
    """Spans end with the token that closes the turn; white space that the template writes after it is nobody's to generate."""
    text = _render(messages, kwargs)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        span = _span_by_prefix(text, messages, i, kwargs)
        if span is not None:
            start, end = span
            closed = text[start:end].rstrip()
            end = start + len(closed) if closed.endswith(markers) else end
        else:
            start, end = _span_by_change(text, messages, i, kwargs)
            end += max((len(m) for m in markers if text.startswith(m, end)), default=0)
        spans.append((start, end))
    return RenderedChat(text, spans)


def _span_by_prefix(text: str, messages: list[Message], i: int, kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """From the end of the chat before turn i, generation prompt included, to its end after turn i; None where these are no prefixes of the whole."""
    try:
        before = _render(messages[:i], kwargs, prompt=True) if i else ""
        after = _render(messages[: i + 1], kwargs)
    except jinja2.exceptions.TemplateError:
        return None
    if len(before) < len(after) and after.startswith(before) and text.startswith(after):
        return len(before), len(after)
    return None


def _span_by_change(text: str, messages: list[Message], i: int, kwargs: dict[str, Any]) -> tuple[int, int]:
    """What changes in the text when the content of turn i is replaced by two different probes."""
    first, second = (_render([*messages[:i], {**messages[i], "content": probe}, *messages[i + 1 :]], kwargs) for probe in _PROBES)
    if len(first) != len(second):
        raise DataError("the chat template does not show where the assistant's turn begins and ends", field="messages")
    start = next((j for j, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), None)
    if start is None:
        raise DataError(f"the chat template leaves out the content of messages[{i}]", field="messages")
    tail = next(j for j, (a, b) in enumerate(zip(reversed(first), reversed(second), strict=True)) if a != b)
    end = len(text) - tail
    if end <= start or text[:start] != first[:start] or text[end:] != first[len(first) - tail :]:
        raise DataError(f"the chat template rewrites other turns when messages[{i}] changes", field="messages")
    return start, end
