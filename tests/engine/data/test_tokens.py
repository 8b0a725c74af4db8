"""Which tokens of a row are targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

from engine.data.reading import Row
from engine.data.settings import DataSettings
from engine.data.tokens import resolve_kind, to_example
from engine.errors import DataError
from engine.example import Example
from engine.model import LoadedModel, from_parts


@pytest.fixture
def loaded(tiny_gpt2: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast) -> LoadedModel:
    return from_parts(tiny_gpt2, tokenizer)


def example(loaded: LoadedModel, values: dict[str, Any], training: bool = True, **settings: Any) -> Example:
    return to_example(Row("f", 1, values), loaded, DataSettings(**settings), training=training, default_id="0")


def target_text(loaded: LoadedModel, e: Example) -> str:
    return str(loaded.tokenizer.decode(e.input_ids[e.target_mask]))


def test_text_has_loss_on_all_tokens_but_the_first(loaded: LoadedModel) -> None:
    e = example(loaded, {"text": "The capital of Peru is Lima.", "year": 3})
    assert e.kind == "text" and e.metadata == {"year": 3} and e.id == "0"
    assert not e.target_mask[0] and e.target_mask[1:].all()
    assert loaded.tokenizer.decode(e.input_ids) == e.text
    assert e.offsets is not None and e.offsets[0, 0] == 0 and e.offsets[-1, 1] == len(e.text)
    np.testing.assert_array_equal(e.offsets[1:, 0], e.offsets[:-1, 1])  # white space belongs to a token


def test_text_is_truncated_on_the_right(loaded: LoadedModel) -> None:
    whole = example(loaded, {"text": "The capital of Peru is Lima."})
    cut = example(loaded, {"text": "The capital of Peru is Lima."}, max_length=4)
    assert cut.truncated and not whole.truncated
    np.testing.assert_array_equal(cut.input_ids, whole.input_ids[:4])


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("The capital of Peru is", " Lima."),
        ("The capital of Peru is ", "Lima."),
        ("Peru:\n", "\n\nLima"),
        ("Peru:", " \n Lima "),
        ("", "Lima"),
        ("naïve Ünïcode 🎉", "🎉 ünd"),
    ],
)
def test_completion_carries_the_loss_and_ends_with_eos(loaded: LoadedModel, prompt: str, completion: str) -> None:
    e = example(loaded, {"prompt": prompt, "completion": completion})
    eos = loaded.tokenizer.eos_token_id
    assert e.input_ids[-1] == eos and e.target_mask[-1]
    expected = loaded.tokenizer(prompt + completion, return_offsets_mapping=True)
    np.testing.assert_array_equal(e.input_ids[:-1], expected["input_ids"])
    assert e.offsets is not None
    np.testing.assert_array_equal(e.target_mask[1:-1], e.offsets[1:-1, 1] > len(prompt))
    said = target_text(loaded, e).removesuffix(loaded.tokenizer.eos_token)
    assert said.endswith(completion) if prompt else completion.endswith(said)
    asked = example(loaded, {"prompt": prompt, "completion": completion}, training=False)
    np.testing.assert_array_equal(asked.input_ids, e.input_ids[:-1])
    assert example(loaded, {"prompt": prompt, "completion": completion}, append_eos=False).input_ids.tolist() == asked.input_ids.tolist()


def test_long_prompt_is_truncated_on_the_left(loaded: LoadedModel) -> None:
    values = {"prompt": "The capital of France is Paris. " * 20, "completion": " Lima."}
    e = example(loaded, values, max_length=16)
    assert e.truncated and len(e) == 16
    assert target_text(loaded, e) == " Lima.<|endoftext|>"
    full = loaded.tokenizer(values["prompt"] + values["completion"])["input_ids"] + [0]
    assert e.input_ids.tolist() == full[-16:]


def test_long_completion_keeps_its_start(loaded: LoadedModel) -> None:
    values = {"prompt": "Say it: ", "completion": "The capital of France is Paris. " * 20}
    e = example(loaded, values, max_length=16)
    assert len(e) == 16 and e.target_mask[1:].all() and not e.target_mask[0]
    assert values["completion"].startswith(target_text(loaded, e))


def test_token_ids_with_labels(loaded: LoadedModel) -> None:
    e = example(loaded, {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 9, 8]})
    assert e.kind == "tokens" and e.target_mask.tolist() == [False, False, True, True]
    assert isinstance(e.labels, np.ndarray) and e.labels.tolist() == [5, 6, 9, 8]
    assert example(loaded, {"input_ids": [5, 6, 7]}).target_mask.tolist() == [False, True, True]
    assert example(loaded, {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}).input_ids.tolist() == [5, 6, 7]


def test_the_tokenizers_own_eos_is_not_kept(loaded: LoadedModel) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = loaded.tokenizer.backend_tokenizer.__class__.from_str(loaded.tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    loaded.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    e = example(loaded, {"text": "Lima"})
    assert e.input_ids[0] == 0 and e.input_ids[-1] != 0 and e.target_mask[1:].all()
    asked = example(loaded, {"prompt": "is", "completion": " Lima"}, training=False)
    assert asked.input_ids[0] == 0 and asked.input_ids[-1] != 0
    cut = example(loaded, {"prompt": "The capital of France is " * 20, "completion": " Lima"}, max_length=12)
    assert cut.input_ids[0] == 0 and target_text(loaded, cut) == " Lima<|endoftext|>"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "none of the fields"),
        ({"text": None}, "null, not a string"),
        ({"text": 3}, "a number, not a string"),
        ({"text": ""}, "empty"),
        ({"text": " \n\t"}, "white space"),
        ({"text": "\ud800 x"}, "lone surrogate"),
        ({"text": "<|endoftext|><|endoftext|>"}, "special tokens"),
        ({"text": "a"}, "no target token"),
        ({"prompt": "a", "completion": None}, "null, not a string"),
        ({"prompt": None, "completion": "b"}, "null, not a string"),
        ({"prompt": "a", "completion": ""}, "empty"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [1, 320]}, "outside 0 to 319 at 1"),
        ({"input_ids": [1, -1]}, "outside"),
        ({"input_ids": [1, 2.5]}, "a number at 1, not an integer"),
        ({"input_ids": [1, True]}, "a boolean at 1"),
        ({"input_ids": "1 2"}, "not a list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 entries for 2"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no target token"),
        ({"input_ids": [1, 2], "labels": [-100, -5]}, "negative entry"),
        ({"text": "Lima is", "m": b"raw"}, "cannot be kept"),
        ({"text": "Lima is", "m": "\udfff"}, "lone surrogate"),
    ],
)
def test_bad_rows_say_why(loaded: LoadedModel, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        example(loaded, values)


def test_ids(loaded: LoadedModel) -> None:
    assert example(loaded, {"text": "Lima is", "id": 7}, id_field="id").id == "7"
    assert example(loaded, {"text": "Lima is", "id": 7}).metadata == {"id": 7}
    for bad in (None, 1.5, True, "", [1], "x" * 1001, "\ud800"):
        with pytest.raises(DataError, match="'id'"):
            example(loaded, {"text": "Lima is", "id": bad}, id_field="id")
    with pytest.raises(DataError, match="missing"):
        example(loaded, {"text": "Lima is"}, id_field="id")


def test_the_first_row_fixes_what_rows_mean(loaded: LoadedModel) -> None:
    settings = resolve_kind(Row("f", 1, {"prompt": "a", "completion": "b", "id": 1}), loaded, DataSettings())
    assert (settings.kind, settings.id_field, settings.max_length) == ("completion", "id", 64)
    with pytest.raises(DataError, match="'prompt' is missing"):
        to_example(Row("f", 2, {"text": "Lima is", "id": 2}), loaded, settings, training=True)


def test_max_length_beyond_the_context_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(DataError, match="exceeds the model's context of 64"):
        example(loaded, {"text": "Lima is"}, max_length=65)


def test_classification(loaded: LoadedModel) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        id2label={0: "bad", 1: "good", 2: "so"},
        label2id={"bad": 0, "good": 1, "so": 2},
    )
    classifier = from_parts(BertForSequenceClassification(config), loaded.tokenizer)
    e = example(classifier, {"text": "Lima is", "label": "good"})
    assert e.kind == "classification" and e.labels == 1 and not e.target_mask.any() and e.n_targets == 1
    assert example(classifier, {"text": "Lima is", "label": 2}).labels == 2
    for label, reason in ((3, "outside the model's 3 classes"), (-1, "outside"), (None, "null"), (True, "boolean"), (1.0, "a number"), ("ugly", "not a label")):
        with pytest.raises(DataError, match=reason):
            example(classifier, {"text": "Lima is", "label": label})
    with pytest.raises(DataError, match="'label' is missing"):
        example(classifier, {"text": "Lima is"})
    with pytest.raises(DataError, match="do not fit a model"):
        example(loaded, {"text": "Lima is", "label": 1}, kind="classification")
