"""Which rows the fits use: seeded, and the same whatever was interrupted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.fit_curvature import sample_positions

HELD_OUT = 128


@dataclass(frozen=True, slots=True)
class Samples:
    """Ascending positions. held_out: left out of the PCA, to calibrate coverage and candidate recall; at most 128, at most 5 % of the rows."""

    curvature: NDArray[np.int64]
    pca: NDArray[np.int64]
    held_out: NDArray[np.int64]


def draw_samples(n: int, *, fit_examples: int, pca_examples: int, seed: int) -> Samples:
    """Samples of n rows."""
    held_out = np.array(sample_positions(n, min(HELD_OUT, n // 20), seed + 1), np.int64)
    rest = np.setdiff1d(np.arange(n), held_out)
    pca = rest[sample_positions(len(rest), pca_examples, seed + 2)]
    return Samples(np.array(sample_positions(n, fit_examples, seed), np.int64), pca, held_out)
