"""Layers run again in the backward pass, so that a batch's graph holds one layer at a time: what lets a large model's gradients fit a small card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@contextmanager
def recomputed_layers(model: nn.Module, active: bool = True) -> Iterator[None]:
    """Inside, every transformer layer keeps its inputs alone and is run again when its gradient is asked for. Values do not change: nothing drops out.

    transformers' own switch only works in training mode, which gradients are never taken in.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if active else []
    before = [layer.__dict__.get("forward") for layer in layers]  # accelerate's, which brings a layer's weights, or none
    for layer in layers:
        layer.forward = partial(_again, layer.forward)
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.forward  # the instance's; the class's is back
            if own is not None:
                layer.forward = own
