"""Signs chosen together: against exhaustive search and a naive descent."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.pca import random_frame
from engine.refine import refine_signs


def error(v: NDArray[np.float64], frame: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """min over s of ||v - s F b||^2."""
    reached = frame @ b
    return float(v @ v - (v @ reached) ** 2 / (reached @ reached))


def problem(n: int, d: int, k: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    frame = random_frame(d, k, rng).numpy()
    v = rng.standard_normal((n, d))
    return v, frame, (v @ frame).astype(np.float32), (frame.T @ frame).astype(np.float32)


def test_a_frame_is_tight_and_a_square_one_leaves_the_signs() -> None:
    _, frame, x, gram = problem(20, 16, 16, 0)
    np.testing.assert_allclose(frame @ frame.T, np.eye(16), atol=1e-12)
    np.testing.assert_array_equal(refine_signs(x, gram, 5), np.where(x >= 0, 1, -1))
    _, frame, _, _ = problem(1, 5, 12, 1)
    np.testing.assert_allclose(frame @ frame.T, np.eye(5), atol=1e-12)


@pytest.mark.parametrize(("d", "k"), [(4, 8), (20, 32), (30, 128)])
def test_every_sweep_lowers_the_error(d: int, k: int) -> None:
    v, frame, x, gram = problem(40, d, k, 2)
    before = [error(v[i], frame, np.where(x[i] >= 0, 1.0, -1.0)) for i in range(40)]
    for sweeps in (1, 2, 4):
        signs = refine_signs(x, gram, sweeps)
        assert set(np.unique(signs)) == {-1, 1}
        now = [error(v[i], frame, signs[i].astype(np.float64)) for i in range(40)]
        assert all(a <= b * (1 + 1e-5) for a, b in zip(now, before, strict=True))
        before = now
    plain = np.mean([error(v[i], frame, np.where(x[i] >= 0, 1.0, -1.0)) for i in range(40)])
    assert np.mean(before) < 0.75 * plain


def test_refined_signs_are_a_local_optimum_and_near_the_best() -> None:
    v, frame, x, gram = problem(12, 3, 10, 3)
    signs = refine_signs(x, gram, 20).astype(np.float64)
    best = np.array([min(error(v[i], frame, np.array(b, np.float64)) for b in product((-1.0, 1.0), repeat=10)) for i in range(12)])
    plain = np.array([error(v[i], frame, np.where(x[i] >= 0, 1.0, -1.0)) for i in range(12)])
    found = np.array([error(v[i], frame, signs[i]) for i in range(12)])
    assert (found >= best - 1e-9).all()
    assert (found - best).mean() < 0.35 * (plain - best).mean()


def test_a_row_depends_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, x, gram = problem(30, 12, 24, 4)
    together = refine_signs(x, gram, 3)
    monkeypatch.setattr("engine.refine._ROWS", 7)
    np.testing.assert_array_equal(refine_signs(x, gram, 3), together)
    np.testing.assert_array_equal(np.concatenate([refine_signs(x[i : i + 1], gram, 3) for i in range(30)]), together)


def test_scaling_an_example_keeps_its_signs_and_zero_rows_stay() -> None:
    _, _, x, gram = problem(6, 8, 20, 5)
    np.testing.assert_array_equal(refine_signs(x * np.float32(1024), gram, 3), refine_signs(x, gram, 3))
    x[2] = 0
    assert (refine_signs(x, gram, 3)[2] == 1).all()
