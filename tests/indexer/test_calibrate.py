"""Candidate recall, coverage and drift against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.search import Searcher
from engine.search.candidates import query_bits
from engine.signs import decode, decode_signs
from engine.store import Store
from indexer.calibrate import candidate_recall, coverage_summary, drift
from indexer.samples import draw_samples


def test_recall_counts_the_best_rows_among_the_nearest(make_store: Callable[..., Path]) -> None:
    store = Store.open(make_store(200, k=(40,), shard_rows=64, flagged=0.05))
    y = np.random.default_rng(3).standard_normal((6, 40)).astype(np.float32)
    own = np.array([0, 10, 20, 30, 40, 50])
    found = candidate_recall(Searcher(store.segments, store.layout, store.c, excluded=store.excluded), y, own)
    codes = np.concatenate([s.codes for s in store.segments])
    scales = np.concatenate([s.scales for s in store.segments])
    signs = decode_signs(codes, store.layout).astype(np.float64)
    x = decode(codes, scales, store.layout, store.c).astype(np.float64)
    hits = {name: {p["candidates"]: [] for p in found} for name in ("influence", "cosine")}
    for q, position in zip(y.astype(np.float64), own, strict=True):
        usable = np.flatnonzero(~store.excluded & (np.arange(200) != position))
        for sign in (1, -1):
            bits = decode_signs(query_bits(q[None].astype(np.float32), store.layout, complement=sign < 0), store.layout)[0]
            distance = (signs[usable] != bits).sum(axis=1)
            nearest = usable[np.lexsort((usable, distance))]
            scores = sign * (x[usable] @ q)
            norms = np.linalg.norm(x[usable], axis=1)
            for name, values in (("influence", scores), ("cosine", np.divide(scores, norms, out=np.zeros_like(scores), where=norms > 0))):
                best = usable[np.argsort(-values, kind="stable")[:10]]
                for r, shares in hits[name].items():
                    shares.append(np.isin(best, nearest[:r]).mean())
    assert [p["candidates"] for p in found] == [10, 20, 50, 100, 200]
    for point in found:
        assert point["recall"] == pytest.approx(min(np.mean(h[point["candidates"]]) for h in hits.values()), abs=0.009)  # ties of equal cosines
    assert found[-1]["recall"] == 1.0 and found[0]["recall"] < 0.9


def test_coverage_and_drift() -> None:
    coverage = np.linspace(0.1, 0.9, 101).astype(np.float32)
    summary = coverage_summary(coverage)
    assert summary["threshold"] == pytest.approx(0.14) and summary["median"] == pytest.approx(0.5) and summary["rows"] == 101
    moved = drift(np.array([0.1, 0.12, 0.5, 0.6], np.float32), {"coverage": summary}, summary["threshold"])
    assert moved == {"rows": 4, "median_new": pytest.approx(0.31), "median_old": pytest.approx(0.5), "below_threshold": 0.5}
    assert drift(coverage, None, 0.1) is None and drift(coverage[:0], {"coverage": summary}, 0.1) is None


@pytest.mark.parametrize(("n", "held_out"), [(10, 0), (20, 1), (400, 20), (5000, 128)])
def test_samples_are_seeded_and_leave_rows_out(n: int, held_out: int) -> None:
    a, b, c = (draw_samples(n, fit_examples=64, pca_examples=300, seed=seed) for seed in (0, 0, 1))
    assert len(a.held_out) == held_out and not np.isin(a.held_out, a.pca).any()
    assert len(a.curvature) == min(n, 64) and len(a.pca) == min(n - held_out, 300)
    for name in ("curvature", "pca", "held_out"):
        x = getattr(a, name)
        assert (np.diff(x) > 0).all() and (not len(x) or (x[0] >= 0 and x[-1] < n))
        np.testing.assert_array_equal(x, getattr(b, name))
    if n == 5000:
        assert not np.array_equal(a.pca, c.pca)
