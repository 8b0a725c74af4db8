"""Exhaustive scoring by (14) with the codes on a GPU (or, for tests, on the CPU through torch): approximate scores of all rows, float64 for the best.

A row's approximate score comes with a bound on its error. The best few are scored in float64; while a row that was left out could still belong among them,
more are taken. The result is therefore the ranking of the float64 scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.blocks import BlockLayout
from engine.search.request import Score, SegmentView, spans
from engine.search.scoring import score_rows

CHUNK = 1 << 20  # rows scored at a time with the kernel; the plain path unpacks fewer
PLAIN_BITS = 1 << 26  # bits that the plain path unpacks at a time
QUERIES = 16
ROUNDING = 2.0**-23

Found = tuple[NDArray[np.int64], NDArray[np.float64]]


class GpuScanner:
    """Codes and scales of all segments on a device. kernel: the Triton kernel (default: where the device is a GPU and triton is there), else plain torch."""

    def __init__(
        self, segments: Sequence[SegmentView], layout: BlockLayout, c: NDArray[np.float32], device: torch.device | str, *, kernel: bool | None = None
    ) -> None:
        self.layout, self.c, self.device = layout, np.asarray(c, np.float64), torch.device(device)
        self.kernel = self.device.type == "cuda" and find_spec("triton") is not None if kernel is None else kernel
        self.segments = list(segments)
        # copies, since a mapped file is read-only and torch wants to write
        self.codes = [torch.from_numpy(np.array(s.codes)).to(self.device) for s in segments]
        self.scales = [torch.from_numpy(np.array(s.scales)).to(self.device) for s in segments]

    @staticmethod
    def fits(segments: Sequence[SegmentView], device: torch.device) -> bool:
        """Whether codes and scales take less than half of what is free on a GPU."""
        if device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(device)
        return sum(s.codes.nbytes + s.scales.nbytes for s in segments) < free // 2

    def best(
        self, segments: Sequence[SegmentView], y: NDArray[np.float32], k: int, score: Score, signs: Sequence[int], allowed: NDArray[np.bool_] | None
    ) -> list[list[Found]]:
        """As Scanner.best, over the segments given at construction."""
        found: list[list[Found]] = [[([], []) for _ in y] for _ in signs]  # type: ignore[misc]  # every placeholder is replaced below
        parts: list[list[list[Found]]] = [[[] for _ in y] for _ in signs]
        for start in range(0, len(y), QUERIES):
            batch = y[start : start + QUERIES]
            for number in range(len(self.segments)):
                for rows in self._chunks(number):
                    values, slack = self._approximate(number, rows, batch, score)
                    self._exclude(values, number, rows, allowed)
                    for d, sign in enumerate(signs):
                        for q in range(len(batch)):
                            parts[d][start + q].append(self._exact_best(number, rows, sign * values[:, q], slack[:, q], batch[q : q + 1], k, score, sign))
        for d in range(len(signs)):
            for q in range(len(y)):
                pieces = parts[d][q]
                found[d][q] = (
                    np.concatenate([p for p, _ in pieces]) if pieces else np.zeros(0, np.int64),
                    np.concatenate([s for _, s in pieces]) if pieces else np.zeros(0),
                )
        return found

    def _chunks(self, number: int) -> list[slice]:
        step = CHUNK if self.kernel else max(1, PLAIN_BITS // sum(self.layout.k))
        n = self.segments[number].n
        return [slice(a, min(n, a + step)) for a in range(0, n, step)]

    def _approximate(self, number: int, rows: slice, y: NDArray[np.float32], score: Score) -> tuple[Tensor, Tensor]:
        """values (n, Q) float32 and the bound on their errors (n, Q); in units where the queries lie within +-1, which does not change their order."""
        codes, scales = self.codes[number][rows], self.scales[number][rows]
        _, exponent = np.frexp(np.abs(y.astype(np.float64)).max(axis=1, keepdims=True))
        unit = torch.from_numpy(y / np.ldexp(1.0, exponent)).to(self.device)  # (Q, K) float64
        s = scales.float() * torch.from_numpy(self.c).float().to(self.device)
        columns = QUERIES if self.kernel else len(y)
        values = torch.zeros(codes.shape[0], columns, device=self.device)
        slack = torch.zeros(codes.shape[0], columns, device=self.device)
        for b, (byte, n_bytes, bit, k) in enumerate(spans(self.layout)):
            y_b = unit[:, bit : bit + k]
            if self.kernel:
                left = self._by_kernel(codes, scales, b, byte, n_bytes, y_b, values)
            else:
                left = torch.zeros(columns, device=self.device)
                values += s[:, b : b + 1] * (2 * (_unpack(codes[:, byte : byte + n_bytes], k) @ y_b.T.float()) - y_b.sum(1).float())
            size = y_b.abs().sum(1)
            bound = torch.zeros(columns, device=self.device)
            bound[: len(y)] = (left[: len(y)] + (k + 20) * ROUNDING * size).float()
            slack += s[:, b : b + 1] * bound
        if score == "cosine":
            norm = (s.double().square() @ torch.tensor(self.layout.k, dtype=torch.float64, device=self.device)).sqrt()[:, None]
            inverse = torch.where(norm > 0, 1 / norm, 0).float()
            values, slack = values * inverse, slack * inverse + values.abs() * inverse * 4 * ROUNDING
        return values, slack

    def _by_kernel(self, codes: Tensor, scales: Tensor, b: int, byte: int, n_bytes: int, y_b: Tensor, values: Tensor) -> Tensor:
        from engine.search import gpu_kernel

        padded = torch.zeros(8 * gpu_kernel.padded_bytes(n_bytes), values.shape[1], dtype=torch.float64, device=self.device)
        padded[: y_b.shape[1], : y_b.shape[0]] = y_b.T
        high, low = gpu_kernel.split(padded)
        kept = high.double() + low.double()
        gpu_kernel.add_block(codes, scales, b, byte, n_bytes, high, low, kept.sum(0).float(), float(self.c[b]), values)
        return (padded - kept).abs().sum(0)

    def _exclude(self, values: Tensor, number: int, rows: slice, allowed: NDArray[np.bool_] | None) -> None:
        if allowed is not None:
            base = self.segments[number].base
            mask = torch.from_numpy(allowed[base + rows.start : base + rows.stop].copy()).to(self.device)
            values[~mask] = float("nan")  # of either sign, and told apart from every score

    def _exact_best(self, number: int, rows: slice, values: Tensor, slack: Tensor, y: NDArray[np.float32], k: int, score: Score, sign: int) -> Found:
        """The k best rows of a chunk by float64 score. values: sign x approximate scores, NaN where a row may not be returned."""
        usable = ~values.isnan()
        n = int(usable.sum())
        reach = torch.where(usable, values + slack, float("-inf"))
        take = min(n, 2 * k + 64)
        segment = self.segments[number]
        while True:
            upper, index = reach.topk(take)
            inside = index.cpu().numpy() + rows.start
            inside.sort()
            exact = score_rows(segment.codes[inside], segment.scales[inside], self.layout, self.c.astype(np.float32), y, score)[0]
            enough = take == n
            if not enough and take:
                worst = float(np.sort(sign * exact)[-k]) * self._unit(y, score)
                enough = float(upper[-1]) < worst  # nobody left out can reach the k-th
            if enough:
                return inside + segment.base, exact
            take = min(n, 4 * take)

    @staticmethod
    def _unit(y: NDArray[np.float32], score: Score) -> float:
        """From true scores to the units of the approximate ones."""
        _, exponent = np.frexp(np.abs(y.astype(np.float64)).max())
        length = float(np.linalg.norm(y.astype(np.float64)))
        return float(np.ldexp(1.0, -exponent)) * (length if score == "cosine" else 1.0)


def _unpack(codes: Tensor, k: int) -> Tensor:
    """(n, bytes) uint8 to (n, k) float32 of 0 and 1."""
    weights: Any = torch.arange(8, device=codes.device, dtype=torch.uint8)
    bits = (codes[:, :, None] >> weights) & 1
    return bits.reshape(codes.shape[0], -1)[:, :k].float()
