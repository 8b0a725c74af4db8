"""Leads against the engine's form and against naive loops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import frontier
import frontier_leads as leads
import numpy as np
import pytest
from frontier_kernels import SPLITS, Kernels
from frontier_sketches import Lab, Plan

SIZES = {"train": 30, "disjoint": 24, "query": 5}
TRAIN, DISJOINT, QUERY = slice(0, 30), slice(30, 54), slice(54, 59)


@pytest.fixture
def x() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((59, 40)) * np.geomspace(3, 0.3, 40)).astype(np.float32)


def test_framed_is_the_default_form_of_the_frontier(x: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "40").mkdir()
    np.save(tmp_path / "40" / "a.npy", x.astype(np.float64) @ x.T.astype(np.float64))
    lab = Lab(Kernels(tmp_path, SIZES, {40: {"a": ["a"]}}), [("a", 0)], {"a": 40})
    found = lab.coordinates("model", 40, "disjoint", normalise=True)
    weighted = (found.x[0] * found.singular[0] ** -0.5).astype(np.float32)
    ours = leads.framed(weighted, 24, TRAIN, QUERY)
    theirs = lab.scores(Plan("model", 24, 40, scale="unbiased", normalise=True, directions=0.65, refine=2, flatten=0.5), "disjoint").scores
    assert theirs is not None
    np.testing.assert_allclose(ours / np.linalg.norm(ours), theirs / np.linalg.norm(theirs), atol=1e-3)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_signs_along_the_axes_by_a_loop(x: np.ndarray, power: float) -> None:
    found = leads.axis_weights(x, 12, TRAIN, QUERY, DISJOINT, power)
    size = np.abs(x[DISJOINT, :12]).mean(0)
    for q in range(5):
        for i in range(30):
            relative = np.mean([abs(x[i, j]) / size[j] for j in range(12)])
            expected = sum(x[54 + q, j] * size[j] ** power * (1 if x[i, j] >= 0 else -1) for j in range(12)) * relative
            assert found[q, i] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_decoder_fitted_on_the_stored_rows_comes_closer_to_them(x: np.ndarray) -> None:
    exact = x[QUERY, :16] @ x[TRAIN, :16].T
    plain, fitted = leads.framed(x, 24, TRAIN, QUERY), leads.ridge_decoder(x, 24, TRAIN, QUERY, TRAIN, 0.1)
    assert np.linalg.norm(fitted - exact) < 0.8 * np.linalg.norm(plain - exact)


def test_weights_per_bit_of_equal_bits_change_nothing(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = leads.framed(x, 24, TRAIN, QUERY)
    weighted = leads.bit_weights(x, 24, TRAIN, QUERY, TRAIN)
    assert np.corrcoef(plain.ravel(), weighted.ravel())[0, 1] > 0.98
    monkeypatch.setattr(leads.Framed, "bits", lambda self, rows: np.sign(self.u[rows] / self.u[rows]))
    monkeypatch.setattr(leads.Framed, "__init__", equal_frame)
    np.testing.assert_allclose(leads.bit_weights(x, 24, TRAIN, QUERY, TRAIN), leads.framed(x, 24, TRAIN, QUERY), rtol=1e-4, atol=1e-4)


def equal_frame(self: leads.Framed, x: np.ndarray, k: int) -> None:
    self.x, self.d = x, x.shape[1]
    self.u = np.tile(np.abs(x[:, :1]), (1, k))


def test_kronecker_sketches_by_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leads, "RANKS", (2,))
    rng = np.random.default_rng(1)
    parts = {split: rng.standard_normal((n, 6)).astype(np.float16) for split, n in SIZES.items()}
    lam = np.array([5, 1, 4, 0.1, 0.2, 0.3], np.float32)
    g = SimpleNamespace(
        modules=[("a", 0)],
        lam={"a": lam},
        mean={"a": float(lam.mean())},
        shape=lambda name: (3, 2),
        factor=lambda name, c: np.full(6, 2.0, np.float32),
        stored=lambda split, name: parts[split],
    )
    leads.compress(g, tmp_path)  # type: ignore[arg-type]  # a stand-in with the few attributes it reads
    found = np.load(tmp_path / "kronecker-0.npz")
    t = 2 * np.concatenate([parts[split] for split in SPLITS]).astype(np.float32).reshape(-1, 3, 2)
    again = np.random.default_rng([5, 0])
    left, right = again.standard_normal((3, 2)) / np.sqrt(3), again.standard_normal((2, 2)) / np.sqrt(2)
    np.testing.assert_allclose(found["random"], [left.T @ own @ right for own in t], rtol=1e-4, atol=1e-4)
    kept = (lam / (lam + frontier.DAMPING * lam.mean())).reshape(3, 2)
    rows, columns = np.argsort(-kept.sum(1))[:2], np.argsort(-kept.sum(0))
    np.testing.assert_allclose(found["leading"], t[:, rows][:, :, columns], rtol=1e-6)
