"""One pass over the codes of a segment for a batch of queries, keeping each query's k best rows of either sign.

Every row is scored with 8-bit queries in integer arithmetic, whose error has a strict bound; a row whose bound reaches the k-th best so far is scored with 16
bits, and if it still reaches it, by (14) in float64. Where 8 bits would let too many rows through (many blocks: the bounds add up, the scores' spread grows
with the root), every row is scored with 16 bits at once. What is kept is therefore exactly what scoring every row in float64 would keep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from engine.search.vector_ops import byte, exact_dot, half, has_vnni, jit, lane_sum, masked_dots

TILE = 8  # rows whose codes stay in the first-level cache while the queries pass over them


@jit
def _sift(scores: Any, positions: Any, n: int) -> None:
    """Restore the heap below its root: the root is the worst entry kept (lowest score, then highest position)."""
    i = 0
    while True:
        worst, left = i, 2 * i + 1
        for child in (left, left + 1):
            if child < n and (scores[child] < scores[worst] or (scores[child] == scores[worst] and positions[child] > positions[worst])):
                worst = child
        if worst == i:
            return
        scores[i], scores[worst] = scores[worst], scores[i]
        positions[i], positions[worst] = positions[worst], positions[i]
        i = worst


@jit
def _offer(scores: Any, positions: Any, counts: Any, q: int, score: float, position: int) -> None:
    """Keep the row in query q's heap if it is among the best; rows come in ascending order, so an equal score loses."""
    k = scores.shape[1]
    n = counts[q]
    if n == k:
        if score > scores[q, 0]:
            scores[q, 0], positions[q, 0] = score, position
            _sift(scores[q], positions[q], k)
        return
    i = n
    counts[q] = n + 1
    scores[q, i], positions[q, i] = score, position
    while i > 0:
        parent = (i - 1) // 2
        if scores[q, parent] < scores[q, i] or (scores[q, parent] == scores[q, i] and positions[q, parent] > positions[q, i]):
            return
        scores[q, i], scores[q, parent] = scores[q, parent], scores[q, i]
        positions[q, i], positions[q, parent] = positions[q, parent], positions[q, i]
        i = parent


