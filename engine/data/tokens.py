"""Rows to examples: token ids, and which of them are targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.chat import check_messages, render_chat
from engine.data.encoder import Encoded, check_unicode, encoder_of
from engine.data.metadata import clean_metadata
from engine.data.reading import Row, json_type
from engine.data.settings import DataKind, DataSettings
from engine.errors import DataError
from engine.example import Example, Kind
from engine.model import LoadedModel

IGNORED_LABEL = -100
DEFAULT_MAX_LENGTH = 2048
_ID_LIMIT = 1_000


def to_example(row: Row, loaded: LoadedModel, settings: DataSettings, *, training: bool, default_id: str = "") -> Example:
    """Tokenise one row; the same function for training rows and queries, which differ in the end-of-sequence token alone.

    `default_id` is used where the settings name no id field. Raises DataError with the reason, which never quotes the text.
    """
    values = row.values
    kind = kind_of(values, loaded, settings) if settings.kind == "auto" else settings.kind
    if (kind == "classification") != (loaded.task == "sequence-classification"):
        raise DataError(f"rows of kind {kind} do not fit a model for {loaded.task}", field="kind")
    limit = length_limit(loaded, settings)
    make = {"text": _text, "completion": _completion, "messages": _messages, "tokens": _tokens, "classification": _classification}[kind]
    parts = make(values, loaded, settings, limit, training)
    if kind != "classification":
        _require_target(parts, loaded)
    used = {*fields_of(kind, settings), *([settings.id_field] if settings.id_field != "auto" else ["id"] if default_id == "" else [])}
    return Example(
        id=_id(values, settings, default_id),
        input_ids=parts.encoded.ids,
        labels=parts.labels if parts.labels is not None else parts.encoded.ids,
        target_mask=parts.targets,
        text=parts.text,
        offsets=parts.encoded.offsets if kind != "tokens" else None,
        metadata=clean_metadata({k: v for k, v in values.items() if k not in used}),
        truncated=parts.truncated,
        kind=kind,
    )


def length_limit(loaded: LoadedModel, settings: DataSettings) -> int:
    """Longest example in tokens: the setting, else min(context, 2,048). Raises DataError for a setting beyond the context."""
    if settings.max_length is None:
        return min(loaded.max_length, DEFAULT_MAX_LENGTH)
    if settings.max_length > loaded.max_length:
        raise DataError(f"max_length {settings.max_length:,} exceeds the model's context of {loaded.max_length:,} tokens", field="max_length")
    return settings.max_length


def fields_of(kind: Kind, settings: DataSettings) -> tuple[str, ...]:
    """The fields that a row of this kind is made of; all others are metadata."""
    return {
        "text": (settings.text_field,),
        "completion": (settings.prompt_field, settings.completion_field),
        "messages": (settings.messages_field, "tools"),
        "tokens": (settings.input_ids_field, settings.labels_field, "attention_mask"),
        "classification": (settings.text_field, settings.label_field),
    }[kind]


def kind_of(values: dict[str, Any], loaded: LoadedModel, settings: DataSettings) -> Kind:
    """What a row is, by the fields that it has. Raises DataError listing what was looked for."""
    if loaded.task == "sequence-classification":
        return "classification"
    if settings.messages_field in values:
        return "messages"
    if settings.prompt_field in values and settings.completion_field in values:
        return "completion"
    if settings.input_ids_field in values:
        return "tokens"
    if settings.text_field in values:
        return "text"
    raise DataError(
        f"none of the fields {settings.messages_field!r}, {settings.prompt_field!r} and {settings.completion_field!r}, "
        f"{settings.input_ids_field!r}, {settings.text_field!r} is there; name yours with --text-field and its like",
        field=settings.text_field,
    )


def resolve_kind(row: Row, loaded: LoadedModel, settings: DataSettings) -> DataSettings:
    """The settings with `kind`, `id_field` and `max_length` fixed by the first row that can be read, so that a later row cannot change its meaning.

    Without an id the field stays `auto`, which then means running numbers.
    """
    kind: DataKind = settings.kind if settings.kind != "auto" else kind_of(row.values, loaded, settings)
    id_field = "id" if settings.id_field == "auto" and "id" in row.values else settings.id_field
    return settings.model_copy(update={"kind": kind, "id_field": id_field, "max_length": length_limit(loaded, settings)})


class _Parts:
    """What a kind's tokeniser found."""

    __slots__ = ("encoded", "labels", "targets", "text", "truncated")

    def __init__(self, text: str, encoded: Encoded, targets: NDArray[np.bool_], truncated: bool, labels: NDArray[np.int64] | int | None = None) -> None:
        if len(targets) and not isinstance(labels, int):
            targets[0] = False
        self.text, self.encoded, self.targets, self.truncated, self.labels = text, encoded, targets, truncated, labels


