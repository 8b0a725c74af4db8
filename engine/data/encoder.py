"""Text to token ids with exact character offsets, apart from the tokenizer that others share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.errors import DataError, ModelError


@dataclass(frozen=True, slots=True)
class Encoded:
    """ids (T,) int64; offsets (T, 2) int64 character spans, white space included; added (T,) bool: put there by the tokenizer, not from the text."""

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    added: NDArray[np.bool_]

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def keep(self, chosen: NDArray[Any]) -> Encoded:
        """The tokens chosen by a boolean mask or positions."""
        return Encoded(self.ids[chosen], self.offsets[chosen], self.added[chosen])


class Encoder:
    """A private copy of a fast tokenizer, without truncation or padding, whose offsets are not trimmed of white space.

    Trimmed offsets would put a token such as '.\\n\\n' on the wrong side of the border between prompt and completion.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError("the tokenizer gives no character offsets; a fast tokenizer (tokenizer.json) is needed", field="tokenizer")
        description = json.loads(backend.to_str())
        _keep_spaces(description)
        self._backend = Tokenizer.from_str(json.dumps(description))
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos: int | None = tokenizer.eos_token_id
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = np.array(sorted({*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}), np.int64)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoded:
        """Raises DataError where the text is not valid Unicode."""
        check_unicode(text, "text")
        found = self._backend.encode(text, add_special_tokens=add_special_tokens)
        offsets = np.array(found.offsets, np.int64).reshape(-1, 2)
        encoded = Encoded(np.array(found.ids, np.int64), offsets, np.array(found.special_tokens_mask, np.bool_))
        while add_special_tokens and self.eos is not None and len(encoded) and encoded.added[-1] and encoded.ids[-1] == self.eos:
            encoded = encoded.keep(np.arange(len(encoded) - 1))  # who appends EOS is said by --append-eos, not by the tokenizer
        return encoded

    def encode_classified(self, text: str) -> Encoded:
        """As `encode`, keeping every token that the tokenizer adds at the end ([SEP])."""
        check_unicode(text, "text")
        found = self._backend.encode(text)
        return Encoded(np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2), np.array(found.special_tokens_mask, np.bool_))


def check_unicode(text: str, where: str) -> None:
    """Raises DataError on a lone surrogate, which no encoding can carry."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"field {where!r} has a lone surrogate, which is not valid Unicode", field=where) from None


def _keep_spaces(node: Any) -> None:
    """Switch `trim_offsets` off wherever it occurs in a tokenizer's description."""
    if isinstance(node, dict):
        if "trim_offsets" in node:
            node["trim_offsets"] = False
        for value in node.values():
            if isinstance(value, dict | list):
                _keep_spaces(value)
    elif isinstance(node, list):
        for value in node:
            _keep_spaces(value)


_ENCODERS: WeakKeyDictionary[Any, Encoder] = WeakKeyDictionary()


def encoder_of(tokenizer: Any) -> Encoder:
    """The tokenizer's encoder, made once."""
    if tokenizer is None:
        raise ModelError("the model has no tokenizer; name one with --tokenizer, or give rows as input_ids", field="tokenizer")
    if tokenizer not in _ENCODERS:
        _ENCODERS[tokenizer] = Encoder(tokenizer)
    return _ENCODERS[tokenizer]
