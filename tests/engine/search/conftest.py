"""Random sketches and a naive float64 oracle of equation (14)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.search import ArraySegment


@dataclass
class Fixture:
    layout: BlockLayout
    c: NDArray[np.float32]
    segments: list[ArraySegment]
    y: NDArray[np.float32]

    @property
    def n(self) -> int:
        return sum(s.n for s in self.segments)

    def oracle(self, score: str = "influence") -> NDArray[np.float64]:
        """(queries, rows): a loop over rows and blocks, bit by bit, from the stored codes and scales."""
        out = np.zeros((len(self.y), self.n))
        for segment in self.segments:
            for i in range(segment.n):
                for q, y in enumerate(self.y.astype(np.float64)):
                    total, length, byte, first = 0.0, 0.0, 0, 0
                    for b, k in enumerate(self.layout.k):
                        s = float(segment.scales[i, b]) * float(self.c[b])
                        signs = [1.0 if segment.codes[i, byte + j // 8] >> (j % 8) & 1 else -1.0 for j in range(k)]
                        total += s * float(np.dot(y[first : first + k], signs))
                        length += k * s * s
                        byte, first = byte + (k + 7) // 8, first + k
                    if score == "cosine":
                        length = np.sqrt(length) * np.linalg.norm(y)
                        total = total / length if length > 0 else 0.0
                    out[q, segment.base + i] = total
        return out


def make(k: tuple[int, ...], sizes: tuple[int, ...], queries: int, seed: int, *, spread: float = 1.0) -> Fixture:
    rng = np.random.default_rng(seed)
    layout = BlockLayout(tuple(f"block{b}" for b in range(len(k))), k)
    segments, base = [], 0
    for n in sizes:
        parts = [np.packbits(rng.integers(0, 2, (n, bits), dtype=np.uint8), axis=1, bitorder="little") for bits in k]
        codes = np.ascontiguousarray(np.concatenate(parts, axis=1))
        scales = np.exp(spread * rng.standard_normal((n, len(k)))).astype(np.float16)
        index = faiss.IndexBinaryFlat(8 * codes.shape[1])
        if n:
            index.add(codes)
        segments.append(ArraySegment(base, codes, scales, index))
        base += n
    c = np.exp(rng.standard_normal(len(k))).astype(np.float32)
    y = (rng.standard_normal((queries, sum(k))) * np.exp(rng.standard_normal(sum(k)))).astype(np.float32)
    return Fixture(layout, c, segments, y)


@pytest.fixture
def sketches() -> Callable[..., Fixture]:
    return make
