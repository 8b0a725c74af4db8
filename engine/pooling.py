"""Sequence classifiers that pool the mean of their token states, recorded as `pooling: mean` in their configuration."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.modeling_outputs import SequenceClassifierOutput

from engine.errors import ModelError

MEAN = "mean"


def mean_pool(states: Tensor, mask: Tensor) -> Tensor:
    """(B, T, d) states and (B, T) mask of the positions that count -> (B, d), their mean."""
    weights = mask.to(states.dtype)[:, :, None]
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


def classify(model: Any, pooled: Tensor) -> Tensor:
    """(B, d) pooled states through the model's dropout and head -> (B, C) logits."""
    head = head_of(model)
    dropout = getattr(model, "dropout", None)
    if _plain(head):
        return head(dropout(pooled) if isinstance(dropout, nn.Module) else pooled)
    return head(pooled[:, None, :])  # a head that reads the first position, such as RoBERTa's


def head_of(model: Any) -> nn.Module:
    """The classification head: `score` or `classifier`. Raises ModelError where there is none that takes one state per example."""
    for name in ("score", "classifier"):
        head = getattr(model, name, None)
        if isinstance(head, nn.Module) and (_plain(head) or hasattr(_unwrapped(head), "out_proj")):
            return head
    raise ModelError(f"{type(model).__name__}: no classification head that can take the mean of the token states; use --pooling model")


def _unwrapped(head: nn.Module) -> nn.Module:
    return getattr(head, "original_module", head)


def _plain(head: nn.Module) -> bool:
    return isinstance(_unwrapped(head), nn.Linear)


@cache
def mean_pooled_class(base: type) -> type:
    """A subclass of a `...ForSequenceClassification` class, of the same name, whose forward classifies the mean of the unpadded token states.

    A pooler (BERT's tanh layer over the first token) is dropped: nothing would read it. The class records itself in `config.pooling`.
    """

    class MeanPooled(base):
        _keys_to_ignore_on_load_unexpected = (r"(^|\.)pooler\.",)

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            if getattr(self.base_model, "pooler", None) is not None:
                self.base_model.pooler = None
            head_of(self)
            config.pooling = MEAN

        def forward(
            self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
        ) -> SequenceClassifierOutput:
            states = self.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)[0]
            mask = torch.ones(states.shape[:2], device=states.device) if attention_mask is None else attention_mask
            logits = classify(self, mean_pool(states, mask))
            loss = None if labels is None else functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    MeanPooled.__name__, MeanPooled.__qualname__, MeanPooled.__module__ = base.__name__, base.__qualname__, base.__module__
    return MeanPooled


def classifier_class(config: Any, default: Any) -> Any:
    """What to call `from_pretrained` on: the mean-pooled class where the configuration says `pooling: mean`, else `default`. Raises ModelError for an unknown pooling."""
    pooling = getattr(config, "pooling", None)
    if pooling is None:
        return default
    if pooling != MEAN or type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(f"the model's configuration says pooling: {pooling!r}, which this version cannot build for {type(config).__name__}")
    return mean_pooled_class(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)])
