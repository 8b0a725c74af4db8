"""Eigenbases of factors that are singular, badly scaled, repeated, zero, or not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.eigen as eigen
from engine.errors import NumericalError


def covariance(rank: int, d: int = 40, scale: float = 1.0, seed: int = 0) -> Tensor:
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((rank, d))) * scale
    return x.T @ x / rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 3, 200])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_any_rank_and_scale_is_decomposed(dtype: torch.dtype, rank: int, scale: float) -> None:
    factor = covariance(rank, scale=scale).to(dtype)
    values, vectors = eigen.eigenbasis(factor, "it")
    assert values.dtype == vectors.dtype == dtype and bool((values >= 0).all())
    q = vectors.double()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    assert float((q.T @ q - torch.eye(40)).abs().max()) < 10 * tolerance
    size = float(factor.abs().max())
    assert float(((q * values.double()) @ q.T - factor.double()).abs().max()) < 100 * tolerance * size
    assert int((values > 1e-5 * values.max()).sum()) == min(rank, 40)


def test_columns_of_very_different_size() -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((100, 30))) * torch.logspace(-12, 6, 30, dtype=torch.float64)
    values, q = eigen.eigenbasis((x.T @ x).float(), "it")
    assert bool(torch.isfinite(values).all()) and eigen.is_orthogonal(q.double())


def test_a_zero_factor_has_the_identity_as_basis() -> None:
    values, vectors = eigen.eigenbasis(torch.zeros(5, 5), "it")
    assert torch.equal(vectors, torch.eye(5)) and torch.equal(values, torch.zeros(5))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_factor_is_refused_by_name(bad: float) -> None:
    factor = torch.eye(4)
    factor[1, 2] = bad
    with pytest.raises(NumericalError, match=r"the factor of h\.3 contains a non-finite number"):
        eigen.eigenbasis(factor, "the factor of h.3")


def test_other_solvers_stand_in_and_a_hopeless_factor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fails(matrix: Tensor) -> tuple[Tensor, Tensor]:
        calls.append("eigh")
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(eigen, "_solve", fails)
    factor = covariance(60)
    values, q = eigen.eigenbasis(factor, "it")
    assert len(calls) == 2  # plain, then with a ridge; then by singular values
    torch.testing.assert_close((q * values) @ q.T, factor, rtol=0, atol=1e-10)

    def nonsense(matrix: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((len(matrix),), torch.nan), torch.eye(len(matrix))

    monkeypatch.setattr(eigen, "_solve", nonsense)
    monkeypatch.setattr(eigen, "_by_svd", nonsense)
    with pytest.raises(NumericalError, match=r"the factor of h\.3 could not be decomposed"):
        eigen.eigenbasis(factor, "the factor of h.3")


def test_orthogonality_is_checked_block_by_block() -> None:
    q = torch.linalg.qr(torch.from_numpy(np.random.default_rng(0).standard_normal((50, 50))))[0]
    assert eigen.is_orthogonal(q, block=7)
    q[:, 49] += 1e-3 * q[:, 3]
    assert not eigen.is_orthogonal(q, block=7)
    assert not eigen.is_orthogonal(torch.full((3, 3), torch.nan))
