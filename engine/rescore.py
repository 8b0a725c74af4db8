"""The best results looked at again: their gradients recomputed, and uncompressed EK-FAC influence split over their own positions.

For a weighted sum of queries with gradient sum_q w_q G_q, W = (preconditioned gradient) and an example's output gradients delta_t and inputs a_t,
position t carries delta_t^T W a_t; the positions sum to the example's influence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.capture import Capture
from engine.data.encoder import encoder_of
from engine.errors import DataError
from engine.example import Example, plan_batches
from engine.model import LoadedModel
from engine.modules import TrackedModule
from engine.store import StoredRow
from engine.uncompressed import UncompressedInfluence


class Rescorer(UncompressedInfluence):
    """Uncompressed influence of a few dozen examples on one measurement, by position."""

    def by_position(self, queries: Sequence[Example], weights: Sequence[float], examples: Sequence[Example]) -> list[NDArray[np.float64]]:
        """For each example (T,) float64: the part of its influence on sum_q weights_q loss_q that goes through each of its positions; they sum to it."""
        totals = [np.zeros(len(e)) for e in examples]
        plan = plan_batches([len(e) for e in examples], self.batch_tokens)
        for chunk in self._chunks(len(queries)):
            held = {
                name: torch.tensordot(torch.tensor(weights, dtype=w.dtype, device=w.device), w, 1) for name, w in self.preconditioned(queries, chunk).items()
            }
            capture = Capture(self.loaded, chunk)
            for chosen in plan:
                longest = max(len(examples[i]) for i in chosen)
                found = torch.zeros(len(chosen), longest, dtype=torch.float64)

                def consume(m: TrackedModule, a: Tensor, delta: Tensor, held: dict[str, Tensor] = held, found: Tensor = found) -> None:
                    w = held[m.name].view(m.d_out, m.d_in)
                    found.add_(_onto_positions(((delta.to(self.dtype) @ w) * a.to(self.dtype)).sum(-1).to("cpu", torch.float64), found.shape[1]))

                capture.run(self._collate(examples, chosen), consume)
                for i, row in zip(chosen, found.numpy(), strict=True):
                    n = len(examples[i])
                    totals[i] += row[:n]
                    totals[i] += row[n:].sum() / n  # a module that sees one vector per example spreads it over the padded width
        return totals


def _onto_positions(each: Tensor, width: int) -> Tensor:
    """(B, width) from (B, calls * width): the calls of a module one after the other; or from one number per example, which belongs to all positions."""
    if each.shape[1] % width == 0:
        return each.view(each.shape[0], -1, width).sum(1)
    return each.sum(1, keepdim=True).expand(-1, width) / width


def example_of(row: StoredRow, loaded: LoadedModel) -> Example:
    """A stored row as the example that was sketched, with character offsets where tokenising its text again gives the same tokens."""
    labels = row.input_ids if row.labels is None else row.labels
    example = Example(row.id, row.input_ids, labels, row.target_mask, row.text, _offsets(row, loaded), row.metadata, row.truncated, row.kind)  # type: ignore[arg-type]  # kind is a Kind by the store's schema, a str by its column
    return example


def _offsets(row: StoredRow, loaded: LoadedModel) -> NDArray[np.int64] | None:
    if loaded.tokenizer is None or row.kind == "tokens":
        return None
    encoder = encoder_of(loaded.tokenizer)
    for special in (True, False):
        try:
            found = encoder.encode(row.text, add_special_tokens=special)
        except DataError:
            return None
        shared = min(len(found), len(row.input_ids))
        # an end-of-sequence token may follow; anything else that differs makes the offsets worthless
        if len(row.input_ids) - shared <= 1 and np.array_equal(found.ids[:shared], row.input_ids[:shared]):
            offsets = np.zeros((len(row.input_ids), 2), np.int64)
            offsets[:shared] = found.offsets[:shared]
            return offsets
    return None
