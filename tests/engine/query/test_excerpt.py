"""The first target token's place in the text, against the offsets of the tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from engine.data.reading import Row
from engine.data.settings import DataSettings
from engine.data.tokens import to_example
from engine.model import from_parts
from engine.query.excerpt import target_start

CHAT = [{"role": "user", "content": "Capital of Peru?"}, {"role": "assistant", "content": "Lima, naïve one."}]


@pytest.mark.parametrize(
    "values",
    [
        {"text": "The capital of Peru is Lima."},
        {"prompt": "The capital of Peru is", "completion": " Lima."},
        {"prompt": "Šī ", "completion": "ž"},
        {"messages": CHAT},
    ],
)
def test_is_the_offset_of_the_first_target(values: dict[str, Any], tiny_gpt2: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast) -> None:
    e = to_example(Row("f", 1, values), from_parts(tiny_gpt2, tokenizer), DataSettings(chat_fallback="roles"), training=True, default_id="0")
    assert e.offsets is not None
    first = int(np.flatnonzero(e.target_mask)[0])
    assert target_start(e.text, e.input_ids, e.target_mask, tokenizer) == e.offsets[first, 0]


def test_added_special_tokens_are_not_in_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = np.array([tokenizer.eos_token_id, *tokenizer("The capital is Lima")["input_ids"]])
    mask = np.arange(len(ids)) >= 3
    assert target_start("The capital is Lima", ids, mask, tokenizer) == len(tokenizer.decode(ids[1:3].tolist()))


def test_is_zero_where_it_cannot_be_told(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = np.array(tokenizer("The capital is Lima")["input_ids"])
    last = np.arange(len(ids)) == len(ids) - 1
    assert target_start("a text cut on the left: The capital is Lima", ids, last, tokenizer) == 0
    assert target_start("The capital is Lima", ids, np.ones(len(ids), np.bool_), tokenizer) == 0
    assert target_start("The capital is Lima", ids, np.zeros(len(ids), np.bool_), tokenizer) == 0
    assert target_start("The capital is Lima", ids, last, None) == 0