@cache
def scanner(words: int, vnni: bool | None = None) -> Callable[..., None]:
    """The compiled scan for groups of 64 * words bits. See `engine.search.exhaustive` for its arguments."""
    group = masked_dots(words, has_vnni() if vnni is None else vnni)
    tile = TILE

    @jit
    def approximate(rows: Any, n: int, blocks: Any, y8: Any, delta: Any, y_sum: Any, error: Any, s: Any, sums: Any, values: Any, slack: Any) -> None:
        """values[r, q] = the quantised score of n rows, up to +- slack[r, q]. rows: addresses; blocks (B, 3): first byte, first group, end group;
        y8 (G, C, width), delta (G, C): C = Q columns of steps, or 2 Q, the finer steps behind the others; y_sum, error (B, Q); s (n, B) float64: the rows'
        scales; sums (n, C, 16) float32: scratch."""
        _, columns, width = y8.shape
        n_queries = y_sum.shape[1]
        sums[:n] = 0
        values[:n] = 0
        slack[:n] = 0
        column = np.empty(n, np.float32)
        for b in range(blocks.shape[0]):
            for r in range(n):
                column[r] = s[r, b]
                for q in range(n_queries):
                    values[r, q] -= s[r, b] * y_sum[b, q]
                    slack[r, q] += s[r, b] * error[b, q]
            for g in range(blocks[b, 1], blocks[b, 2]):
                group(
                    rows.ctypes.data,
                    n,
                    blocks[b, 0] + (g - blocks[b, 1]) * (width // 8),
                    y8.ctypes.data + g * columns * width,
                    delta.ctypes.data + 4 * g * columns,
                    columns,
                    column.ctypes.data,
                    sums.ctypes.data,
                )
        for r in range(n):
            for q in range(n_queries):
                values[r, q] += 2.0 * np.float64(lane_sum(sums.ctypes.data + 64 * (r * columns + q)))
                if columns > n_queries:
                    values[r, q] += 2.0 * np.float64(lane_sum(sums.ctypes.data + 64 * (r * columns + n_queries + q)))

    @jit
    def exact(row: int, s: Any, blocks: Any, y64: Any, y_sum: Any) -> float:
        total = 0.0
        width = y64.shape[1]
        for b in range(blocks.shape[0]):
            groups = blocks[b, 2] - blocks[b, 1]
            selected = exact_dot(row + blocks[b, 0], y64.ctypes.data + 8 * width * blocks[b, 1], groups * (width // 8))
            total += s[b] * (2.0 * selected - y_sum[b])
        return total

    @jit
    def scan(
        codes: int,
        stride: int,
        n: int,
        base: int,
        scales: int,
        c: Any,
        allowed: int,
        blocks: Any,
        k_b: Any,
        y8: Any,
        delta: Any,
        low8: Any,
        low_delta: Any,
        sum_8: Any,
        error_8: Any,
        low_sum: Any,
        low_error: Any,
        y64: Any,
        y_sum: Any,
        cosine: bool,
        signs: Any,
        scores: Any,
        positions: Any,
        counts: Any,
    ) -> None:
        n_queries, n_blocks, k = sum_8.shape[1], blocks.shape[0], scores.shape[2]
        fine = y8.shape[1] > n_queries
        rows, index = np.empty(tile, np.int64), np.empty(tile, np.int64)
        s = np.empty((tile, n_blocks), np.float64)
        sums = np.empty((tile + 1, y8.shape[1], 16), np.float32)  # and one row for the second look
        values, slack = np.empty((tile, n_queries), np.float64), np.empty((tile, n_queries), np.float64)
        one_row, one_value, one_slack = np.empty(1, np.int64), np.empty((1, 1), np.float64), np.empty((1, 1), np.float64)
        # what a row must exceed: the worst entry of a full heap
        limits = np.full((2, n_queries), np.inf)
        for d in range(signs.shape[0]):
            for q in range(n_queries):
                limits[d, q] = scores[d, q, 0] if counts[d, q] == k else -np.inf
        sign0, sign1 = signs[0], signs[signs.shape[0] - 1]
        i = 0
        while i < n:
            m = 0
            while i < n and m < tile:
                if allowed == 0 or byte(allowed + i) != 0:
                    rows[m] = codes + i * stride
                    index[m] = i
                    for b in range(n_blocks):
                        s[m, b] = np.float64(half(scales + 2 * (i * n_blocks + b))) * np.float64(c[b])
                    m += 1
                i += 1
            approximate(rows, m, blocks, y8, delta, sum_8, error_8, s, sums, values, slack)
            for r in range(m):
                norm = 1.0
                if cosine:
                    square = 0.0
                    for b in range(n_blocks):
                        square += k_b[b] * s[r, b] * s[r, b]
                    norm = 1.0 / np.sqrt(square) if square > 0 else 0.0
                for q in range(n_queries):
                    value, bound = norm * values[r, q], norm * slack[r, q]
                    if sign0 * value + bound <= limits[0, q] and sign1 * value + bound <= limits[1, q]:
                        continue
                    if not fine:
                        one_row[0] = rows[r]
                        approximate(
                            one_row,
                            1,
                            blocks,
                            low8[q],
                            low_delta[q],
                            low_sum[q],
                            low_error[q],
                            s[r : r + 1],
                            sums[tile:],
                            one_value,
                            one_slack,
                        )
                        value, bound = value + norm * one_value[0, 0], norm * one_slack[0, 0]
                        if sign0 * value + bound <= limits[0, q] and sign1 * value + bound <= limits[1, q]:
                            continue
                    value = norm * exact(rows[r], s[r], blocks, y64[q], y_sum[q])
                    for d in range(signs.shape[0]):
                        if signs[d] * value > limits[d, q]:
                            _offer(scores[d], positions[d], counts[d], q, signs[d] * value, base + index[r])
                            limits[d, q] = scores[d, q, 0] if counts[d, q] == k else -np.inf

    return scan
