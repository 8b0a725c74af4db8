"""Searches in parts against one search over all rows: the same rows, the same scores, and no answer without all parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import StoreError
from engine.search import Searcher, SearchRequest
from engine.search.request import SearchResult
from engine.search.sharded import Part, Rows, ShardedSearcher, divide
from engine.store import Store
from engine.store.segment import Segment

MakeStore = Callable[..., Path]


def parts_of(store: Store, n: int) -> list[Part]:
    rows, made = [s.n for s in store.segments], []
    for begin, end in divide(rows, n):
        first, base, own = sum(rows[:begin]), 0, []
        for s in store.segments[begin:end]:
            own.append(Segment(store.path / "segments" / f"{store.segments.index(s):06d}", base, s.n, store.layout))
            base += s.n
        made.append(Part(own, store.layout, store.c, excluded=store.excluded[first : first + base], first=first))
    return made


def sharded(store: Store, n: int) -> ShardedSearcher:
    parts = parts_of(store, n)

    def ask(method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(part, method)(*own) for part, own in zip(parts, arguments, strict=True)]

    calibration = [{"candidates": 40, "recall": 0.5}, {"candidates": 200, "recall": 0.95}]
    return ShardedSearcher(store.layout, [p.held() for p in parts], ask, excluded=store.excluded, calibration=calibration)


def whole(store: Store) -> Searcher:
    return Searcher(
        store.segments, store.layout, store.c, excluded=store.excluded, calibration=[{"candidates": 40, "recall": 0.5}, {"candidates": 200, "recall": 0.95}]
    )


def same(a: SearchResult, b: SearchResult) -> None:
    assert (a.method, a.n_candidates, a.n_scored, a.recall) == (b.method, b.n_candidates, b.n_scored, b.recall)
    for mine, other in ((a.proponents, b.proponents), (a.opponents, b.opponents)):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            np.testing.assert_array_equal(mine.positions, other.positions)
            np.testing.assert_array_equal(mine.counts, other.counts)
            np.testing.assert_allclose(mine.scores, other.scores, rtol=1e-5)


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    """501 rows in six segments, a tenth of them flagged."""
    return Store.open(make_store(501, shard_rows=90, flagged=0.1, seed=3))


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("candidates", [None, 25, {"recall": 0.9}])
@pytest.mark.parametrize("score", ["influence", "cosine"])
def test_parts_answer_as_one(store: Store, n: int, candidates: Any, score: Any) -> None:
    rng = np.random.default_rng(n)
    y = rng.standard_normal((4, store.layout.total_k)).astype(np.float32)
    for allowed in (None, rng.random(store.n_rows) < 0.3, np.zeros(store.n_rows, np.bool_)):
        for direction, k in (("both", 12), ("opponents", 1), ("proponents", 1000)):
            request = SearchRequest(y, k, score, direction, allowed, candidates)  # type: ignore[arg-type]  # a Direction
            same(sharded(store, n).search(request), whole(store).search(request))


def test_equal_scores_go_to_the_lower_position_across_parts(store: Store) -> None:
    y = np.zeros((1, store.layout.total_k), np.float32)  # every score is 0
    request = SearchRequest(y, 20)
    same(sharded(store, 4).search(request), whole(store).search(request))


def test_rows_are_decoded_and_scored_where_they_lie(store: Store) -> None:
    positions = np.array([500, 3, 89, 90, 250, 3], np.int64)
    y = np.random.default_rng(0).standard_normal((2, store.layout.total_k)).astype(np.float32)
    np.testing.assert_array_equal(sharded(store, 3).decode(positions), whole(store).decode(positions))
    np.testing.assert_array_equal(sharded(store, 3).score(y, positions), whole(store).score(y, positions))


def test_a_part_that_fails_fails_the_search(store: Store) -> None:
    searcher = sharded(store, 3)
    inner, broken = searcher.ask, StoreError("gone")

    def ask(method: str, arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        inner(method, arguments)
        raise broken

    searcher.ask = ask
    with pytest.raises(StoreError, match="gone"):
        searcher.search(SearchRequest(np.ones((1, store.layout.total_k), np.float32)))


def test_parts_must_cover_the_store() -> None:
    def refused(held: list[Rows], n: int) -> None:
        with pytest.raises(ValueError, match="the parts hold rows"):
            ShardedSearcher(None, held, lambda *_: [], excluded=np.zeros(n, np.bool_), calibration=None)  # type: ignore[arg-type]  # the layout is not looked at

    refused([Rows(0, 5), Rows(6, 10)], 10)
    refused([Rows(0, 5), Rows(5, 9)], 10)
    refused([], 1)


def test_division_is_even_and_whole() -> None:
    def counts(rows: list[int], n: int) -> list[int]:
        runs = divide(rows, n)
        assert runs[0][0] == 0 and runs[-1][1] == len(rows) and all(a[1] == b[0] for a, b in pairwise(runs))
        return [sum(rows[begin:end]) for begin, end in runs]

    assert counts([10] * 9, 3) == [30, 30, 30]
    assert counts([100, 1, 1, 100], 2) == [101, 101]
    assert sorted(counts([7], 3)) == [0, 0, 7]
    assert counts([], 2) == [0, 0]
    spread: NDArray[np.int64] = np.array(counts([4096] * 100, 7))
    assert spread.max() - spread.min() <= 4096
