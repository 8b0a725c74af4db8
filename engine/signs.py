"""One bit per coordinate and one scale per block: equation (13), and the sketch that a store keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockLayout

ScaleKind = Literal["l1", "unbiased"]
FLAG_OK, FLAG_NO_TARGET, FLAG_ZERO, FLAG_NONFINITE = 0, 1, 2, 4
SCALE_MIN, SCALE_MAX = 2.0**-14, 65504.0  # fp16's normal range


@dataclass(frozen=True, slots=True)
class Sketch:
    """One-bit sketches of N examples.

    codes (N, code_bytes) uint8, little bit order, blocks byte-aligned; scales (N, n_blocks) float16, stored as s / c_b; norm_sq (N,) float32: ||z||^2;
    loss (N,) float32: summed over target tokens, in nats; n_tokens (N,) int32: target tokens; flags (N,) uint8: 0, or why the row is left out.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    norm_sq: NDArray[np.float32]
    loss: NDArray[np.float32]
    n_tokens: NDArray[np.int32]
    flags: NDArray[np.uint8]

    def __len__(self) -> int:
        return int(self.codes.shape[0])

    @classmethod
    def concat(cls, parts: Sequence[Sketch]) -> Sketch:
        """Rows of all parts, in order; at least one part, all of one layout."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))


def block_scales(x: NDArray[Any], layout: BlockLayout, kind: ScaleKind, signs: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
    """Scales s (N, n_blocks) float64 of coordinates x (N, total_k) with bits `signs` (N, total_k), sign(x) where None.

    "l1": s = <b, x> / k, which is ||x||_1 / k of equation (13) for b = sign(x). "unbiased": s = ||x||_2^2 / <b, x>, for rotated blocks, where
    <s b, x> = ||x||^2 exactly. A block that is all zero has s = 0.
    """
    x = np.asarray(x, np.float64)
    starts = np.asarray(layout.offsets[:-1])
    fit = np.add.reduceat(np.abs(x) if signs is None else x * signs, starts, axis=1)
    if kind == "l1":
        return np.asarray(fit / np.asarray(layout.k))
    return np.asarray(np.divide(np.add.reduceat(np.square(x), starts, axis=1), fit, out=np.zeros_like(fit), where=fit > 0))


def pack_signs(x: NDArray[Any], layout: BlockLayout) -> NDArray[np.uint8]:
    """Codes (N, code_bytes) uint8 of coordinates or signs x (N, total_k): bit 1 where x >= 0, so sign(0) = +1; padding bits are 0."""
    bits = np.zeros((x.shape[0], 8 * layout.code_bytes), np.bool_)
    bits[:, layout.bit_columns] = np.asarray(x) >= 0
    return np.packbits(bits, axis=1, bitorder="little")


def encode(
    x: NDArray[Any], layout: BlockLayout, c: NDArray[np.float32], scale: ScaleKind, signs: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """(codes, scales) of coordinates x (N, total_k) float; signs: bits chosen otherwise than by sign(x).

    Scales are stored relative to the block's c (n_blocks,), clamped to the normal range of fp16; 0 only for a block that is all zero.
    """
    if x.ndim != 2 or x.shape[1] != layout.total_k:
        raise ValueError(f"coordinates have shape {x.shape}, the layout needs (N, {layout.total_k})")
    s = block_scales(x, layout, scale, signs)
    zero = np.maximum.reduceat(np.abs(x), np.asarray(layout.offsets[:-1]), axis=1) == 0
    stored = np.where(zero, 0.0, np.clip(s / np.asarray(c, np.float64), SCALE_MIN, SCALE_MAX))
    return pack_signs(x if signs is None else signs, layout), stored.astype(np.float16)


def decode_signs(codes: NDArray[np.uint8], layout: BlockLayout) -> NDArray[np.int8]:
    """(N, total_k) int8 of +1 and -1 from codes (N, code_bytes)."""
    bits = np.unpackbits(codes, axis=1, bitorder="little")[:, layout.bit_columns]
    return (2 * bits.astype(np.int8) - 1).astype(np.int8)


def decode(codes: NDArray[np.uint8], scales: NDArray[np.float16], layout: BlockLayout, c: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, total_k) float32: s_b b with s = c_b x stored, so that equation (14) is a dot product with the query's y."""
    s = scales.astype(np.float32) * np.asarray(c, np.float32)
    return np.asarray(decode_signs(codes, layout) * s[:, layout.block_of_coordinate], np.float32)


def geometric_mean_scale(s: NDArray[np.float64]) -> NDArray[np.float32]:
    """c_b (n_blocks,) float32: the geometric mean over rows of each block's non-zero scales, 1 where there is none."""
    positive = s > 0
    count = positive.sum(axis=0)
    logs = np.log(s, out=np.zeros_like(s), where=positive).sum(axis=0)
    return np.asarray(np.where(count > 0, np.exp(logs / np.maximum(count, 1)), 1.0), np.float32)
