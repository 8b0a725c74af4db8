"""The k best of many scores, and merging of partial lists; equal scores go to the lower position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.search.request import Ranking


def best(scores: NDArray[np.float64], positions: NDArray[np.int64], k: int, *, largest: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The k best of (n,) scores with their (n,) positions, best first: a partition, then a sort of what is left."""
    key = -scores if largest else scores
    if scores.shape[0] > k:
        # everything that ties with the k-th stays in until positions decide
        kept = np.flatnonzero(key <= np.partition(key, k - 1)[k - 1])
        key, positions, scores = key[kept], positions[kept], scores[kept]
    order = np.lexsort((positions, key))[:k]
    return positions[order], scores[order]


def ranking(found: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]], k: int, *, largest: bool) -> Ranking:
    """Rank each query's (positions, scores) and pad to a common width of min(k, the longest list)."""
    lists = [best(scores, positions, k, largest=largest) for positions, scores in found]
    width = max((len(p) for p, _ in lists), default=0)
    positions = np.full((len(lists), width), -1, np.int64)
    scores = np.zeros((len(lists), width), np.float32)
    for q, (p, s) in enumerate(lists):
        positions[q, : len(p)], scores[q, : len(p)] = p, s
    return Ranking(positions, scores, np.array([len(p) for p, _ in lists], np.int64))
