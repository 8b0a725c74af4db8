"""Which coordinates stage 1 keeps, against sorting."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.selection import select_coordinates, top_positions


@dataclass
class Module:
    """The fields of a module's curvature that selection reads."""

    lam: NDArray[np.float32]
    d_out: int
    d_in: int
    mean_lambda: float
    damping: float
    positions: NDArray[np.int64] | None = None


def module(lam: NDArray[np.float32], positions: NDArray[np.int64] | None = None, mean: float | None = None, shape: tuple[int, int] | None = None) -> Module:
    d_out, d_in = shape or lam.shape
    average = float(lam.mean()) if mean is None else mean
    return Module(lam, d_out, d_in, average, 0.1 * average, positions)


def curvature(**modules: Module) -> Any:
    return SimpleNamespace(modules=modules)


def lambdas(shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).lognormal(0, 2, shape).astype(np.float32)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 14))
def test_top_positions_equal_a_stable_sort(values: list[int], m: int) -> None:
    expected = sorted(sorted(range(len(values)), key=lambda i: -values[i])[:m])
    assert top_positions(np.array(values, np.float32), m).tolist() == expected


def test_each_module_keeps_its_largest_eigenvalues() -> None:
    a, b = lambdas((3, 5), 0), lambdas((2, 2), 1)
    found = select_coordinates(curvature(a=module(a), b=module(b)), {"model": ["a", "b"]}, {"a": 6, "b": 100})
    assert found.positions["a"].tolist() == sorted(np.argsort(-a.ravel())[:6].tolist())
    assert found.positions["b"].tolist() == [0, 1, 2, 3]
    assert found.positions["a"].dtype == np.int64
    share = {n: v.astype(np.float64) / (v.astype(np.float64) + 0.1 * float(v.mean())) for n, v in (("a", a), ("b", b))}
    kept = share["a"].ravel()[found.positions["a"]].sum() + share["b"].sum()
    assert found.kept_share == pytest.approx(kept / (share["a"].sum() + share["b"].sum()))


def test_joint_selection_spends_the_blocks_width_where_the_ratio_is_largest() -> None:
    a, b = lambdas((6, 6), 2), lambdas((6, 6), 3) ** 0.1
    modules = curvature(a=module(a), b=module(b))
    found = select_coordinates(modules, {"model": ["a", "b"]}, {"a": 8, "b": 8}, joint=True)
    ratio = np.concatenate([v.ravel() / (v.ravel() + 0.1 * float(v.mean())) for v in (a, b)])
    best = set(np.argsort(-ratio)[:16].tolist())
    assert set(found.positions["a"].tolist()) == {i for i in best if i < 36}
    assert set(found.positions["b"].tolist()) == {i - 36 for i in best if i >= 36}
    apart = select_coordinates(modules, {"model": ["a", "b"]}, {"a": 8, "b": 8})
    assert found.kept_share > apart.kept_share
    alone = select_coordinates(modules, {"a": ["a"], "b": ["b"]}, {"a": 8, "b": 8}, joint=True)
    assert alone.positions["a"].tolist() == apart.positions["a"].tolist()


def test_joint_selection_leaves_every_module_a_coordinate() -> None:
    a = module(np.full((4, 4), 100, np.float32))
    weak = module(np.array([[1, 1e-9], [1e-9, 1e-9]], np.float32))
    weak.damping = 1e9
    found = select_coordinates(curvature(a=a, weak=weak), {"model": ["a", "weak"]}, {"a": 4, "weak": 2}, joint=True)
    assert {name: len(p) for name, p in found.positions.items()} == {"a": 6, "weak": 1}
    assert found.positions["weak"].tolist() == [0]


def test_candidates_stand_for_a_grid_that_is_too_large() -> None:
    """The kept share is then a lower bound of the one of the whole grid."""
    whole = lambdas((8, 8), 4)
    grid = np.sort(np.random.default_rng(0).permutation(np.argsort(-whole.ravel())[:20]))
    full = select_coordinates(curvature(a=module(whole)), {"a": ["a"]}, {"a": 5})
    part = module(whole.ravel()[grid], grid.astype(np.int64), float(whole.mean()), (8, 8))
    found = select_coordinates(curvature(a=part), {"a": ["a"]}, {"a": 5})
    assert found.positions["a"].tolist() == full.positions["a"].tolist()
    assert 0.5 * full.kept_share < found.kept_share <= full.kept_share + 1e-9
