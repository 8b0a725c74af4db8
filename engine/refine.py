"""Signs chosen together: with more bits than directions, the signs whose sum over the frame comes closest to the example.

A block's coordinates are x = F^T v, v (d,) its PCA directions and F (d, k) a tight frame (F F^T = I). Any signs b stand for the vector s F b. The plain
signs sign(x) are the best b only where d = k; with d < k the frame is redundant, and min over b, s of ||v - s F b||^2 is lowered by flipping bits one at
a time. It needs no more than x and the frame's Gram matrix, since <v, F b> = <x, b> and ||F b||^2 = b^T (F^T F) b.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROWS = 512  # examples refined together: their state stays in the processor's cache


def refine_signs(x: NDArray[np.float32], gram: NDArray[np.float32], sweeps: int) -> NDArray[np.float32]:
    """Signs (N, k) of +1 and -1, float32, for coordinates x (N, k) in a frame with Gram matrix F^T F (k, k).

    Starts from sign(x), then passes `sweeps` times over the bits in order, flipping each bit that lowers the error at the best scale of the pass's
    start; the error never rises. A row depends on no other row.
    """
    signs = np.where(x >= 0, np.float32(1), np.float32(-1))
    for start in range(0, len(x), _ROWS):
        _descend(x[start : start + _ROWS], gram, signs[start : start + _ROWS], sweeps)
    return signs


def _descend(x: NDArray[np.float32], gram: NDArray[np.float32], b: NDArray[np.float32], sweeps: int) -> None:
    """In place on b. Flipping bit j changes b^T G b - 2 t^T b, t = x / s, by 4 (b_j (t_j - (G b)_j) + G_jj)."""
    diagonal = np.ascontiguousarray(gram.diagonal())
    gb = b @ gram
    for _ in range(sweeps):
        fit = np.einsum("nk,nk->n", b, x, dtype=np.float64)
        size = np.einsum("nk,nk->n", b, gb, dtype=np.float64)
        usable = ((fit > 0) & (size > 0))[:, None]
        scale = np.where(usable, (fit / np.where(size > 0, size, 1))[:, None], 1).astype(np.float32)
        t = np.where(usable, x / np.where(scale > 0, scale, 1), b * np.float32(np.inf))  # an all-zero row keeps its signs
        flipped = 0
        for j in range(x.shape[1]):
            rows = np.flatnonzero(b[:, j] * (t[:, j] - gb[:, j]) + diagonal[j] < 0)
            if rows.size:
                old = b[rows, j]
                gb[rows] -= (2 * old)[:, None] * gram[j]
                b[rows, j] = -old
                flipped += rows.size
        if not flipped:
            return
