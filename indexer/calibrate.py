"""What the left-out rows say about the finished sketch: their coverage, and how many Hamming candidates the best rows lie within."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from engine.search import Searcher, SearchRequest
from engine.search.candidates import hamming_candidates
from engine.search.request import Score

TOP = 10
DEEPEST = 100_000  # candidates ranked per query
ROWS_SCORED = 20_000_000  # queries times rows: bounds the time of a large store's calibration
COVERAGE_QUANTILE = 0.05


def coverage_summary(coverage: NDArray[np.float32]) -> dict[str, float]:
    """Quantiles of coverage; `threshold` is the 5th percentile."""
    low, middle, high = np.quantile(coverage.astype(np.float64), [COVERAGE_QUANTILE, 0.5, 1 - COVERAGE_QUANTILE])
    return {"threshold": float(low), "median": float(middle), "high": float(high), "rows": len(coverage)}


def candidate_recall(searcher: Searcher, y: NDArray[np.float32], own: NDArray[np.int64]) -> list[dict[str, float]]:
    """[{candidates: R, recall: r}]: the share of the top 10 by (14) that lie among the R rows nearest by Hamming distance.

    y (B, total_k): left-out rows as queries; own (B,): their positions, left out of their own results. The mean over queries and directions, and of the
    two scores the lower.
    """
    n = searcher.n_rows
    deepest = min(n, DEEPEST)
    ranks: dict[Score, list[NDArray[np.int64]]] = {score: [] for score in get_args(Score)}
    for i in range(min(len(y), max(16, ROWS_SCORED // max(n, 1)))):
        allowed = np.ones(n, np.bool_) if searcher.excluded is None else ~searcher.excluded
        allowed[own[i]] = False
        query = y[i : i + 1]
        for complement in (False, True):
            near = hamming_candidates(searcher.segments, searcher.layout, query, deepest, allowed, complement=complement)[0]
            rank = np.full(n, deepest, np.int64)
            rank[near] = np.arange(len(near))
            for score, found in ranks.items():
                result = searcher.search(SearchRequest(query, TOP, score, "opponents" if complement else "proponents", allowed))
                best = result.opponents if complement else result.proponents
                assert best is not None
                found.append(rank[best.positions[0][: best.counts[0]]])
    return _curve([np.concatenate(found) for found in ranks.values() if found], deepest)


def _curve(ranks: Sequence[NDArray[np.int64]], deepest: int) -> list[dict[str, float]]:
    if not ranks or not all(len(r) for r in ranks):
        return []
    steps = [r for power in range(1, 7) for r in (10**power, 2 * 10**power, 5 * 10**power) if r < deepest]
    return [{"candidates": r, "recall": round(min(float((rank < r).mean()) for rank in ranks), 6)} for r in [*steps, deepest]]


def drift(new: NDArray[np.float32], calibration: dict[str, Any] | None, threshold: float | None) -> dict[str, float] | None:
    """How appended rows' coverage compares with the left-out rows': medians, and the share below the threshold (0.05 where nothing has changed)."""
    old = (calibration or {}).get("coverage")
    if old is None or threshold is None or not len(new):
        return None
    return {
        "rows": len(new),
        "median_new": float(np.median(new)),
        "median_old": float(old["median"]),
        "below_threshold": float((new < threshold).mean()),
    }
