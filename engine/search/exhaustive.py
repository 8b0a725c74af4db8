"""Exhaustive scoring by (14) on CPU: queries quantised with strict error bounds, rows split over threads, partial lists merged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.search.request import Score, SegmentView, spans

ROUNDING = 2.0**-23  # float32 sums and products, twice over
LOOSE = 0.5  # above it, scoring every row with 16 bits costs less than looking twice at many
MIN_ROWS = 4096  # fewer rows per thread are not worth a thread
QUERIES = 16  # queries per read of the codes: more would push each other out of the cache


@dataclass(frozen=True, slots=True)
class QuantisedQueries:
    """Queries as int8 numbers with one step per group of coordinates, and again with 16 bits; what the bounds on a row's score error need.

    y = steps + residual; for a row of bits b and scale s: |score - score of the steps| <= s * error, as error = ||residual||_1 + rounding.
    y8 (G, Q, width), low8 (Q, G, 1, width) int8; delta (G, Q), low_delta (Q, G, 1) float32: a group of all queries lies together; y64 (Q, G, width) float64; sum_8 (B, Q) and low_sum (Q, B, 1) float64: sums of the
    steps and of the finer steps; error_8 (B, Q), low_error (Q, B, 1): what remains after the one and after both; y_sum (Q, B).
    blocks (B, 3) int64: first byte, first group, end group.
    """

    blocks: NDArray[np.int64]
    y8: NDArray[np.int8]
    delta: NDArray[np.float32]
    low8: NDArray[np.int8]
    low_delta: NDArray[np.float32]
    y64: NDArray[np.float64]
    sum_8: NDArray[np.float64]
    error_8: NDArray[np.float64]
    low_sum: NDArray[np.float64]
    low_error: NDArray[np.float64]
    y_sum: NDArray[np.float64]

    def loose(self, c: NDArray[np.float32]) -> bool:
        """Whether the 8-bit bounds are wide beside the spread of the scores, which is about sqrt(sum_b c_b^2 ||y_b||^2) for rows of usual scale."""
        spread = sum(np.square(c[b]) * np.square(self.y64[:, first:end]).sum(axis=(1, 2)) for b, (_, first, end) in enumerate(self.blocks.tolist()))
        bound = (c[:, None] * self.error_8).sum(axis=0)
        return bool(np.median(bound / np.sqrt(np.where(spread > 0, spread, np.inf))) > LOOSE)

    def refined(self) -> QuantisedQueries:
        """Both kinds of steps in the first look: 16 bits for every row."""
        y8 = np.concatenate([self.y8, self.low8[:, :, 0].swapaxes(0, 1)], axis=1)
        delta = np.concatenate([self.delta, self.low_delta[..., 0].T], axis=1)
        sums, errors = self.sum_8 + self.low_sum[..., 0].T, self.low_error[..., 0].T
        return replace(self, y8=y8, delta=delta, sum_8=np.ascontiguousarray(sums), error_8=np.ascontiguousarray(errors))


@dataclass(frozen=True, slots=True)
class Piece:
    """n rows of a segment from `start` on; codes and scales hold the whole segment (or copies of its last rows), whose first row is at position `base`."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    allowed: NDArray[np.bool_] | None
    base: int
    start: int
    n: int


