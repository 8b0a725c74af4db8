"""Subsampled randomised Hadamard transform of a block, equation (28): the data-free stage 2 of EOGP-R.

x = sqrt(p/k) R H D z with H the orthonormal Walsh-Hadamard matrix of size p, D random signs, R a sample of k rows. It is computed module by module:
with each module's slice padded to a power of two q and placed at a multiple o of q, H_p[r, o + j] = (-1)^popcount(r & o) H_q[r mod q, j], so a
block never has to be whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def fwht(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform (Sylvester order) of the last dimension, whose size must be a power of two. Not in place."""
    size = x.shape[-1]
    if size & (size - 1) or size == 0:
        raise ValueError(f"the last dimension is {size}, not a power of two")
    shape, step = x.shape, 1
    while step < size:
        pairs = x.reshape(*shape[:-1], size // (2 * step), 2, step)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).reshape(shape)
        step *= 2
    return x


def parity(values: NDArray[np.int64]) -> NDArray[np.float32]:
    """(-1)^popcount of each value, as +1 and -1."""
    folded = values.copy()
    for shift in (32, 16, 8, 4, 2, 1):
        folded ^= folded >> shift
    return (1 - 2 * (folded & 1)).astype(np.float32)


def power_of_two(width: int) -> int:
    """Smallest power of two >= width."""
    return 1 << max(width - 1, 0).bit_length()


def place(widths: Sequence[int]) -> tuple[list[int], int]:
    """Aligned offsets of slices of the given widths, and the padded size p; larger slices first, so that no gaps arise between them."""
    offsets, end = [0] * len(widths), 0
    for i in sorted(range(len(widths)), key=lambda j: -power_of_two(widths[j])):
        offsets[i] = end
        end += power_of_two(widths[i])
    return offsets, power_of_two(end)


class SRHT:
    """One block's transform from sum(widths) coordinates to k.

    widths: coordinates per module; rows (k,) int64 sampled from 0 .. p-1 without repetition; signs: per module (m_u,) float32 of +1 and -1.
    """

    def __init__(self, widths: Sequence[int], rows: NDArray[np.int64], signs: Sequence[NDArray[np.float32]]) -> None:
        self.widths = list(widths)
        self.rows = rows
        self.signs = list(signs)
        self.offsets, self.p = place(widths)

    @classmethod
    def draw(cls, widths: Sequence[int], k: int, rng: np.random.Generator) -> SRHT:
        """A fresh transform; k must not exceed the padded width."""
        _, p = place(widths)
        if k > p:
            raise ValueError(f"k = {k} rows cannot be sampled from a Hadamard matrix of size {p}")
        signs = [(1 - 2 * rng.integers(0, 2, width)).astype(np.float32) for width in widths]
        return cls(widths, np.sort(rng.choice(p, k, replace=False)).astype(np.int64), signs)

    @property
    def gain(self) -> float:
        """Factor still to be applied to a sum of contributions: sqrt(p/k) / sqrt(p)."""
        return float(len(self.rows) ** -0.5)

    def contribution(self, module: int, z: torch.Tensor) -> torch.Tensor:
        """(..., k): what the module's coordinates z (..., m_u) add to x, without `gain`."""
        q = power_of_two(self.widths[module])
        flipped = torch.nn.functional.pad(z * torch.from_numpy(self.signs[module]).to(z), (0, q - self.widths[module]))
        chosen = torch.from_numpy(self.rows % q).to(z.device)
        return fwht(flipped).index_select(-1, chosen) * torch.from_numpy(parity(self.rows & self.offsets[module])).to(z)

    def back(self, module: int, w: torch.Tensor) -> torch.Tensor:
        """(..., m_u): the transpose of `contribution` applied to w (..., k)."""
        q = power_of_two(self.widths[module])
        spread = torch.zeros(*w.shape[:-1], q, dtype=w.dtype, device=w.device)
        chosen = torch.from_numpy(self.rows % q).to(w.device)
        spread.index_add_(-1, chosen, w * torch.from_numpy(parity(self.rows & self.offsets[module])).to(w))
        return fwht(spread)[..., : self.widths[module]] * torch.from_numpy(self.signs[module]).to(w)
