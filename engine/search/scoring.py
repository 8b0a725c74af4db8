"""Equation (14), plainly: score(i) = sum_b s_{i,b} <y_b, b_{i,b}>, and its cosine. float64 inside, numpy only.

This is the path that every faster one is compared with, and the one that re-scores whatever a faster one selects.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.search.request import Score, spans

CHUNK_BITS = 1 << 24  # signs unpacked at a time: 128 MB in float64


def row_norms(scales: NDArray[np.float16], layout: BlockLayout, c: NDArray[np.float32]) -> NDArray[np.float64]:
    """(n,) sqrt(sum_b k_b s_{i,b}^2): the length of a decoded row. s = c_b x stored."""
    s = scales.astype(np.float64) * np.asarray(c, np.float64)
    return np.sqrt(np.square(s) @ np.asarray(layout.k, np.float64))


def score_rows(
    codes: NDArray[np.uint8], scales: NDArray[np.float16], layout: BlockLayout, c: NDArray[np.float32], y: NDArray[np.float32], score: Score
) -> NDArray[np.float64]:
    """Scores of n rows for B queries, (B, n) float64. A row or query of length 0 has score 0 in the cosine too."""
    n, chunk = codes.shape[0], max(1, CHUNK_BITS // max(1, sum(layout.k)))
    out = np.zeros((y.shape[0], n), np.float64)
    y64 = y.astype(np.float64)
    for start in range(0, n, chunk):
        rows = slice(start, min(n, start + chunk))
        s = scales[rows].astype(np.float64) * np.asarray(c, np.float64)
        for b, (byte, n_bytes, bit, k) in enumerate(spans(layout)):
            bits = np.unpackbits(codes[rows, byte : byte + n_bytes], axis=1, bitorder="little", count=k)
            y_b = y64[:, bit : bit + k]
            # <y, b> = 2 <y, bits> - sum y, since b = 2 bits - 1
            out[:, rows] += s[:, b] * (2 * (y_b @ bits.T.astype(np.float64)) - y_b.sum(axis=1, keepdims=True))
    if score == "cosine":
        length = np.linalg.norm(y64, axis=1)[:, None] * row_norms(scales, layout, c)[None, :]
        out = np.divide(out, length, out=np.zeros_like(out), where=length > 0)
    return out


def decode(codes: NDArray[np.uint8], scales: NDArray[np.float16], layout: BlockLayout, c: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, total_k) s_{i,b} b_{i,b}: rows whose inner product with y is (14)."""
    s = scales.astype(np.float32) * np.asarray(c, np.float32)
    parts = [
        (2 * np.unpackbits(codes[:, byte : byte + n_bytes], axis=1, bitorder="little", count=k).astype(np.float32) - 1) * s[:, b : b + 1]
        for b, (byte, n_bytes, _, k) in enumerate(spans(layout))
    ]
    return np.concatenate(parts, axis=1)