def _text(values: dict[str, Any], loaded: LoadedModel, settings: DataSettings, limit: int, training: bool) -> _Parts:
    text = _string(values, settings.text_field)
    encoded = encoder_of(loaded.tokenizer).encode(text)
    kept = encoded.keep(np.arange(min(len(encoded), limit)))
    return _Parts(text, kept, np.ones(len(kept), np.bool_), len(encoded) > limit)


def _completion(values: dict[str, Any], loaded: LoadedModel, settings: DataSettings, limit: int, training: bool) -> _Parts:
    """One string, so that tokens may span the border; a token is a target iff its end lies beyond it."""
    prompt = _string(values, settings.prompt_field, empty=True)
    completion = _string(values, settings.completion_field)
    encoder = encoder_of(loaded.tokenizer)
    text = prompt + completion
    encoded = encoder.encode(text)
    targets = (encoded.offsets[:, 1] > len(prompt)) & ~encoded.added
    if training and settings.append_eos:
        if encoder.eos is None:
            raise DataError("the tokenizer has no end-of-sequence token to append; say --no-append-eos", field="append_eos")
        encoded, targets = _append(encoded, encoder.eos, len(text)), np.append(targets, True)
    return _left(text, encoded, targets, limit)


def _messages(values: dict[str, Any], loaded: LoadedModel, settings: DataSettings, limit: int, training: bool) -> _Parts:
    field = settings.messages_field
    if field not in values:
        raise DataError(f"field {field!r} is missing", field=field)
    messages = check_messages(values[field], field)
    tools = values.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"field 'tools' is {json_type(tools)}, not a list", field="tools")
    encoder = encoder_of(loaded.tokenizer)
    chat = render_chat(messages, loaded.tokenizer, settings.chat_fallback, tools or None)
    by_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    encoded = encoder.encode(chat.text, add_special_tokens=not by_template)  # a template writes its own special tokens
    starts, ends = encoded.offsets[:, 0], encoded.offsets[:, 1]
    targets = np.zeros(len(encoded), np.bool_)
    for start, end in chat.spans:
        targets |= (ends > start) & (starts < end) & ~encoded.added
    if not by_template and training and settings.append_eos and encoder.eos is not None and messages[-1]["role"] == "assistant":
        encoded, targets = _append(encoded, encoder.eos, len(chat.text)), np.append(targets, True)
    return _left(chat.text, encoded, targets, limit)


def _tokens(values: dict[str, Any], loaded: LoadedModel, settings: DataSettings, limit: int, training: bool) -> _Parts:
    field = settings.input_ids_field
    ids = _integers(values, field, 0, loaded.vocab_size)
    labels = ids
    if values.get(settings.labels_field) is not None:
        labels = _integers(values, settings.labels_field, IGNORED_LABEL, loaded.vocab_size)
        if len(labels) != len(ids):
            raise DataError(f"field {settings.labels_field!r} has {len(labels):,} entries for {len(ids):,} token ids", field=settings.labels_field)
        if ((labels < 0) & (labels != IGNORED_LABEL)).any():
            raise DataError(f"field {settings.labels_field!r} has a negative entry other than {IGNORED_LABEL}", field=settings.labels_field)
    if values.get("attention_mask") is not None:
        mask = _integers(values, "attention_mask", 0, 2)
        if len(mask) != len(ids):
            raise DataError(f"field 'attention_mask' has {len(mask):,} entries for {len(ids):,} token ids", field="attention_mask")
        ids, labels = ids[mask == 1], labels[mask == 1]
    text = "" if loaded.tokenizer is None else str(loaded.tokenizer.decode(ids.tolist()))
    kept, scored = ids[:limit], labels[:limit]
    targets = scored != IGNORED_LABEL
    encoded = Encoded(kept, np.zeros((len(kept), 2), np.int64), np.zeros(len(kept), np.bool_))
    return _Parts(text, encoded, targets, len(ids) > limit, np.where(targets, scored, kept))


