"""The searches of several requests at once: those with the same options and filter share one read of the codes, and the filter is compiled once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.errors import EogpError
from engine.query.spec import QuerySpec
from engine.search import Ranking, Searcher, SearchRequest, SearchResult, compile_filter
from engine.store import Store


@dataclass(frozen=True, slots=True)
class Searched:
    """What was found for one request. y (A, K) float32: what was searched for, one row per answer, as in result; n_allowed: rows that may be returned;
    timing: milliseconds of its filter and search, shared with the requests alike."""

    y: NDArray[np.float32]
    result: SearchResult
    n_allowed: int
    timing: dict[str, float]


def search_together(searcher: Searcher, store: Store, specs: Sequence[QuerySpec], ys: Sequence[NDArray[np.float32]]) -> list[Searched | EogpError]:
    """Results of requests with measurements ys [(A, K) float32], in their order; a request that cannot be searched gets its own error."""
    alike: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        options = (spec.filter, _depth(spec), spec.score, spec.direction, spec.candidates)
        alike.setdefault(json.dumps(options, sort_keys=True, default=repr), []).append(i)
    found: dict[int, Searched | EogpError] = {}
    for members in alike.values():
        try:
            searched = _search(searcher, store, specs[members[0]], [ys[i] for i in members])
            found.update(zip(members, searched, strict=True))
        except EogpError as e:
            if len(members) == 1:
                found[members[0]] = e
            else:  # one of them alone is at fault
                found.update((i, search_together(searcher, store, [specs[i]], [ys[i]])[0]) for i in members)
    return [found[i] for i in range(len(specs))]


def _depth(spec: QuerySpec) -> int:
    return spec.rescore_n if spec.rescore else spec.top_k


def _search(searcher: Searcher, store: Store, spec: QuerySpec, ys: Sequence[NDArray[np.float32]]) -> list[Searched]:
    started = time.perf_counter()
    allowed = None if spec.filter is None else compile_filter(spec.filter, store.metadata, store.ids)
    filtered = time.perf_counter()
    result = searcher.search(SearchRequest(np.concatenate(ys), _depth(spec), spec.score, spec.direction, allowed, spec.candidates))
    timing = {"filter": 1000 * (filtered - started), "search": 1000 * (time.perf_counter() - filtered)}
    n_allowed = store.n_rows - int(np.count_nonzero(store.excluded if allowed is None else store.excluded | ~allowed))
    ends = np.cumsum([len(y) for y in ys]).tolist()
    return [Searched(y, _rows(result, slice(end - len(y), end)), n_allowed, timing) for y, end in zip(ys, ends, strict=True)]


def _rows(result: SearchResult, rows: slice) -> SearchResult:
    """The result of some of its queries."""
    parts = [None if r is None else Ranking(r.positions[rows], r.scores[rows], r.counts[rows]) for r in (result.proponents, result.opponents)]
    return replace(result, proponents=parts[0], opponents=parts[1])
