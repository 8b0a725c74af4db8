"""A request checked and tokenised, without touching the weights: what can be refused is refused here, naming the field."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.data.chat import render_prompt
from engine.data.encoder import check_unicode, encoder_of
from engine.data.reading import Row
from engine.data.settings import DataKind, DataSettings
from engine.data.tokens import length_limit, to_example
from engine.errors import DataError, EogpError, LimitError, SettingError, UserError
from engine.example import Example
from engine.model import LoadedModel
from engine.query.spec import Generate, Limits, QueryInput, QuerySpec, Truncation
from engine.search.filters import check_filter

_UNBOUNDED = 2**31  # a length limit that no query reaches: truncation is decided afterwards
_QUERY_FIELDS = {
    **{name: DataSettings.model_fields[name].default for name in DataSettings.model_fields if name.endswith("_field")},
    "append_eos": False,
}  # a query's fields have their own names, whatever the store's rows called theirs
FORMS = "text; prompt and completion; prompt and generate; messages; input_ids"


@dataclass(frozen=True, slots=True)
class Pending:
    """A prompt whose completion the model has yet to write. input_ids: what it continues; where: the field, for errors."""

    prompt: str
    input_ids: list[int]
    options: Generate
    query: QueryInput
    where: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for the model: one Example or Pending per input, contrasts last; signs: +1 or -1 for each.

    groups: for each answer, the inputs whose coordinates it sums. n_tokens: what a batch's token budget is charged (expected new tokens included).
    """

    spec: QuerySpec
    inputs: list[Example | Pending]
    signs: list[int]
    groups: list[list[int]]
    n_tokens: int
    timing: dict[str, float] = field(default_factory=dict)


def check_spec(spec: QuerySpec, limits: Limits) -> None:
    """Refuse counts beyond the limits and options that contradict each other. Raises SettingError or LimitError naming the field."""
    if not spec.queries:
        raise SettingError("queries is empty; give at least one query", field="queries")
    for name, given, limit in (
        ("queries", len(spec.queries), limits.queries),
        ("contrast", len(spec.contrast), limits.queries),
        ("top_k", spec.top_k, limits.top_k),
        ("rescore_n", spec.rescore_n, limits.rescore_n),
        ("candidates", spec.candidates if isinstance(spec.candidates, int) else 0, limits.candidates),
    ):
        if given > limit:
            raise LimitError(f"{name} is {given:,}; at most {limit:,} are allowed", field=name)
    for name, given in (("top_k", spec.top_k), ("rescore_n", spec.rescore_n)):
        if given < 1:
            raise LimitError(f"{name} must be at least 1, not {given:,}", field=name)
    for name, value, known in (
        ("score", spec.score, ("influence", "cosine")),
        ("direction", spec.direction, ("proponents", "opponents", "both")),
        ("aggregate", spec.aggregate, ("each", "sum")),
        ("rescore", spec.rescore, (None, "gradients")),
        ("truncation", spec.truncation, ("error", "left", "right")),
    ):
        if value not in known:
            raise SettingError(f"{name} must be one of {', '.join(str(k) for k in known if k)}, not {value!r}", field=name)
    if spec.contrast and spec.aggregate == "each" and len(spec.contrast) not in (1, len(spec.queries)):
        raise SettingError(f"contrast has {len(spec.contrast)} entries for {len(spec.queries)} queries; give one, or one for each", field="contrast")
    if spec.rescore and spec.top_k > spec.rescore_n:
        raise SettingError(
            f"top_k is {spec.top_k} but only rescore_n = {spec.rescore_n} results are re-scored; raise rescore_n or lower top_k", field="rescore_n"
        )
    if spec.filter is not None:
        check_filter(spec.filter)


def prepare(spec: QuerySpec, loaded: LoadedModel, settings: DataSettings, limits: Limits) -> Prepared:
    """Check and tokenise. `settings`: how the store's own rows were read (length limit, chat fallback).

    Raises DataError, LimitError or SettingError whose `field` is a path such as queries[2].prompt.
    """
    check_spec(spec, limits)
    inputs: list[Example | Pending] = []
    for name, group in (("queries", spec.queries), ("contrast", spec.contrast)):
        for i, query in enumerate(group):
            try:
                inputs.append(_prepare_one(query, f"{name}[{i}]", spec.truncation, loaded, settings, limits))
            except UserError as e:
                raise _located(e, f"{name}[{i}]") from None
    n, contrasts = len(spec.queries), list(range(len(spec.queries), len(inputs)))
    if spec.aggregate == "sum":
        groups = [list(range(n)) + contrasts]
    elif len(contrasts) == 1:
        groups = [[i, contrasts[0]] for i in range(n)]
    else:
        groups = [[i, *contrasts[i : i + 1]] for i in range(n)]
    n_tokens = sum(len(x) if isinstance(x, Example) else len(x.input_ids) + x.options.max_new_tokens for x in inputs)
    return Prepared(spec, inputs, [1] * n + [-1] * len(contrasts), groups, n_tokens)


def _located(error: EogpError, where: str) -> EogpError:
    """The same error, saying which query it is about; to_example speaks of rows."""
    if error.field is not None and error.field.startswith(where):
        return error
    name = f"{where}.{error.field}" if error.field in {f.name for f in dataclasses.fields(QueryInput)} else where
    return type(error)(f"{where}: {error.message}", code=error.code, field=name)


def _prepare_one(query: QueryInput, where: str, truncation: Truncation, loaded: LoadedModel, settings: DataSettings, limits: Limits) -> Example | Pending:
    values, kind = _values(query, where, loaded)
    if query.generate is not None:
        return _pending(query, where, truncation, loaded, settings, limits)
    return tokenise(values, kind, where, truncation, loaded, settings)


