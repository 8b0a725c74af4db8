"""Requests that search together get what they would get alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine.errors import EogpError, SettingError
from engine.query import QueryEngine, QueryInput, QuerySpec
from engine.query.searching import Searched, search_together
from engine.search import SearchRequest, SearchResult

ASKED = (QueryInput(text="a"),)
SOME = {"field": "year", "gte": 1930}
SPECS = [
    QuerySpec(ASKED, top_k=3),
    QuerySpec(ASKED * 2, top_k=3),
    QuerySpec(ASKED, top_k=3, filter=SOME),
    QuerySpec(ASKED, top_k=5),
    QuerySpec(ASKED, top_k=3, candidates=4),
    QuerySpec(ASKED, top_k=3, filter=dict(reversed(list(SOME.items())))),
    QuerySpec(ASKED, top_k=3, score="cosine", direction="opponents"),
    QuerySpec(ASKED, top_k=3),
]


def measurements(engine: QueryEngine, specs: list[QuerySpec]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((len(s.queries), engine.store.layout.total_k)).astype(np.float32) for s in specs]


def test_alike_requests_share_a_read_and_no_answer_changes(asked: QueryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ys = measurements(asked, SPECS)
    alone = [search_together(asked.searcher, asked.store, [s], [y])[0] for s, y in zip(SPECS, ys, strict=True)]
    sizes: list[int] = []
    plain = asked.searcher.search

    def counted(request: SearchRequest) -> SearchResult:
        sizes.append(len(request.y))
        return plain(request)

    monkeypatch.setattr(asked.searcher, "search", counted)
    together = search_together(asked.searcher, asked.store, SPECS, ys)
    assert sorted(sizes) == [1, 1, 1, 2, 4]
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, Searched) and isinstance(other, Searched)
        assert one.n_allowed == other.n_allowed and one.result.method == other.result.method and one.result.n_candidates == other.result.n_candidates
        for mine, theirs in ((one.result.proponents, other.result.proponents), (one.result.opponents, other.result.opponents)):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                np.testing.assert_array_equal(mine.positions, theirs.positions)
                np.testing.assert_allclose(mine.scores, theirs.scores, rtol=1e-6)
    assert json.loads(json.dumps(together[0].timing if isinstance(together[0], Searched) else {})).keys() == {"filter", "search"}


def test_one_that_cannot_be_searched_fails_alone(asked: QueryEngine) -> None:
    specs = [*SPECS[:2], QuerySpec(ASKED, top_k=3, filter={"field": "nothing", "eq": 1})]
    ys = measurements(asked, specs)
    ys[0][0, 2] = np.inf
    found = search_together(asked.searcher, asked.store, specs, ys)
    assert isinstance(found[0], SettingError) and "not finite" in found[0].message
    assert isinstance(found[1], Searched) and found[1].result.proponents is not None
    assert isinstance(found[2], EogpError) and "nothing" in found[2].message
