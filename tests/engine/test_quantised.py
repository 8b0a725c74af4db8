"""Stored forms of P against dense products."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.quantised import LEVELS, THRESHOLD, DenseMatrix, QuantisedMatrix


def matrix(m: int, d: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((m, d)) * rng.lognormal(0, 1, (m, 1)))


def dense(q: QuantisedMatrix) -> torch.Tensor:
    """A loop over entries."""
    out = torch.zeros(q.shape)
    for r in range(q.shape[0]):
        for j in range(q.columns):
            out[r, j] = float(q.scales[r]) * LEVELS[int(q.codes[r, j // 4]) >> (2 * (j % 4)) & 3]
    return out


@pytest.mark.parametrize("d", [1, 3, 4, 9])
def test_entries_go_to_the_nearest_level_of_their_row(d: int) -> None:
    p = matrix(11, d)
    q = QuantisedMatrix.quantise(p)
    assert q.shape == (11, d)
    assert q.codes.shape == (11, (d + 3) // 4)
    assert q.n_bytes == 11 * ((d + 3) // 4) + 22
    rms = p.square().mean(1, keepdim=True).sqrt()
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    nearest = levels[(p / rms)[..., None].sub(levels).abs().argmin(-1)]
    expected = nearest * (p.square().sum(1) / (p * nearest).sum(1))[:, None]
    torch.testing.assert_close(dense(q).double(), expected, rtol=1e-3, atol=0)


def test_thresholds_lie_midway() -> None:
    assert pytest.approx((LEVELS[2] + LEVELS[3]) / 2, abs=5e-4) == THRESHOLD
    assert LEVELS[:2] == (-LEVELS[3], -LEVELS[2])


@pytest.mark.parametrize("kind", ["dense", "quantised"])
def test_products_equal_a_dense_matrix_whatever_the_chunk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = matrix(23, 6)
    stored = DenseMatrix(p.half()) if kind == "dense" else QuantisedMatrix.quantise(p)
    full = stored.entries.float() if isinstance(stored, DenseMatrix) else dense(stored)
    z, v = (
        torch.from_numpy(np.random.default_rng(1).standard_normal((2, 5, 23))).float(),
        torch.from_numpy(np.random.default_rng(2).standard_normal((4, 6))).float(),
    )
    for convert, compiled in ((1 << 20, 1 << 20), (12, 1 << 20), (12, 0), (1 << 20, 0)):
        monkeypatch.setattr("engine.quantised._CONVERT", convert)
        monkeypatch.setattr("engine.quantised._COMPILED", compiled)
        x = torch.ones(2, 5, 6)
        stored.apply(z, x)
        torch.testing.assert_close(x, 1 + z @ full, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stored.transposed(v), v @ full.T, rtol=1e-4, atol=1e-4)


def test_no_energy_is_lost_and_the_error_averages_out() -> None:
    """An orthonormal basis of a few directions in many coordinates survives two bits: its quantised Gram matrix is near the identity."""
    basis = torch.linalg.qr(torch.from_numpy(np.random.default_rng(3).standard_normal((20000, 8))))[0]
    q = QuantisedMatrix.quantise(basis)
    approx = q.transposed(torch.eye(8)).double().T
    np.testing.assert_allclose(basis.T @ approx, np.eye(8), atol=0.02)


def test_zero_rows_stay_zero() -> None:
    p = matrix(5, 4)
    p[2] = 0
    q = QuantisedMatrix.quantise(p)
    assert float(q.scales[2]) == 0
    assert not dense(q)[2].any()
