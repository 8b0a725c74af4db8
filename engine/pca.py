"""Uncentred PCA of a block by the Gram matrix of its fitting examples: the data side of stage 2.

With Z (n, width) the block's coordinates, Z Z^T = U diag(sigma^2) U^T is the SUM of its modules' Gram matrices, and the right singular vectors are
V = Z^T U diag(1 / sigma): they are computed module slice by module slice, so that one n x n matrix and one slice are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import NumericalError

Coordinates = Mapping[str, NDArray[np.float32]]
DROP = 1e-4  # directions with sigma below this share of the largest are numerical noise of float32 coordinates
DROP_FAST = 1e-3  # the same where products were taken in float32
_CHUNK_BYTES = 1 << 28
_ROWS = 512


@dataclass(frozen=True, slots=True)
class Spectrum:
    """singular (r,) float64, descending, those above the drop; vectors (n, r) float64 on the device: U; energy: sum of ALL sigma^2."""

    singular: NDArray[np.float64]
    vectors: torch.Tensor
    energy: float

    @property
    def rank(self) -> int:
        return int(self.singular.size)


def column_chunks(z: NDArray[np.float32]) -> Iterator[slice]:
    """Slices of z's columns small enough to be copied in float64."""
    step = max(_CHUNK_BYTES // (8 * max(z.shape[0], 1)), 1)
    for start in range(0, z.shape[1], step):
        yield slice(start, min(start + step, z.shape[1]))


def squared_norms(z: Coordinates, names: Sequence[str]) -> NDArray[np.float64]:
    """(n,) float64: ||z||^2 of each example over the named modules. Raises NumericalError naming module and row."""
    total = np.zeros(z[names[0]].shape[0])
    for name in names:
        own = np.zeros_like(total)
        for part in column_chunks(z[name]):
            own += np.square(z[name][:, part], dtype=np.float64).sum(axis=1)
        if not np.isfinite(own).all():
            raise NumericalError(f"module {name}: the coordinates of fitting example {int(np.flatnonzero(~np.isfinite(own))[0])} are not finite")
        total += own
    return total


def gram(z: Coordinates, names: Sequence[str], device: torch.device | str = "cpu", *, product: torch.dtype = torch.float64) -> torch.Tensor:
    """(n, n) float64 Gram matrix of the block's coordinates: the sum of its modules' Gram matrices, accumulated in float64.

    product: precision of the products inside a slice; float32 is faster and good to DROP_FAST.
    """
    n = z[names[0]].shape[0]
    total = torch.zeros(n, n, dtype=torch.float64, device=device)
    for name in names:
        for part in column_chunks(z[name]):
            block = torch.from_numpy(np.array(z[name][:, part], np.float32)).to(device, product)
            for start in range(0, n, _ROWS):  # the upper triangle is enough
                own = slice(start, start + _ROWS)
                total[own, start:] += block[own] @ block[start:].T
    upper = total.triu(1)
    return total.triu() + upper.T


def spectrum(matrix: torch.Tensor, *, drop: float = DROP) -> Spectrum:
    """Eigendecomposition of a Gram matrix, directions with sigma < drop * sigma_1 left out."""
    energy = float(matrix.diagonal().sum())
    values, vectors = torch.linalg.eigh(matrix)
    singular = values.flip(0).clamp(min=0).sqrt()
    rank = int((singular >= drop * singular[0]).sum()) if float(singular[0]) > 0 else 0
    return Spectrum(singular[:rank].cpu().numpy(), vectors.flip(1)[:, :rank], energy)


def loading(found: Spectrum, k: int, rotation: torch.Tensor | None, weights: NDArray[np.float64] | None) -> torch.Tensor:
    """(n, k) float64 L with P_u = Z_u^T L: U diag(1/sigma), rows weighted as the Gram matrix was, columns rotated."""
    left = found.vectors[:, :k] / torch.from_numpy(found.singular[:k]).to(found.vectors.device)
    if weights is not None:
        left = left * torch.from_numpy(weights).to(left.device)[:, None]
    return left if rotation is None else left @ rotation.to(left.device)


def random_rotation(k: int, rng: np.random.Generator) -> torch.Tensor:
    """(k, k) float64 orthogonal matrix, uniformly distributed (Haar): QR of a Gaussian with the signs of R's diagonal moved into Q."""
    q, r = torch.linalg.qr(torch.from_numpy(rng.standard_normal((k, k))))
    return q * torch.sign(r.diagonal())


def random_frame(d: int, k: int, rng: np.random.Generator) -> torch.Tensor:
    """(d, k) float64 tight frame, d <= k: F F^T = I, uniformly distributed."""
    q, r = torch.linalg.qr(torch.from_numpy(rng.standard_normal((k, d))))
    return (q * torch.sign(r.diagonal())).T.contiguous()


def flattening(found: Spectrum, d: int, power: float) -> NDArray[np.float64]:
    """(d,) weights sigma^-power of the leading directions, scaled so that the fitting set's energy in them stays what it is."""
    sigma = found.singular[:d]
    weights = sigma**-power
    return np.asarray(weights * np.sqrt(np.square(sigma).sum() / np.square(sigma * weights).sum()))
