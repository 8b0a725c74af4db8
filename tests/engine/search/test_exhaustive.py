"""The compiled scan keeps exactly the rows that scoring every row in float64 keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.blocks import BlockLayout
from engine.search import ArraySegment, Searcher, SearchRequest
from engine.search.exhaustive import Scanner, quantise, words_of
from engine.search.scoring import score_rows

SHAPES = [
    pytest.param((64,), (40,), id="one block"),
    pytest.param((13,), (17, 1, 0, 30), id="odd bits, four segments"),
    pytest.param((9, 64, 11, 8), (25, 31), id="four blocks"),
]


def assert_same(a: Any, b: Any) -> None:
    assert (a is None) == (b is None)
    if a is not None:
        np.testing.assert_array_equal(a.counts, b.counts)
        np.testing.assert_array_equal(a.positions, b.positions)
        np.testing.assert_allclose(a.scores, b.scores, rtol=1e-6)


def compare(s: Any, request: SearchRequest, **options: Any) -> None:
    plain, scan = (Searcher(s.segments, s.layout, s.c, engine=e, **options).search(request) for e in ("plain", "scan"))
    assert_same(scan.proponents, plain.proponents)
    assert_same(scan.opponents, plain.opponents)


@pytest.mark.parametrize(("k", "sizes"), SHAPES)
@pytest.mark.parametrize("score", ["influence", "cosine"])
@pytest.mark.parametrize("top", [1, 7, 1000])
def test_scan_equals_plain(sketches: Any, k: Any, sizes: Any, score: Any, top: int) -> None:
    s = sketches(k, sizes, 19, seed=1)  # more queries than share one pass
    allowed = np.random.default_rng(2).random(s.n) < 0.3
    for mask in (None, allowed, np.zeros(s.n, np.bool_)):
        compare(s, SearchRequest(s.y, top, score, "both", mask))
    compare(s, SearchRequest(s.y, top, score, "opponents"), excluded=allowed, threads=3)


def test_candidates_are_scored_alike(sketches: Any) -> None:
    s = sketches((64,), (30, 25), 3, seed=12)
    for score in ("influence", "cosine"):
        for candidates in (1, 20, 55):
            compare(s, SearchRequest(s.y, 5, score, candidates=candidates, allowed=np.arange(55) % 4 != 0))


def test_wide_groups_and_blocks_that_do_not_fill_them(sketches: Any) -> None:
    s = sketches((600, 13, 512), (230, 41), 3, seed=3)
    compare(s, SearchRequest(s.y, 20))
    compare(s, SearchRequest(s.y, 20, "cosine"))


@pytest.mark.slow
def test_without_byte_products_the_sums_are_the_same(sketches: Any) -> None:
    s = sketches((600,), (100,), 3, seed=4)
    scan = Scanner(s.layout, s.c, threads=1, vnni=False)
    found = scan.best(s.segments, s.y, 10, "influence", [1], None)[0]
    for q, (positions, _) in enumerate(found):
        assert sorted(positions.tolist()) == sorted(np.argsort(-s.oracle()[q])[:10].tolist())


@pytest.mark.parametrize("top", [5, 60])
def test_heavy_tails_equal_scores_and_queries_of_every_size(sketches: Any, top: int) -> None:
    s = sketches((64,), (300, 50), 6, seed=5, spread=3.0)
    s.segments[0].codes[100:200] = s.segments[0].codes[100]  # a hundred equal rows
    s.segments[0].scales[100:200] = s.segments[0].scales.max()
    s.y[0] = 0
    s.y[1] *= 1e30
    s.y[2] *= 1e-30
    s.y[3, 1:] = 0
    s.y[4] = np.exp(np.linspace(0, 20, 64))
    compare(s, SearchRequest(s.y, top))
    compare(s, SearchRequest(s.y[[0, 1, 2, 4, 5]], top, "cosine"))  # by one coordinate alone every row has the same cosine, up to rounding
    assert Searcher(s.segments, s.layout, s.c, engine="scan").search(SearchRequest(s.y[:1], 5)).proponents.positions[0].tolist() == [0, 1, 2, 3, 4]  # type: ignore[union-attr]  # proponents were asked for


def test_rows_that_differ_in_the_last_digit_keep_their_order() -> None:
    """Scores closer together than 16 quantised bits or float32 can tell apart."""
    rng = np.random.default_rng(6)
    layout = BlockLayout(("b",), (64,))
    codes = np.packbits(np.tri(64, 64, -1, dtype=np.uint8), axis=1, bitorder="little")
    y = np.concatenate([[1.0], np.full(63, 1e-7)]).astype(np.float32)[None]
    order = rng.permutation(64)
    segment = ArraySegment(0, codes[order], np.ones((64, 1), np.float16))
    found = Searcher([segment], layout, np.ones(1, np.float32), engine="scan").search(SearchRequest(y, 64, direction="proponents")).proponents
    assert found is not None
    assert order[found.positions[0]].tolist() == list(range(63, -1, -1))


def test_the_error_bound_holds_and_is_small() -> None:
    rng = np.random.default_rng(7)
    layout = BlockLayout(("a", "b"), (600, 70))
    y = rng.standard_normal((4, 670)) * np.exp(2 * rng.standard_normal(670))
    q = quantise(y, layout, words_of(layout))
    approximate = (q.y8.swapaxes(0, 1) * q.delta.T[..., None].astype(np.float64)).reshape(4, -1)
    finer = approximate + (q.low8[:, :, 0] * q.low_delta.astype(np.float64)).reshape(4, -1)
    true = q.y64.reshape(4, -1)
    for b, groups in enumerate([slice(0, 1024), slice(1024, 1536)]):
        assert (np.abs(true - approximate)[:, groups].sum(axis=1) <= q.error_8[b]).all()
        assert (np.abs(true - finer)[:, groups].sum(axis=1) <= q.low_error[:, b, 0]).all()
    assert (q.low_error[..., 0].T / q.error_8 < 0.02).all()


def test_many_blocks_are_scored_with_sixteen_bits_at_once(sketches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = BlockLayout(tuple(map(str, range(16))), (1024,) * 16)
    y = np.random.default_rng(0).standard_normal((2, wide.total_k))
    assert quantise(y, wide, 8).loose(np.ones(16, np.float32))
    assert not quantise(np.ones((2, 64)), BlockLayout(("b",), (64,)), 1).loose(np.ones(1, np.float32))
    monkeypatch.setattr("engine.search.exhaustive.LOOSE", 0.0)
    s = sketches((64,) * 5, (150, 60), 18, seed=9)
    assert quantise(s.y.astype(np.float64), s.layout, words_of(s.layout)).refined().y8.shape == (5, 36, 64)
    compare(s, SearchRequest(s.y, 20))
    compare(s, SearchRequest(s.y, 20, "cosine", allowed=np.arange(210) % 3 != 0))


def test_a_store_beyond_the_plain_path_uses_the_scan(sketches: Any) -> None:
    s = sketches((64,), (30,), 1, seed=8)
    assert Searcher(s.segments, s.layout, s.c).engine == "plain"
    many = ArraySegment(0, np.zeros((400_000, 8), np.uint8), np.zeros((400_000, 1), np.float16))
    assert Searcher([many], s.layout, s.c).engine == "scan"
    searcher = Searcher(s.segments, s.layout, s.c, engine="scan")
    searcher.warm_up()
    np.testing.assert_allclose(
        searcher.search(SearchRequest(s.y, 3)).proponents.scores[0],  # type: ignore[union-attr]  # proponents were asked for
        np.sort(score_rows(s.segments[0].codes, s.segments[0].scales, s.layout, s.c, s.y, "influence")[0])[::-1][:3],
        rtol=1e-6,
    )
