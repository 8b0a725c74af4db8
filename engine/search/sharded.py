"""A search whose rows lie in several places: each part answers for its own rows, and the partial lists are merged exactly.

Nothing here knows how a part is reached. A part that does not answer is an error of the whole search; an answer is never made of some parts only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.search.candidates import hamming_candidates, query_bits
from engine.search.request import Score, SearchRequest, SegmentView
from engine.search.searcher import Found, Searcher

# {largest first?: for each query (positions, scores)}, and with the Hamming distances of candidates
Lists = dict[bool, list[Found]]
Near = dict[bool, list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]]]
Ask = Callable[[str, Sequence[tuple[Any, ...]]], Sequence[Any]]  # (method of Part, arguments for each part) -> each part's result, or an exception


def divide(rows: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """[first, end) runs of segments for each part, of about equal numbers of rows. rows: of each segment. Parts may be empty."""
    ends = np.cumsum([0, *rows])
    goals = [ends[-1] * (i + 1) / parts for i in range(parts)]
    cuts = [0, *(int(np.argmin(np.abs(ends - goal))) for goal in goals)]
    return list(pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Rows:
    """What a part holds: store-wide positions first .. end - 1."""

    first: int
    end: int


class Part(Searcher):
    """One part's side. segments: its own, with bases counted from its first row; excluded: of its own rows; first: store-wide position of its first row."""

    def __init__(self, segments: Sequence[SegmentView], layout: BlockLayout, c: NDArray[np.float32], *, excluded: NDArray[np.bool_], first: int) -> None:
        super().__init__(segments, layout, c, excluded=excluded)
        self.first = first

    def held(self) -> Rows:
        """Which rows it answers for."""
        return Rows(self.first, self.first + self.n_rows)

    def exhaustive(self, request: SearchRequest, allowed: NDArray[np.uint8] | None, k: int, wanted: Sequence[bool]) -> Lists:
        """Its best k rows of each query and direction. allowed: one bit per row of its own."""
        lists = self._exhaustive(request, self._mask(allowed), k, wanted)
        return {largest: [(positions + self.first, scores) for positions, scores in found] for largest, found in lists.items()}

    def candidates(self, request: SearchRequest, allowed: NDArray[np.uint8] | None, r: int, wanted: Sequence[bool]) -> Near:
        """Its r rows nearest to each query's signs: positions, distances, and scores by (14)."""
        mask = self._mask(allowed)
        found: Near = {}
        for largest in wanted:
            near = hamming_candidates(self.segments, self.layout, request.y, r, mask, complement=not largest)
            bits = query_bits(request.y, self.layout, complement=not largest)
            found[largest] = [(p + self.first, self._distances(bits[q], p), self.score(request.y[q : q + 1], p, request.score)[0]) for q, p in enumerate(near)]
        return found

    def decoded(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """`decode` of store-wide positions that are its own."""
        return self.decode(positions - self.first)

    def scored(self, y: NDArray[np.float32], positions: NDArray[np.int64], score: Score) -> NDArray[np.float64]:
        """`score` of store-wide positions that are its own."""
        return self.score(y, positions - self.first, score)

    def _mask(self, allowed: NDArray[np.uint8] | None) -> NDArray[np.bool_] | None:
        requested = None if allowed is None else np.unpackbits(allowed, count=self.n_rows, bitorder="little").astype(np.bool_)
        return self._allowed(requested)

    def _distances(self, bits: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        out = np.zeros(len(positions), np.int64)
        for s, inside in self._grouped(positions):
            out[inside] = np.bitwise_count(s.codes[positions[inside] - s.base] ^ bits).sum(axis=1)
        return out


class ShardedSearcher(Searcher):
    """A Searcher that holds no rows: everything is asked of the parts. held: which rows each has, in order; ask: how they are asked, all at once."""

    def __init__(
        self, layout: BlockLayout, held: Sequence[Rows], ask: Ask, *, excluded: NDArray[np.bool_], calibration: Sequence[dict[str, float]] | None
    ) -> None:
        super().__init__([], layout, np.zeros(0, np.float32), calibration=calibration, engine="plain")
        self.excluded = None  # each part leaves out its own
        self.n_rows = len(excluded)
        self._n_usable = self.n_rows - int(np.count_nonzero(excluded))
        self._all_excluded = excluded
        self.held, self.ask = list(held), ask
        covered = [(r.first, r.end) for r in self.held if r.end > r.first]
        if [0, *(end for _, end in covered)] != [*(first for first, _ in covered), self.n_rows]:
            raise ValueError(f"the parts hold rows {covered}, and the store has {self.n_rows}")

    def warm_up(self) -> None:
        """Have every part compile what it needs."""
        y = np.ones((1, sum(self.layout.k)), np.float32)
        self._exhaustive(SearchRequest(y, 1), np.zeros(self.n_rows, np.bool_), 1, [True])

    def score(self, y: NDArray[np.float32], positions: NDArray[np.int64], score: Score = "influence") -> NDArray[np.float64]:
        return self._gathered("scored", positions, lambda own: (y, own, score), np.zeros((len(positions), len(y)), np.float64), np.transpose).T

    def decode(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._gathered("decoded", positions, lambda own: (own,), np.zeros((len(positions), sum(self.layout.k)), np.float32), lambda found: found)

    def _gathered(
        self,
        method: str,
        positions: NDArray[np.int64],
        arguments: Callable[[NDArray[np.int64]], tuple[Any, ...]],
        out: NDArray[Any],
        turn: Callable[[Any], Any],
    ) -> NDArray[Any]:
        inside = [np.flatnonzero((positions >= r.first) & (positions < r.end)) for r in self.held]
        for own, found in zip(inside, self.ask(method, [arguments(positions[own]) for own in inside]), strict=True):
            out[own] = turn(found)
        return out

    def _count(self, allowed: NDArray[np.bool_] | None) -> int:
        return self._n_usable if allowed is None else int(np.count_nonzero(allowed & ~self._all_excluded))

    def _exhaustive(self, request: SearchRequest, allowed: NDArray[np.bool_] | None, k: int, wanted: Sequence[bool]) -> Lists:
        bare = replace(request, allowed=None)
        parts: Sequence[Lists] = self.ask("exhaustive", [(bare, mask, k, list(wanted)) for mask in self._masks(allowed)])
        return {
            largest: [tuple(np.concatenate([part[largest][q][i] for part in parts]) for i in range(2)) for q in range(len(request.y))]  # type: ignore[misc]  # two arrays
            for largest in wanted
        }

    def _from_candidates(self, request: SearchRequest, allowed: NDArray[np.bool_] | None, r: int, wanted: Sequence[bool]) -> tuple[Lists, int]:
        bare = replace(request, allowed=None)
        parts: Sequence[Near] = self.ask("candidates", [(bare, mask, r, list(wanted)) for mask in self._masks(allowed)])
        lists: Lists = {}
        for largest in wanted:
            lists[largest] = []
            for q in range(len(request.y)):
                positions, distances, scores = (np.concatenate([part[largest][q][i] for part in parts]) for i in range(3))
                nearest = np.lexsort((positions, distances))[:r]  # the r nearest of all rows are among the r nearest of each part
                lists[largest].append((positions[nearest], scores[nearest]))
        return lists, sum(len(p) for found in lists.values() for p, _ in found)

    def _masks(self, allowed: NDArray[np.bool_] | None) -> list[NDArray[np.uint8] | None]:
        return [None if allowed is None else np.packbits(allowed[r.first : r.end], bitorder="little") for r in self.held]
