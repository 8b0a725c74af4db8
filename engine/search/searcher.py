"""Search over the segments of a store: exhaustive by equation (14), or Hamming candidates re-scored by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.search.candidates import hamming_candidates, pick_candidates
from engine.search.exhaustive import Scanner
from engine.search.gpu_candidates import GpuCandidates, on_gpu
from engine.search.request import ArraySegment, Score, SearchRequest, SearchResult, SegmentView, check, total_rows
from engine.search.scoring import decode, score_rows
from engine.search.topk import best, ranking

if TYPE_CHECKING:
    import torch

    from engine.search.gpu import GpuScanner

Engine = Literal["scan", "plain", "gpu"]
PLAIN_BITS = 20_000_000  # a store this small is searched by numpy in less time than the scan takes to compile
Found = tuple[NDArray[np.int64], NDArray[np.float64]]  # positions and scores of one query's best rows


class Searcher:
    """Answers queries from segments of one layout. c: (n_blocks,) the factors c_b of the stored scales; excluded (N,) bool: rows never returned.

    engine: "scan" is compiled (1-5 s on first use) and fast, "plain" is numpy and slow, "gpu" keeps codes and scales on
    `device`; all return the same rows. By default it goes by the size of the store and whether `device` is a GPU with room for it.
    threads: of the scan; 0 follows OMP_NUM_THREADS, else the CPUs. calibration: [{"candidates": R, "recall": r}, ...], measured at index time, for candidates={"recall": ...}.
    """

    def __init__(
        self,
        segments: Sequence[SegmentView],
        layout: BlockLayout,
        c: NDArray[np.float32],
        *,
        excluded: NDArray[np.bool_] | None = None,
        calibration: Sequence[dict[str, float]] | None = None,
        threads: int = 0,
        engine: Engine | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.segments = [s for s in segments if s.n]
        self.layout = layout
        self.c = np.asarray(c, np.float32)
        self.n_rows = total_rows(segments)
        self.excluded = excluded if excluded is not None and excluded.any() else None
        self.calibration = list(calibration or [])
        self.threads = threads
        self.engine: Engine = engine or self._fastest(device)
        self._device = device
        self._scan: Scanner | GpuScanner | None = None
        self._lock = Lock()

    def _fastest(self, device: torch.device | None) -> Engine:
        if self.n_rows * sum(self.layout.k) < PLAIN_BITS:
            return "plain"
        if device is None or device.type != "cuda":
            return "scan"
        from engine.search.gpu import GpuScanner  # commands that need no model do without torch

        return "gpu" if GpuScanner.fits(self.segments, device) else "scan"

    def search(self, request: SearchRequest) -> SearchResult:
        """The top_k rows of each query in the directions asked for. Fewer come back where fewer are allowed."""
        check(request, self.n_rows, sum(self.layout.k))
        allowed = self._allowed(request.allowed)
        wanted = [largest for largest, name in ((True, "proponents"), (False, "opponents")) if request.direction in (name, "both")]
        k = min(request.top_k, max(self.n_rows, 1))
        recall = None
        if request.candidates is None:
            lists, n_scored, r = self._exhaustive(request, allowed, k, wanted), self._count(allowed) * len(request.y), 0
        else:
            r, recall = pick_candidates(request.candidates, self.calibration, self.n_rows, k)
            lists, n_scored = self._from_candidates(request, allowed, r, wanted)
        ranked = {largest: ranking(lists[largest], k, largest=largest) for largest in wanted}
        return SearchResult(ranked.get(True), ranked.get(False), "candidates" if r else "exhaustive", r, n_scored, recall)

    def score(self, y: NDArray[np.float32], positions: NDArray[np.int64], score: Score = "influence") -> NDArray[np.float64]:
        """Scores (B, n) of the rows at `positions` (n,), by the plain path."""
        out = np.zeros((len(y), len(positions)), np.float64)
        for s, inside in self._grouped(positions):
            rows = positions[inside] - s.base
            out[:, inside] = score_rows(s.codes[rows], s.scales[rows], self.layout, self.c, y, score)
        return out

    def decode(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """(n, total_k) decoded rows s b, in the order of `positions`."""
        out = np.zeros((len(positions), sum(self.layout.k)), np.float32)
        for s, inside in self._grouped(positions):
            rows = positions[inside] - s.base
            out[inside] = decode(s.codes[rows], s.scales[rows], self.layout, self.c)
        return out

    def _grouped(self, positions: NDArray[np.int64]) -> Iterator[tuple[SegmentView, NDArray[np.int64]]]:
        for s in self.segments:
            inside = np.flatnonzero((positions >= s.base) & (positions < s.base + s.n))
            if len(inside):
                yield s, inside

    def _allowed(self, requested: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
        if requested is None or self.excluded is None:
            return requested if self.excluded is None else ~self.excluded
        return requested & ~self.excluded

    def _count(self, allowed: NDArray[np.bool_] | None) -> int:
        return self.n_rows if allowed is None else int(np.count_nonzero(allowed))

    def _exhaustive(self, request: SearchRequest, allowed: NDArray[np.bool_] | None, k: int, wanted: Sequence[bool]) -> dict[bool, list[Found]]:
        if self.engine != "plain":
            found = self._scanner().best(self.segments, request.y, k, request.score, [1 if largest else -1 for largest in wanted], allowed)
            return dict(zip(wanted, found, strict=True))
        parts: dict[bool, list[list[Found]]] = {largest: [[] for _ in request.y] for largest in wanted}
        for s in self.segments:
            mask = None if allowed is None else allowed[s.base : s.base + s.n]
            rows = np.arange(s.n) if mask is None else np.flatnonzero(mask)
            codes, scales = (s.codes, s.scales) if mask is None else (s.codes[rows], s.scales[rows])
            scores = score_rows(codes, scales, self.layout, self.c, request.y, request.score)
            for largest in wanted:
                for q in range(len(request.y)):
                    parts[largest][q].append(best(scores[q], rows + s.base, k, largest=largest))
        return {largest: [_join(p) for p in parts[largest]] for largest in wanted}

    def _scanner(self) -> Scanner | GpuScanner:
        with self._lock:
            if self._scan is None and self.engine == "gpu":
                from engine.search.gpu import GpuScanner

                self._scan = GpuScanner(self.segments, self.layout, self.c, self._device or "cpu")
            elif self._scan is None:
                self._scan = Scanner(self.layout, self.c, threads=self.threads)
            return self._scan

    def warm_up(self) -> None:
        """Compile what searches will need, so that the first one is not the slow one."""
        if self.engine != "plain" and self.segments:
            self.search(SearchRequest(np.ones((1, sum(self.layout.k)), np.float32), 1, allowed=np.zeros(self.n_rows, np.bool_)))

    @cached_property
    def _on_gpu(self) -> GpuCandidates | None:
        return on_gpu(self.segments, self._device) if self.engine == "gpu" and self._device is not None else None

    def _from_candidates(
        self, request: SearchRequest, allowed: NDArray[np.bool_] | None, r: int, wanted: Sequence[bool]
    ) -> tuple[dict[bool, list[Found]], int]:
        found: dict[bool, list[Found]] = {}
        n_scored = 0
        for largest in wanted:
            near = hamming_candidates(self.segments, self.layout, request.y, r, allowed, complement=not largest, gpu=self._on_gpu)
            found[largest] = [self._best_of(p, request.y[q : q + 1], request, largest) for q, p in enumerate(near)]
            n_scored += sum(len(p) for p in near)
        return found, n_scored

    def _best_of(self, positions: NDArray[np.int64], y: NDArray[np.float32], request: SearchRequest, largest: bool) -> Found:
        """The best rows among some positions, by (14)."""
        if self.engine != "scan":
            return positions, self.score(y, positions, request.score)[0]
        positions = np.sort(positions)
        codes = np.zeros((len(positions), self.layout.code_bytes), np.uint8)
        scales = np.zeros((len(positions), self.layout.n_blocks), np.float16)
        for s, inside in self._grouped(positions):
            codes[inside], scales[inside] = s.codes[positions[inside] - s.base], s.scales[positions[inside] - s.base]
        k = min(request.top_k, max(len(positions), 1))
        ((rows, scores),) = self._scanner().best([ArraySegment(0, codes, scales)], y, k, request.score, [1 if largest else -1], None)[0]
        return positions[rows], scores


def _join(parts: Sequence[Found]) -> Found:
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.float64)
    return np.concatenate([p for p, _ in parts]), np.concatenate([s for _, s in parts])