def words_of(layout: BlockLayout) -> int:
    """64-bit words per group: enough for the widest block, at most 8."""
    widest = -(-max(layout.k) // 64)
    return min(8, 1 << max(0, widest - 1).bit_length())


def quantise(y: NDArray[np.float64], layout: BlockLayout, words: int) -> QuantisedQueries:
    """Quantise (Q, total_k) queries in groups of 64 * words coordinates that do not cross blocks; groups are filled up with zeros."""
    width = 64 * words
    n_groups = [-(-k // width) for k in layout.k]
    first = np.concatenate([[0], np.cumsum(n_groups)])
    blocks = np.stack([np.array([byte for byte, *_ in spans(layout)]), first[:-1], first[1:]], axis=1).astype(np.int64)

    flat = np.zeros((len(y), int(first[-1]) * width), np.float64)
    for b, (_, _, bit, k) in enumerate(spans(layout)):
        flat[:, first[b] * width : first[b] * width + k] = y[:, bit : bit + k]
    y64 = flat.reshape(len(y), -1, width)
    y8, delta, residual = _steps(y64)
    low8, low_delta, rest = _steps(residual)
    per_block = [slice(a, z) for a, z in blocks[:, 1:].tolist()]

    def by_block(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([values[:, part].sum(axis=(1, 2)) for part in per_block])

    noise = ROUNDING * (int(first[-1]) + 20) * by_block(np.abs(y64))
    return QuantisedQueries(
        blocks,
        np.ascontiguousarray(y8.swapaxes(0, 1)),
        np.ascontiguousarray(delta.T),
        np.ascontiguousarray(low8[:, :, None]),
        np.ascontiguousarray(low_delta[..., None]),
        np.ascontiguousarray(y64),
        by_block(y64 - residual),
        by_block(np.abs(residual)) + noise,
        by_block(residual - rest).T[..., None].copy(),
        (by_block(np.abs(rest)) + noise).T[..., None].copy(),
        np.ascontiguousarray(by_block(y64).T),
    )


def _steps(values: NDArray[np.float64]) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float64]]:
    """int8 steps, the step width of each group, and what they leave."""
    delta = (np.abs(values).max(axis=2) / 127).astype(np.float32)
    safe = np.where(delta > 0, delta, 1).astype(np.float64)
    steps = np.clip(np.rint(values / safe[..., None]), -127, 127)
    steps[delta == 0] = 0
    return steps.astype(np.int8), delta, values - steps * delta.astype(np.float64)[..., None]


def default_threads() -> int:
    """Threads of a search where nothing is set: OMP_NUM_THREADS, else the CPUs that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Scanner:
    """The compiled scan with its threads, for one layout."""

    def __init__(self, layout: BlockLayout, c: NDArray[np.float32], *, threads: int = 0, vnni: bool | None = None) -> None:
        from engine.search.scan import scanner  # compiles on first use; small stores never need it

        self.layout, self.c = layout, np.ascontiguousarray(c, np.float32)
        self.words = words_of(layout)
        self.threads = threads or default_threads()
        self._scan = scanner(self.words, vnni)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="eogp-search")

    def best(
        self, segments: Sequence[SegmentView], y: NDArray[np.float32], k: int, score: Score, signs: Sequence[int], allowed: NDArray[np.bool_] | None
    ) -> list[list[tuple[NDArray[np.int64], NDArray[np.float64]]]]:
        """For each sign (+1 highest first, -1 lowest first) and query: positions and scores of its k best rows, in no order."""
        found: list[list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = [[] for _ in signs]
        for start in range(0, len(y), QUERIES):
            part = y[start : start + QUERIES]
            for d, lists in enumerate(self._batch(segments, part, k, score, signs, allowed)):
                found[d] += lists
        return found

    def _batch(
        self, segments: Sequence[SegmentView], y: NDArray[np.float32], k: int, score: Score, signs: Sequence[int], allowed: NDArray[np.bool_] | None
    ) -> list[list[tuple[NDArray[np.int64], NDArray[np.float64]]]]:
        _, exponent = np.frexp(np.abs(y.astype(np.float64)).max(axis=1))
        unit = np.ldexp(1.0, exponent)  # a power of two: float32 sums cannot overflow, and no digit is lost
        queries = quantise(y / unit[:, None], self.layout, self.words)
        if queries.loose(self.c):
            queries = queries.refined()
        pieces = [piece for s in segments for piece in self._pieces(s, allowed)]
        share = -(-sum(p.n for p in pieces) // self.threads)
        tasks = _share(pieces, max(share, MIN_ROWS))
        results = list(self._pool.map(lambda task: self._run(task, queries, k, score, signs), tasks))
        if score == "cosine":
            length = np.linalg.norm(y.astype(np.float64), axis=1)
            unit = unit / np.where(length > 0, length, 1)
        lists = []
        for d, sign in enumerate(signs):
            merged = []
            for q in range(len(y)):
                positions = np.concatenate([p[d, q, : n[d, q]] for _, p, n in results]) if results else np.zeros(0, np.int64)
                scores = np.concatenate([s[d, q, : n[d, q]] for s, _, n in results]) if results else np.zeros(0)
                merged.append((positions, sign * scores * unit[q]))
            lists.append(merged)
        return lists

    def _pieces(self, s: SegmentView, allowed: NDArray[np.bool_] | None) -> list[Piece]:
        """The segment, with its last rows copied where a group reads past the end of the codes."""
        width = 8 * self.words
        stride = self.layout.code_bytes
        reach = max(byte + -(-n_bytes // width) * width for byte, n_bytes, _, _ in spans(self.layout))
        spare = min(s.n, max(0, -(-(reach - stride) // stride)))
        whole = s.n - spare
        mask = None if allowed is None else np.ascontiguousarray(allowed[s.base : s.base + s.n])
        scales = np.ascontiguousarray(s.scales)
        pieces = [Piece(s.codes, scales, mask, s.base, 0, whole)] if whole else []
        if spare:
            padded = np.zeros((-(-reach // stride) + spare, stride), np.uint8)
            padded[:spare] = s.codes[whole:]
            pieces.append(Piece(padded, scales[whole:], None if mask is None else mask[whole:], s.base + whole, 0, spare))
        return pieces

    def _run(self, task: Sequence[Piece], queries: QuantisedQueries, k: int, score: Score, signs: Sequence[int]) -> tuple[Any, Any, Any]:
        shape = (len(signs), len(queries.y64))
        scores, positions, counts = np.empty((*shape, k)), np.empty((*shape, k), np.int64), np.zeros(shape, np.int64)
        k_b, wanted = np.asarray(self.layout.k, np.float64), np.asarray(signs, np.float64)
        for piece in task:
            self._scan(
                piece.codes.ctypes.data + piece.start * self.layout.code_bytes,
                self.layout.code_bytes,
                piece.n,
                piece.base + piece.start,
                piece.scales.ctypes.data + 2 * piece.start * self.layout.n_blocks,
                self.c,
                0 if piece.allowed is None else piece.allowed.ctypes.data + piece.start,
                queries.blocks,
                k_b,
                queries.y8,
                queries.delta,
                queries.low8,
                queries.low_delta,
                queries.sum_8,
                queries.error_8,
                queries.low_sum,
                queries.low_error,
                queries.y64,
                queries.y_sum,
                score == "cosine",
                wanted,
                scores,
                positions,
                counts,
            )
        return scores, positions, counts


def _share(pieces: Sequence[Piece], share: int) -> list[list[Piece]]:
    """Cut the pieces, in order, into tasks of `share` rows each (the last may have fewer)."""
    tasks: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        at = 0
        while at < piece.n:
            if room == 0:
                tasks.append([])
                room = share
            n = min(piece.n - at, room)
            tasks[-1].append(replace(piece, start=at, n=n))
            at, room = at + n, room - n
    return tasks
