"""Every path of the searcher gives the oracle's ranking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.errors import LimitError, SettingError
from engine.search import Searcher, SearchRequest

SHAPES = [
    pytest.param((64,), (40,), id="one block"),
    pytest.param((13,), (17, 1, 0, 30), id="one block of odd bits, four segments"),
    pytest.param((9, 64, 130, 8), (25, 31), id="four blocks"),
]


def expected(scores: np.ndarray, allowed: np.ndarray | None, k: int, largest: bool) -> list[int]:
    rows = range(len(scores)) if allowed is None else np.flatnonzero(allowed)
    return [int(i) for i in sorted(rows, key=lambda i: (-scores[i] if largest else scores[i], i))[:k]]


def assert_ranking(got: Any, scores: np.ndarray, allowed: np.ndarray | None, k: int, largest: bool) -> None:
    for q in range(len(scores)):
        want = expected(scores[q], allowed, k, largest)
        n = int(got.counts[q])
        assert got.positions[q, :n].tolist() == want
        np.testing.assert_allclose(got.scores[q, :n], scores[q][want], rtol=1e-5, atol=1e-5 * np.abs(scores[q]).max(initial=0))
        assert (got.positions[q, n:] == -1).all()


@pytest.mark.parametrize(("k", "sizes"), SHAPES)
@pytest.mark.parametrize("score", ["influence", "cosine"])
@pytest.mark.parametrize("top", [1, 7, 1000])
@pytest.mark.parametrize("filtered", [False, True])
def test_exhaustive_equals_the_oracle(sketches: Any, k: Any, sizes: Any, score: Any, top: int, filtered: bool) -> None:
    s = sketches(k, sizes, 3, seed=1)
    scores = s.oracle(score)
    allowed = np.random.default_rng(2).random(s.n) < 0.3 if filtered else None
    result = Searcher(s.segments, s.layout, s.c).search(SearchRequest(s.y, top, score, "both", allowed))
    assert result.method == "exhaustive"
    assert_ranking(result.proponents, scores, allowed, top, True)
    assert_ranking(result.opponents, scores, allowed, top, False)


@pytest.mark.parametrize(("k", "sizes"), SHAPES)
@pytest.mark.parametrize("score", ["influence", "cosine"])
def test_candidates_of_every_row_equal_the_oracle(sketches: Any, k: Any, sizes: Any, score: Any) -> None:
    s = sketches(k, sizes, 2, seed=3)
    scores = s.oracle(score)
    allowed = np.random.default_rng(4).random(s.n) < 0.5
    for mask in (None, allowed):
        result = Searcher(s.segments, s.layout, s.c).search(SearchRequest(s.y, 5, score, "both", mask, candidates=s.n))
        assert result.method == "candidates"
        assert result.n_candidates == s.n
        assert_ranking(result.proponents, scores, mask, 5, True)
        assert_ranking(result.opponents, scores, mask, 5, False)


def test_one_direction_leaves_the_other_out(sketches: Any) -> None:
    s = sketches((64,), (30,), 1, seed=5)
    searcher = Searcher(s.segments, s.layout, s.c)
    both = searcher.search(SearchRequest(s.y, 4))
    only = searcher.search(SearchRequest(s.y, 4, direction="opponents"))
    assert only.proponents is None
    assert only.opponents is not None and both.opponents is not None
    assert only.opponents.positions.tolist() == both.opponents.positions.tolist()


def test_excluded_rows_never_come_back(sketches: Any) -> None:
    s = sketches((64,), (20, 20), 2, seed=6)
    excluded = np.zeros(40, np.bool_)
    excluded[np.random.default_rng(0).choice(40, 15, replace=False)] = True
    searcher = Searcher(s.segments, s.layout, s.c, excluded=excluded)
    allowed = np.arange(40) % 3 != 0
    for mask in (None, allowed):
        for candidates in (None, 40):
            result = searcher.search(SearchRequest(s.y, 40, allowed=mask, candidates=candidates))
            keep = ~excluded if mask is None else ~excluded & mask
            assert_ranking(result.proponents, s.oracle(), keep, 40, True)


def test_equal_scores_go_to_the_lower_position(sketches: Any) -> None:
    s = sketches((64,), (50, 50), 1, seed=7)
    for segment in s.segments:
        segment.codes[:] = s.segments[0].codes[0]
        segment.scales[:] = 1
        segment.index.reset()
        segment.index.add(segment.codes)
    searcher = Searcher(s.segments, s.layout, s.c)
    for candidates in (None, 100):
        result = searcher.search(SearchRequest(s.y, 60, candidates=candidates))
        assert result.proponents is not None and result.opponents is not None
        assert result.proponents.positions[0].tolist() == list(range(60))
        assert result.opponents.positions[0].tolist() == list(range(60))


def test_an_empty_store_and_an_empty_filter_answer_nothing(sketches: Any) -> None:
    s = sketches((64,), (0,), 2, seed=8)
    result = Searcher(s.segments, s.layout, s.c).search(SearchRequest(s.y, 3))
    assert result.proponents is not None
    assert result.proponents.counts.tolist() == [0, 0]
    s = sketches((64,), (9,), 2, seed=8)
    for candidates in (None, 5):
        result = Searcher(s.segments, s.layout, s.c).search(SearchRequest(s.y, 3, allowed=np.zeros(9, np.bool_), candidates=candidates))
        assert result.proponents is not None
        assert result.proponents.counts.tolist() == [0, 0]
        assert result.proponents.positions.size == 0


def test_a_recall_picks_the_smallest_calibrated_number(sketches: Any) -> None:
    s = sketches((64,), (50,), 1, seed=9)
    calibration = [{"candidates": 10, "recall": 0.7}, {"candidates": 20, "recall": 0.96}, {"candidates": 40, "recall": 0.99}]
    searcher = Searcher(s.segments, s.layout, s.c, calibration=calibration)
    result = searcher.search(SearchRequest(s.y, 3, candidates={"recall": 0.95}))
    assert (result.n_candidates, result.recall) == (20, 0.96)
    assert result.n_scored == 40
    result = searcher.search(SearchRequest(s.y, 3, candidates={"recall": 0.995}))
    assert (result.n_candidates, result.recall) == (50, 1.0)


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"top_k": 0}, LimitError, "top_k"),
        ({"top_k": True}, LimitError, "top_k"),
        ({"score": "dot"}, SettingError, "score"),
        ({"direction": "up"}, SettingError, "direction"),
        ({"candidates": 0}, LimitError, "candidates"),
        ({"candidates": True}, SettingError, "candidates"),
        ({"candidates": {"recall": 2}}, SettingError, "candidates"),
        ({"candidates": {"recall": 0.9}}, SettingError, "candidates"),
    ],
)
def test_bad_requests_name_the_field(sketches: Any, change: dict[str, Any], error: type[Exception], field: str) -> None:
    s = sketches((64,), (5,), 1, seed=10)
    with pytest.raises(error) as raised:
        Searcher(s.segments, s.layout, s.c).search(SearchRequest(s.y, **change))
    assert raised.value.field == field  # type: ignore[attr-defined]  # every error raised here is an EogpError


def test_a_query_that_is_not_finite_is_refused(sketches: Any) -> None:
    s = sketches((64,), (5,), 1, seed=11)
    s.y[0, 3] = np.nan
    with pytest.raises(SettingError, match="not finite"):
        Searcher(s.segments, s.layout, s.c).search(SearchRequest(s.y))