def tokenise(values: dict[str, Any], kind: DataKind, where: str, truncation: Truncation, loaded: LoadedModel, settings: DataSettings) -> Example:
    """One query as an Example, through the function that tokenised the training rows; too long ones by the policy."""
    limit = length_limit(loaded, settings)
    roomy = dataclasses.replace(loaded, max_length=_UNBOUNDED)
    own = settings.model_copy(update={**_QUERY_FIELDS, "kind": kind, "max_length": _UNBOUNDED})
    example = to_example(Row(where, 0, values), roomy, own, training=False, default_id=where)
    if len(example) <= limit:
        return example
    if truncation == "error":
        raise LimitError(
            f"{where}: {len(example):,} tokens; at most {limit:,} are allowed; shorten it, or say truncation left or right", code="too-long", field=where
        )
    if kind == "classification":
        if truncation == "left":
            raise SettingError("a classifier's input can only be truncated on the right", field="truncation")
        return to_example(Row(where, 0, values), loaded, own.model_copy(update={"max_length": limit}), training=False, default_id=where)
    return _truncate(example, limit, truncation, where)


def _truncate(example: Example, limit: int, side: Truncation, where: str) -> Example:
    keep = slice(len(example) - limit, None) if side == "left" else slice(0, limit)
    targets = example.target_mask[keep].copy()
    targets[0] = False
    if not targets.any():
        raise DataError(f"{where}: no target token is left after truncation on the {side}", field=where)
    assert not isinstance(example.labels, int)
    offsets = None if example.offsets is None else example.offsets[keep]
    return dataclasses.replace(example, input_ids=example.input_ids[keep], labels=example.labels[keep], target_mask=targets, offsets=offsets, truncated=True)


def _values(query: QueryInput, where: str, loaded: LoadedModel) -> tuple[dict[str, Any], DataKind]:
    """The query as a row, and its kind. Raises SettingError where it is of no form, or of two."""
    given = {f.name for f in dataclasses.fields(query) if getattr(query, f.name) is not None}
    kinds: dict[frozenset[str], DataKind] = {
        frozenset({"text"}): "text",
        frozenset({"text", "label"}): "classification",
        frozenset({"prompt", "completion"}): "completion",
        frozenset({"prompt", "generate"}): "completion",
        frozenset({"messages"}): "messages",
        frozenset({"messages", "generate"}): "messages",
        frozenset({"input_ids"}): "tokens",
        frozenset({"input_ids", "labels"}): "tokens",
    }
    kind = kinds.get(frozenset(given))
    classifier = loaded.task == "sequence-classification"
    if classifier and kind != "classification":
        raise SettingError(f"{where}: this model classifies; give text and label", field=where)
    if kind is None or (not classifier and kind == "classification"):
        has = f"has {', '.join(sorted(given))}" if given else "is empty"
        raise SettingError(f"{where} {has}; give exactly one of: {FORMS}", field=where)
    return {name: getattr(query, name) for name in given if name != "generate"}, kind


def _pending(query: QueryInput, where: str, truncation: Truncation, loaded: LoadedModel, settings: DataSettings, limits: Limits) -> Pending:
    options = query.generate
    assert options is not None
    for name, given, low, high in (
        ("max_new_tokens", options.max_new_tokens, 1, limits.new_tokens),
        ("temperature", options.temperature, 0, 10),
        ("top_p", options.top_p, 1e-6, 1),
        ("seed", options.seed, 0, 2**63 - 1),
    ):
        if not low <= given <= high:  # NaN fails both
            raise LimitError(f"{where}.generate.{name} must lie between {low:g} and {high:g}", field=f"{where}.generate.{name}")
    if query.messages is not None:
        prompt, special = _chat_prompt(query, where, loaded, settings), not getattr(loaded.tokenizer, "chat_template", None)
    else:
        prompt, special = str(query.prompt), True
        check_unicode(prompt, f"{where}.prompt")
    ids = encoder_of(loaded.tokenizer).encode(prompt, add_special_tokens=special).ids
    room = length_limit(loaded, settings) - options.max_new_tokens
    if len(ids) == 0:
        raise DataError(f"{where}: the prompt has no token, so there is nothing to continue", field=where)
    if len(ids) > room:
        if truncation == "error" or room < 1:
            raise LimitError(
                f"{where}: {len(ids):,} prompt tokens and {options.max_new_tokens:,} new ones exceed {room + options.max_new_tokens:,}; "
                "shorten it, lower max_new_tokens, or say truncation left or right",
                code="too-long",
                field=where,
            )
        ids = ids[-room:] if truncation == "left" else ids[:room]
    return Pending(prompt, np.asarray(ids).tolist(), options, query, where)


def _chat_prompt(query: QueryInput, where: str, loaded: LoadedModel, settings: DataSettings) -> str:
    messages = query.messages
    good = isinstance(messages, list) and messages and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages)
    if not good or not messages or messages[-1].get("role") == "assistant":
        raise DataError(f"{where}.messages must be a list of {{role, content}} that ends before the assistant's turn", field=f"{where}.messages")
    for i, message in enumerate(messages):
        check_unicode(message["content"], f"{where}.messages[{i}].content")
    try:
        return render_prompt(messages, loaded.tokenizer, settings.chat_fallback)
    except Exception as e:  # a template may raise anything
        raise DataError(f"{where}: the chat template refuses these messages: {type(e).__name__}", field=f"{where}.messages") from None
