"""Saved bytes: each storage once, weights left out, and the parts add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from indexer.finetune.saved import SavedBytes


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_total_is_a_naive_count_of_storages(build: Callable[[str], Any], name: str) -> None:
    model = build(name)
    ids = torch.randint(2, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(input_ids=ids).logits.sum()
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    expected = sum(n for pointer, n in storages.items() if pointer not in weights)
    with SavedBytes(model) as saved:
        model(input_ids=ids).logits.sum()
    assert saved.total == expected > 0
    assert saved.total == saved.token_wise + saved.attention + saved.outside
    assert min(saved.token_wise, saved.attention) > 0


def test_a_linear_layer_saves_its_input(build: Callable[[str], Any]) -> None:
    """Every gate_proj of the Llama reads what no other module saves first: its norm's output, B x T x d floats."""
    model = build("llama")
    with SavedBytes(model) as saved:
        model(input_ids=torch.ones(2, 9, dtype=torch.int64))
    assert saved.by_module["token_wise model.layers.0.mlp.gate_proj"] == 2 * 9 * 16 * 4


def test_hooks_are_gone_afterwards(build: Callable[[str], Any]) -> None:
    model = build("gpt2")
    with SavedBytes(model):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
