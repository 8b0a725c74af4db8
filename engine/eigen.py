"""Eigenbases of the Kronecker factors: A = Q_A diag(lambda_A) Q_A^T, S = Q_S diag(lambda_S) Q_S^T."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # torch's stubs leave it out

from engine.errors import NumericalError

ORTHOGONALITY = 1e-5  # largest |Q^T Q - I| that a float32 decomposition on a GPU may show; any orthogonal basis is valid


def eigenbasis(factor: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """(eigenvalues (d,) ascending and not negative, eigenvectors (d, d) in columns) of a symmetric positive semi-definite factor, in its dtype and place.

    float64 on the CPU. On a GPU float32 first, accepted where the vectors are orthogonal to 1e-5, else the CPU's float64. `what` names module and side in
    the NumericalError that a non-finite factor, or one that no solver can decompose, raises.
    """
    if not bool(torch.isfinite(factor).all()):
        raise NumericalError(f"{what} contains a non-finite number; look for exploding activations or gradients in this module")
    scale = float(factor.abs().max())
    if scale == 0:
        return factor.new_zeros(factor.shape[0]), torch.eye(factor.shape[0], dtype=factor.dtype, device=factor.device)
    for attempt in _attempts(factor, scale):
        try:
            values, vectors = attempt()
        except (LinAlgError, torch.OutOfMemoryError):  # a GPU without room for the workspace leaves the work to the CPU
            continue
        if bool(torch.isfinite(values).all()) and is_orthogonal(vectors):
            return (values.clamp(min=0) * scale).to(factor), vectors.to(factor)
    raise NumericalError(f"{what} could not be decomposed into eigenvectors (largest entry {scale:.3g}); try a larger --fit-examples, or leave the module out")


def _attempts(factor: Tensor, scale: float) -> Iterator[Callable[[], tuple[Tensor, Tensor]]]:
    """Solvers in order of preference; the factor is scaled to 1 first, so that neither tiny nor huge ones leave the range of the arithmetic."""
    if factor.device.type != "cpu" and factor.dtype != torch.float64:
        yield lambda: _solve(factor / scale)
    yield lambda: _solve(_scaled(factor, scale))
    # a ridge far below the resolution of the float32 sums separates eigenvalues that the solver cannot
    yield lambda: _solve(_ridge(_scaled(factor, scale)))
    yield lambda: _by_svd(_scaled(factor, scale))


def _scaled(factor: Tensor, scale: float) -> Tensor:
    return factor.to("cpu", torch.float64, copy=True).div_(scale)


def _solve(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def _by_svd(matrix: Tensor) -> tuple[Tensor, Tensor]:
    vectors, values, _ = torch.linalg.svd(matrix)
    return values, vectors


def _ridge(matrix: Tensor) -> Tensor:
    d = matrix.shape[0]
    matrix.diagonal().add_(torch.linspace(0, 1e-10, d, dtype=matrix.dtype, device=matrix.device))
    return matrix


def is_orthogonal(vectors: Tensor, block: int = 2048) -> bool:
    """max |Q^T Q - I| < 1e-5, one block of rows of the product at a time."""
    d = vectors.shape[1]
    for start in range(0, d, block):
        product = vectors[:, start : start + block].T @ vectors
        product.diagonal(offset=start).sub_(1)
        if not float(product.abs().max()) < ORTHOGONALITY:  # also where it is NaN
            return False
    return True
