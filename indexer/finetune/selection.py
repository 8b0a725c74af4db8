"""Which positions are trained through: k per example, drawn anew each epoch from (seed, epoch, row), so that a resumed run draws the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.errors import SettingError


class Selector:
    """Draws min(k, length) positions per example without replacement.

    k: a whole number of positions, or a share of the length if below 1. For a causal LM the first position is drawn among those that predict a target
    (else a prompt much longer than its completion would often give no loss at all), the others among all that are left.
    """

    def __init__(self, k: float, seed: int) -> None:
        if not (0 < k < 1 or (1 <= k < math.inf and k == int(k))):
            raise SettingError(f"selected_tokens must be a whole number of at least 1, or a share between 0 and 1, not {k:g}", field="selected_tokens")
        self.k = k
        self.seed = seed

    def count(self, length: int) -> int:
        """Positions drawn from an example of `length` tokens."""
        return min(length, int(self.k) if self.k >= 1 else max(1, math.ceil(self.k * length)))

    def draw(
        self, rows: Sequence[int], lengths: Sequence[int], predicting: NDArray[np.bool_] | None, epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Selected positions (B, K) int64, ascending within the real ones, and (B, K) bool: which are real. K is the largest count of the batch.

        predicting (B, T) bool: positions that predict a target. Fillers are distinct positions outside the example's selection.
        """
        counts = [self.count(n) for n in lengths]
        width, length = max(counts), max(lengths)
        selected = np.zeros((len(rows), width), np.int64)
        mask = np.zeros((len(rows), width), np.bool_)
        for b, (row, n, count) in enumerate(zip(rows, lengths, counts, strict=True)):
            order = np.random.default_rng([self.seed, epoch, row, 3]).permutation(n)
            if predicting is not None:
                useful = order[predicting[b, order]]
                if len(useful):
                    order = np.concatenate([useful[:1], order[order != useful[0]]])
            chosen = np.sort(order[:count])
            filler = np.setdiff1d(np.arange(length), chosen)[: width - count] if count < width else chosen[:0]
            selected[b], mask[b, :count] = np.concatenate([chosen, filler]), True
        return selected, mask
