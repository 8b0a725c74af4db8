"""Equation (14) for one block on a GPU: bits unpacked in registers, multiplied on the tensor cores with a query split into two float16 numbers.

Needs triton, which CUDA builds of torch bring along; engine/search/gpu.py has the same in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS, BYTES = 64, 16  # a program's rows, and the bytes of each that it unpacks at a time


@triton.jit  # type: ignore[untyped-decorator]  # triton ships no types
def _add_block(codes, scales, high, low, y_sum, out, n, stride, n_bytes, n_blocks, c, Q: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are Triton's own
    """out[i, q] += c * scales[i] * (2 <high_q + low_q, bits_i> - y_sum[q]); high, low (8 * padded bytes, Q)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    wide = rows.to(tl.int64)
    queries = tl.arange(0, Q)
    total = tl.zeros((ROWS, Q), dtype=tl.float32)
    for start in range(0, n_bytes, BYTES):
        byte = start + tl.arange(0, BYTES)
        packed = tl.load(codes + wide[:, None] * stride + byte[None, :], mask=inside[:, None] & (byte < n_bytes)[None, :], other=0)
        bits = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        selected = tl.reshape(bits, (ROWS, BYTES * 8)).to(tl.float16)
        at = (start * 8 + tl.arange(0, BYTES * 8))[:, None] * Q + queries[None, :]
        total += tl.dot(selected, tl.load(high + at))
        total += tl.dot(selected, tl.load(low + at))
    s = tl.load(scales + wide * n_blocks, mask=inside, other=0.0).to(tl.float32) * c
    where = out + wide[:, None] * Q + queries[None, :]
    before = tl.load(where, mask=inside[:, None], other=0.0)
    tl.store(where, before + s[:, None] * (2.0 * total - tl.load(y_sum + queries)[None, :]), mask=inside[:, None])


def add_block(codes: Any, scales: Any, block: int, first: int, n_bytes: int, high: Any, low: Any, y_sum: Any, c: float, out: Any) -> None:
    """Add one block's share to out (n, Q) float32, Q a power of two of at least 16.

    codes (n, code_bytes) uint8; scales (n, n_blocks) float16; the block is number `block`, its bits are n_bytes bytes from byte `first` on;
    high, low (8 * n_bytes rounded up to 8 * BYTES, Q) float16; y_sum (Q,) float32: column sums of high + low.
    """
    n = codes.shape[0]
    if n:
        _add_block[(triton.cdiv(n, ROWS),)](
            codes[:, first:], scales[:, block:], high, low, y_sum, out, n, codes.stride(0), n_bytes, scales.shape[1], c, Q=out.shape[1], ROWS=ROWS, BYTES=BYTES
        )


def padded_bytes(n_bytes: int) -> int:
    """Bytes of a block rounded up to what a program reads."""
    return -(-n_bytes // BYTES) * BYTES


def split(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two float16 numbers whose sum is y to 22 bits; y must lie within +-1."""
    high = y.to(torch.float16)
    return high, (y - high.to(y.dtype)).to(torch.float16)
