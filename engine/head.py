"""The vocabulary head run apart from the model below it, by the model's own code, so that logits can be made in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Hidden:
    """Stands for the output of the model below its head; everything but the hidden states is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _stubbed(base: Any) -> Iterator[list[Tensor]]:
    """Inside, the model below the head returns the hidden states in the list instead of computing them."""
    own = base.__dict__.get("forward")
    cell: list[Tensor] = []
    base.forward = lambda *args, **kwargs: _Hidden(cell[0])
    try:
        yield cell
    finally:
        if own is None:
            del base.forward
        else:
            base.forward = own


def head_of(model: Any, hidden: Tensor) -> Tensor:
    """hidden (n, d) -> logits (n, V) by the model's own code (head, soft cap, scaling), with everything below the head left out."""
    ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
    with _stubbed(model.base_model) as cell:
        cell.append(hidden[None])
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0]


def head_separates(model: Any, device: torch.device) -> bool:
    """Whether the head run apart gives the model's own logits (tried on three tokens)."""
    if model.base_model is model:
        return False
    ids = torch.arange(3, device=device)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        try:
            hidden = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
            apart = head_of(model, hidden[0])
        except Exception:  # any failure of the shortcut only means that the whole model is run instead
            return False
    return bool(torch.allclose(whole[0].float(), apart.float(), rtol=1e-4, atol=1e-5))
