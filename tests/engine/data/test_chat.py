"""Where the loss of a chat falls."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from engine.data.chat import check_messages, render_chat
from engine.data.reading import Row
from engine.data.settings import DataSettings
from engine.data.tokens import to_example
from engine.errors import DataError
from engine.example import Example
from engine.model import LoadedModel, from_parts

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STRIPPING = CHATML.replace("m['content']", "m['content'] | trim")
GENERATION = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A: {% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['role'] }}: {{ m['content'] }}\n{% endif %}{% endfor %}"
)
# like templates of reasoning models: the last assistant turn is written otherwise than earlier ones
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ALTERNATING = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('must start with the user') }}{% endif %}" + CHATML
TOOLS = "{% if tools %}{{ '<|im_start|>system\\n' + tools[0]['function']['name'] + '<|im_end|>\\n' }}{% endif %}" + CHATML.replace(
    "m['content']", "(m['content'] if not m.get('tool_calls') else 'call ' + m['tool_calls'][0]['function']['name'])"
)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Capital of Peru?"},
    {"role": "assistant", "content": "Lima."},
    {"role": "user", "content": "Lima. And of France?"},
    {"role": "assistant", "content": "Paris."},
]


@pytest.fixture
def loaded(tiny_gpt2: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast) -> LoadedModel:
    """A model whose tokenizer knows the markers of a chat; ids beyond its vocabulary are not run through it."""
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    loaded = from_parts(tiny_gpt2, tokenizer)
    loaded.max_length = 512
    return loaded


def example(loaded: LoadedModel, template: str | None, messages: Any, training: bool = True, tools: Any = None, **settings: Any) -> Example:
    loaded.tokenizer.chat_template = template
    values = {"messages": messages, "topic": "geo", **({"tools": tools} if tools else {})}
    return to_example(Row("f", 1, values), loaded, DataSettings(**settings), training=training, default_id="0")


def turns(loaded: LoadedModel, e: Example) -> list[str]:
    """The runs of target tokens, decoded."""
    runs: list[list[int]] = []
    for i, target in enumerate(e.target_mask):
        if target and (i == 0 or not e.target_mask[i - 1]):
            runs.append([])
        if target:
            runs[-1].append(int(e.input_ids[i]))
    return [str(loaded.tokenizer.decode(run)) for run in runs]


@pytest.mark.parametrize("template", [CHATML, STRIPPING, GENERATION, REWRITING])
def test_every_assistant_turn_and_its_end_carry_the_loss(loaded: LoadedModel, template: str) -> None:
    e = example(loaded, template, CHAT)
    found = turns(loaded, e)
    assert found[0] == "Lima.<|im_end|>" and found[1].endswith("Paris.<|im_end|>") and len(found) == 2
    assert e.kind == "messages" and e.metadata == {"topic": "geo"}
    assert "Be brief." in e.text and loaded.tokenizer.decode(e.input_ids) == e.text


def test_white_space_that_the_template_strips_moves_no_span(loaded: LoadedModel) -> None:
    spaced = [{**m, "content": "  " + m["content"] + " \n"} for m in CHAT]
    assert turns(loaded, example(loaded, STRIPPING, spaced)) == ["Lima.<|im_end|>", "Paris.<|im_end|>"]
    assert turns(loaded, example(loaded, CHATML, spaced)) == ["  Lima. \n<|im_end|>", "  Paris. \n<|im_end|>"]


def test_words_of_the_assistant_in_other_turns_are_not_targets(loaded: LoadedModel) -> None:
    chat = [{"role": "user", "content": "Lima. Lima. assistant Lima."}, {"role": "assistant", "content": "Lima."}]
    assert turns(loaded, example(loaded, CHATML, chat)) == ["Lima.<|im_end|>"]


def test_tool_messages_carry_no_loss(loaded: LoadedModel) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}
    chat = [CHAT[1], call, {"role": "tool", "content": "Lima is big"}, {"role": "assistant", "content": "Lima."}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    e = example(loaded, TOOLS, chat, tools=tools)
    assert turns(loaded, e) == ["call look<|im_end|>", "Lima.<|im_end|>"]
    assert "<|im_start|>system\nlook" in e.text and e.metadata == {"topic": "geo"}


def test_text_parts_are_joined(loaded: LoadedModel) -> None:
    parts = [CHAT[1], {"role": "assistant", "content": [{"type": "text", "text": "Li"}, {"type": "text", "text": "ma."}]}]
    assert turns(loaded, example(loaded, CHATML, parts)) == ["Lima.<|im_end|>"]


def test_without_a_template_chats_are_refused_or_written_as_roles(loaded: LoadedModel) -> None:
    with pytest.raises(DataError, match="no chat template; say --chat-fallback roles"):
        example(loaded, None, CHAT)
    e = example(loaded, None, CHAT, chat_fallback="roles")
    assert turns(loaded, e) == ["Lima.\n", "Paris.\n<|endoftext|>"]
    assert e.text.startswith("system: Be brief.\nuser: Capital of Peru?\nassistant: Lima.\n")
    assert turns(loaded, example(loaded, None, CHAT, training=False, chat_fallback="roles"))[-1] == "Paris.\n"


def test_no_double_start_token(loaded: LoadedModel) -> None:
    from tokenizers.processors import TemplateProcessing

    loaded.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    e = example(loaded, "<|endoftext|>" + CHATML, CHAT)
    assert (e.input_ids == 0).sum() == 1 and e.input_ids[0] == 0


def test_long_chats_are_truncated_on_the_left(loaded: LoadedModel) -> None:
    e = example(loaded, CHATML, CHAT, max_length=20)
    assert e.truncated and len(e) == 20 and turns(loaded, e) == ["Paris.<|im_end|>"]
    ends_with_user = [*CHAT, {"role": "user", "content": "And of Mongolia, which is a long question that fills it all?"}]
    with pytest.raises(DataError, match="no target token after truncation"):
        example(loaded, CHATML, ends_with_user, max_length=20)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "'messages' is null, not a list"),
        ("hi", "a string, not a list"),
        ([], "empty chat"),
        (["hi"], r"messages\[0\] is a string"),
        ([{"content": "x"}], r"messages\[0\]\.role is missing"),
        ([{"role": 3, "content": "x"}], r"role is a number"),
        ([{"role": "bot", "content": "x"}], "role is not one of"),
        ([CHAT[1], {"role": "assistant"}], r"messages\[1\]\.content is missing"),
        ([CHAT[1], {"role": "assistant", "content": None}], r"messages\[1\]\.content is null"),
        ([CHAT[1], {"role": "assistant", "content": 5}], r"content is a number"),
        ([CHAT[1], {"role": "assistant", "content": " \n"}], r"messages\[1\] is an empty assistant turn"),
        ([CHAT[1], {"role": "assistant", "content": [{"type": "image", "url": "x"}]}], "a part that is not text"),
        ([CHAT[1]], "no assistant turn"),
        ([CHAT[1], {"role": "assistant", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_bad_chats_say_why(loaded: LoadedModel, messages: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        example(loaded, CHATML, messages)


def test_a_template_that_refuses_is_named(loaded: LoadedModel) -> None:
    with pytest.raises(DataError, match="template refuses these messages: must start with the user"):
        example(loaded, ALTERNATING, CHAT)


def test_a_template_that_hides_a_turn_is_refused(loaded: LoadedModel) -> None:
    hiding = REWRITING.replace("m['content'] +", "(m['content'] if loop.last or m['role'] == 'user' else '') +")
    loaded.tokenizer.chat_template = hiding
    with pytest.raises(DataError, match=r"leaves out the content of messages\[2\]"):
        render_chat(check_messages(CHAT, "messages"), loaded.tokenizer, "refuse")
