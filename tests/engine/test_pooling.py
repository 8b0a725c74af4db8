"""Mean pooling: against a loop, independent of padding, and kept by a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from engine.errors import ModelError
from engine.pooling import classifier_class, mean_pool, mean_pooled_class

SIZE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
KINDS: list[tuple[Any, Any]] = [
    (BertForSequenceClassification, BertConfig(**SIZE, num_labels=3)),
    (RobertaForSequenceClassification, RobertaConfig(**SIZE, num_labels=3, pad_token_id=1, bos_token_id=2, eos_token_id=3)),
    (LlamaForSequenceClassification, LlamaConfig(**SIZE, num_labels=3, pad_token_id=1, bos_token_id=2, eos_token_id=3)),
]


def build(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return mean_pooled_class(kind)(config).eval()


def test_the_mean_counts_unpadded_positions() -> None:
    states = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert torch.allclose(mean_pool(states, mask)[0], states[0].mean(0))
    assert torch.allclose(mean_pool(states, mask)[1], states[1, :2].mean(0))


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_logits_follow_the_mean_and_ignore_padding(kind: Any, config: Any) -> None:
    model = build(kind, config)
    ids = torch.randint(4, 40, (1, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = model.base_model(input_ids=ids)[0]
        head = model.score if hasattr(model, "score") else model.classifier
        expected = head(states.mean(1)[:, None, :] if kind is RobertaForSequenceClassification else states.mean(1))
        padded = torch.cat([ids, torch.full((1, 3), config.pad_token_id or 0)], 1)
        mask = torch.tensor([[1] * 6 + [0] * 3])
        assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-6)
        assert torch.allclose(model(input_ids=padded, attention_mask=mask).logits, expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_a_folder_remembers_its_pooling(kind: Any, config: Any, tmp_path: Path) -> None:
    model = build(kind, config)
    model.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.pooling == "mean" and read.architectures == [kind.__name__]
    loaded = classifier_class(read, AutoModelForSequenceClassification).from_pretrained(tmp_path).eval()
    ids = torch.randint(4, 40, (2, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_loss_is_the_mean_cross_entropy() -> None:
    model = build(*KINDS[0])
    ids, labels = torch.arange(4, 16).reshape(2, 6), torch.tensor([0, 2])
    out = model(input_ids=ids, labels=labels)
    assert out.loss.item() == pytest.approx(-out.logits.log_softmax(-1)[[0, 1], labels].mean().item())


def test_without_a_pooling_the_default_is_used() -> None:
    assert classifier_class(BertConfig(**SIZE), AutoModelForSequenceClassification) is AutoModelForSequenceClassification


def test_poolings_that_cannot_be_built() -> None:
    with pytest.raises(ModelError, match="pooling: 'max'"):
        classifier_class(BertConfig(**SIZE, pooling="max"), AutoModelForSequenceClassification)
    with pytest.raises(ModelError, match="no classification head"):
        mean_pooled_class(BertModel)(BertConfig(**SIZE))
