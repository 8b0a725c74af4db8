"""Oracles for gradients: random examples, and a plain loop of autograd, one example at a time, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from engine.capture import Capture
from engine.example import Example, collate
from engine.experts import ExpertLinear
from engine.loss import Labels
from engine.model import LoadedModel
from engine.modules import TrackedModule, bare

Gradients = dict[str, Tensor]


def _examples(vocab: int, lengths: Sequence[int] = (9, 5, 12, 2), prompt: int = 2, seed: int = 0, classes: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    made = []
    for i, n in enumerate(lengths):
        ids = rng.integers(1, vocab, n)
        mask = np.arange(n) >= min(max(prompt, 1), n - 1)
        label: Any = int(rng.integers(classes)) if classes else ids
        made.append(Example(f"e{i}", ids, label, np.zeros(n, np.bool_) if classes else mask, ""))
    return made


def _weight_gradient(t: TrackedModule) -> Tensor:
    """(d_out, d_in) from a module's own .grad, the bias as last column."""
    if isinstance(t.module, ExpertLinear):
        experts, name, e = t.module.owner[0], t.module.weight_name, t.module.index
        fused = getattr(experts, name).grad[e]
        fused = fused.T if experts.is_transposed else fused
        return torch.cat([fused, getattr(experts, f"{name}_bias").grad[e][:, None]], dim=1) if t.bias else fused
    weight = t.module.weight.grad
    assert weight is not None, t.name
    g = weight.T if isinstance(t.module, Conv1D) else weight
    return torch.cat([g, t.module.bias.grad[:, None]], dim=1) if t.bias else g


def _autograd(loaded: LoadedModel, example: Example, tracked: Sequence[TrackedModule]) -> tuple[Gradients, float]:
    """Gradients of the summed loss of one example, by loss.backward(), and the loss."""
    model = bare(loaded.model)
    model.requires_grad_(True)
    model.zero_grad()
    ids = torch.from_numpy(example.input_ids)[None].to(loaded.device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    if isinstance(example.labels, int):
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([example.labels], device=logits.device))
    else:
        on = torch.from_numpy(example.target_mask[1:])
        loss = torch.nn.functional.cross_entropy(logits[0, :-1][on], ids[0, 1:][on], reduction="sum")
    loss.backward()
    found = {t.name: _weight_gradient(t).clone() for t in tracked}
    model.zero_grad()
    model.requires_grad_(False)
    return found, float(loss.detach())


def _captured(loaded: LoadedModel, examples: Sequence[Example], tracked: Sequence[TrackedModule], labels: Labels = "true", seed: int = 0) -> list[Gradients]:
    """Per-example gradients from a and delta of one padded batch."""
    found: dict[str, Tensor] = {}

    def consume(t: TrackedModule, a: Tensor, delta: Tensor) -> None:
        assert t.name not in found, f"{t.name} came twice"
        assert a.shape[2] == t.d_in and delta.shape[2] == t.d_out
        found[t.name] = torch.einsum("bto,bti->boi", delta, a)

    Capture(loaded, tracked).run(collate(examples, range(len(examples)), loaded.pad_id, loaded.device), consume, labels=labels, seed=seed, check=True)
    return [{name: g[i] for name, g in found.items()} for i in range(len(examples))]


@pytest.fixture(scope="session")
def make_examples() -> Callable[..., list[Example]]:
    return _examples


@pytest.fixture(scope="session")
def autograd_gradients() -> Callable[..., tuple[Gradients, float]]:
    return _autograd


@pytest.fixture(scope="session")
def captured_gradients() -> Callable[..., list[Gradients]]:
    return _captured


def _worst(found: Gradients, wanted: Gradients) -> float:
    """Largest relative error over modules. A gradient that is zero in exact arithmetic (queries and keys of a two-token text) is measured against a
    hundredth of the example's largest one."""
    assert set(found) == set(wanted)
    floor = 1e-2 * max(float(g.norm()) for g in wanted.values())
    return max(float((found[n] - wanted[n]).norm()) / max(float(wanted[n].norm()), floor, 1e-300) for n in wanted)


@pytest.fixture(scope="session")
def worst_error() -> Callable[[Gradients, Gradients], float]:
    return _worst