def _classification(values: dict[str, Any], loaded: LoadedModel, settings: DataSettings, limit: int, training: bool) -> _Parts:
    text = _string(values, settings.text_field)
    label = _label(values, loaded, settings.label_field)
    encoded = encoder_of(loaded.tokenizer).encode_classified(text)
    keep = np.arange(min(len(encoded), limit))
    if len(encoded) > limit and encoded.added[-1]:
        keep[-1] = len(encoded) - 1  # [SEP] stays last
    kept = encoded.keep(keep)
    if not len(kept) or kept.added.all():
        raise DataError(f"field {settings.text_field!r} has no token of its own", field=settings.text_field)
    return _Parts(text, kept, np.zeros(len(kept), np.bool_), len(encoded) > limit, label)


def _label(values: dict[str, Any], loaded: LoadedModel, field: str) -> int:
    if field not in values:
        raise DataError(f"field {field!r} is missing", field=field)
    value, config = values[field], loaded.model.config
    if isinstance(value, str):
        known = getattr(config, "label2id", None) or {}
        if value not in known:
            raise DataError(f"field {field!r} is not a label that the model knows ({', '.join(map(str, list(known)[:8]))})", field=field)
        return int(known[value])
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"field {field!r} is {json_type(value)}, not a class number or name", field=field)
    if not 0 <= value < config.num_labels:
        raise DataError(f"field {field!r} is outside the model's {config.num_labels} classes", field=field)
    return value


def _append(encoded: Encoded, token: int, at: int) -> Encoded:
    return Encoded(np.append(encoded.ids, token), np.vstack([encoded.offsets, [[at, at]]]), np.append(encoded.added, True))


def _left(text: str, encoded: Encoded, targets: NDArray[np.bool_], limit: int) -> _Parts:
    """Truncate on the left, keeping a leading token that the tokenizer added; a completion longer than the limit keeps its start instead.

    What is kept then begins with the token before the first target, which predicts it.
    """
    excess = len(encoded) - limit
    if excess <= 0:
        return _Parts(text, encoded, targets, False)
    head = int(encoded.added[0]) if limit > 2 else 0
    first = int(np.argmax(targets)) if targets.any() else len(targets)
    cut = max(head, min(head + excess, first - 1)) if targets[first - len(targets) :].all() else head + excess
    keep = np.concatenate([np.arange(head), np.arange(cut, len(encoded))[: limit - head]])
    return _Parts(text, encoded.keep(keep), targets[keep].copy(), True)


def _require_target(parts: _Parts, loaded: LoadedModel) -> None:
    scored = parts.encoded.ids[parts.targets]
    if len(scored) == 0:
        raise DataError("no target token after truncation" if parts.truncated else "no target token", field="text")
    if loaded.tokenizer is not None and np.isin(scored, encoder_of(loaded.tokenizer).special).all():
        raise DataError("no target token other than special tokens", field="text")


def _string(values: dict[str, Any], field: str, *, empty: bool = False) -> str:
    if field not in values:
        raise DataError(f"field {field!r} is missing", field=field)
    value = values[field]
    if not isinstance(value, str):
        raise DataError(f"field {field!r} is {json_type(value)}, not a string", field=field)
    check_unicode(value, field)
    if not empty and not value.strip():
        raise DataError(f"field {field!r} is {'empty' if value == '' else 'only white space'}", field=field)
    return value


def _integers(values: dict[str, Any], field: str, low: int, high: int) -> NDArray[np.int64]:
    if field not in values:
        raise DataError(f"field {field!r} is missing", field=field)
    value = values[field]
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
        raise DataError(f"field {field!r} is {json_type(value)}, not a list of integers", field=field)
    if len(value) == 0:
        raise DataError(f"field {field!r} is empty", field=field)
    for i, entry in enumerate(value):
        if isinstance(entry, bool) or not isinstance(entry, int | np.integer):
            raise DataError(f"field {field!r} has {json_type(entry)} at {i}, not an integer", field=field)
        if not low <= entry < high:
            raise DataError(f"field {field!r} has an entry outside {low:,} to {high - 1:,} at {i}", field=field)
    return np.array(value, np.int64)


def _id(values: dict[str, Any], settings: DataSettings, default: str) -> str:
    field = settings.id_field
    if field == "auto":
        return default
    if field not in values:
        raise DataError(f"field {field!r} is missing", field=field)
    value = values[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"field {field!r} is {json_type(value)}, not a string or an integer", field=field)
    text = str(value)
    check_unicode(text, field)
    if not text or len(text) > _ID_LIMIT:
        raise DataError(f"field {field!r} is {'empty' if not text else f'longer than {_ID_LIMIT:,} characters'}", field=field)
    return text
