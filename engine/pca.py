"""Uncentred PCA of a block by the Gram matrix of its fitting examples: the data side of stage 2.

With Z (n, width) the block's coordinates, Z Z^T = U diag(sigma^2) U^T is the SUM of its modules' Gram matrices, and the right singular vectors are
V = Z^T U diag(1 / sigma): they are computed module slice by module slice, so that one n x n matrix and one slice are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # torch's stubs leave it out

from engine.eigen import eigenbasis
from engine.errors import NumericalError
from engine.interruptible import interruptible

Coordinates = Mapping[str, NDArray[np.float32]]
Tell = Callable[[float], None]  # called with the operations done since the last call; what it raises ends the fit
DROP = 1e-4  # directions with sigma below this share of the largest are numerical noise of float32 coordinates
DROP_FAST = 1e-3  # the same where products were taken in float32
EIGH = 16.0  # operations of `eigh` per n^3, counted as the float32 products that take as long
_CHUNK_BYTES = 1 << 27
_ROWS = 512


@dataclass(frozen=True, slots=True)
class Spectrum:
    """singular (r,) float64, descending, those above the drop; vectors (n, r) float64 on the device: U, or its leading columns; norms (n,) float64: the
    Gram matrix's diagonal."""

    singular: NDArray[np.float64]
    vectors: torch.Tensor
    norms: NDArray[np.float64]

    @property
    def energy(self) -> float:
        """Sum of ALL sigma^2."""
        return float(self.norms.sum())

    @property
    def rank(self) -> int:
        return int(self.singular.size)


def chunks(z: NDArray[np.float32], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Iterator[tuple[slice, torch.Tensor]]:
    """(columns, z[:, columns] on the device) one after the other; each is overwritten by the next, since fresh memory costs more than the copy."""
    n, width = z.shape
    step = max(_CHUNK_BYTES // (8 * max(n, 1)), 1)
    buffer = torch.empty(n * min(step, width), dtype=dtype)
    for start in range(0, width, step):
        part = slice(start, min(start + step, width))
        held = buffer[: n * (part.stop - start)].view(n, -1)
        np.copyto(held.numpy(), z[:, part])
        yield part, held.to(device)


def squared_norms(z: Coordinates, names: Sequence[str], tell: Tell = lambda operations: None) -> NDArray[np.float64]:
    """(n,) float64: ||z||^2 of each example over the named modules. Raises NumericalError naming module and row."""
    total = np.zeros(z[names[0]].shape[0])
    for name in names:
        own = np.zeros_like(total)
        for _, part in chunks(z[name]):
            own += np.einsum("nm,nm->n", part.numpy(), part.numpy(), dtype=np.float64)
            tell(0)
        if not np.isfinite(own).all():
            raise NumericalError(f"module {name}: the coordinates of fitting example {int(np.flatnonzero(~np.isfinite(own))[0])} are not finite")
        total += own
    return total


def gram(
    z: Coordinates, names: Sequence[str], device: torch.device | str = "cpu", *, product: torch.dtype = torch.float64, tell: Tell = lambda operations: None
) -> torch.Tensor:
    """(n, n) float64 Gram matrix of the block's coordinates: the sum of its modules' Gram matrices, accumulated in float64.

    product: precision of the products inside a slice; float32 is faster and good to DROP_FAST.
    """
    n = z[names[0]].shape[0]
    total = torch.zeros(n, n, dtype=torch.float64, device=device)
    for name in names:
        for part, block in chunks(z[name], device, product):
            for start in range(0, n, _ROWS):  # the upper triangle is enough
                own = slice(start, start + _ROWS)
                total[own, start:] += block[own] @ block[start:].T
                tell(0)
            tell(gram_operations(n, part.stop - part.start, product))
    upper = total.triu(1)
    return total.triu() + upper.T


def gram_operations(n: int, width: int, product: torch.dtype) -> float:
    """Operations of a Gram matrix, counted as float32 products: half of n x n entries; float64 takes twice as long."""
    return float(n) * n * width * (2 if product == torch.float64 else 1)


def spectrum(matrix: torch.Tensor, *, drop: float = DROP, tell: Tell = lambda operations: None) -> Spectrum:
    """Eigendecomposition of a Gram matrix, directions with sigma < drop * sigma_1 left out."""
    values, vectors = interruptible(lambda: _decompose(matrix), lambda: tell(0))
    singular = values.flip(0).clamp(min=0).sqrt()
    rank = int((singular >= drop * singular[0]).sum()) if float(singular[0]) > 0 else 0
    tell(EIGH * float(len(matrix)) ** 3)
    return Spectrum(singular[:rank].cpu().numpy(), vectors.flip(1)[:, :rank], matrix.diagonal().cpu().numpy().copy())


def _decompose(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except LinAlgError:
        values, vectors = eigenbasis(matrix.cpu(), "the Gram matrix of the projection's fitting examples")
    return values, vectors.to(matrix.device)


def loading(found: Spectrum, d: int, rotation: torch.Tensor | None, weights: NDArray[np.float64] | None, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, d) float64 L with P_u = Z_u^T L, and (n, d) float32 on the CPU: the fitting examples' own coordinates Z P.

    L = U diag(1 / sigma) / gain, its rows weighted as the Gram matrix was, its columns rotated; Z P = U diag(sigma) / gain with the weights divided out.
    A block of rank 0 gives zeros.
    """
    n = len(found.vectors)
    if found.rank == 0:
        return torch.zeros(n, d, dtype=torch.float64, device=found.vectors.device), torch.zeros(n, d)
    u, sigma = found.vectors[:, :d], torch.from_numpy(found.singular[:d]).to(found.vectors.device)
    left, own = u / (gain * sigma), u * (sigma / gain)
    own[torch.from_numpy(found.norms == 0).to(u.device)] = 0  # exactly: such an example has no scale
    if weights is not None:
        w = torch.from_numpy(weights).to(u.device)[:, None]
        left, own = left * w, own / torch.where(w > 0, w, torch.inf)
    if rotation is not None:
        left, own = left @ rotation.to(u.device), own @ rotation.to(u.device)
    return left, own.to("cpu", torch.float32)


def random_rotation(k: int, rng: np.random.Generator) -> torch.Tensor:
    """(k, k) float64 orthogonal matrix, uniformly distributed (Haar): QR of a Gaussian with the signs of R's diagonal moved into Q."""
    q, r = torch.linalg.qr(torch.from_numpy(rng.standard_normal((k, k))))
    return q * torch.sign(r.diagonal())


def random_frame(d: int, k: int, rng: np.random.Generator) -> torch.Tensor:
    """(d, k) float64 tight frame, d <= k: F F^T = I, uniformly distributed."""
    q, r = torch.linalg.qr(torch.from_numpy(rng.standard_normal((k, d))))
    return (q * torch.sign(r.diagonal())).T.contiguous()


def flattening(singular: NDArray[np.float64], d: int, power: float) -> NDArray[np.float64]:
    """(d,) weights sigma^-power of the leading directions, scaled so that the fitting set's energy in them stays what it is."""
    sigma = singular[:d]
    weights = sigma**-power
    return np.asarray(weights * np.sqrt(np.square(sigma).sum() / np.square(sigma * weights).sum()))
