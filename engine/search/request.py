"""What a search is asked and what it answers, and the views of a store that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.errors import LimitError, SettingError

Score = Literal["influence", "cosine"]
Direction = Literal["proponents", "opponents", "both"]
Method = Literal["exhaustive", "candidates"]


class SegmentView(Protocol):
    """One immutable run of rows. base: store-wide position of its first row; codes (n, code_bytes) uint8, little bit order; scales (n, n_blocks) fp16,
    stored as s / c_b; index: a FAISS binary index over the same codes (used by the candidate stage only)."""

    @property
    def base(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def codes(self) -> NDArray[np.uint8]: ...
    @property
    def scales(self) -> NDArray[np.float16]: ...
    @property
    def index(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ArraySegment:
    """A segment held in plain arrays: tests, benchmarks, calibration."""

    base: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    index: Any = None

    @property
    def n(self) -> int:
        return int(self.codes.shape[0])


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A batch of queries that share every option, hence one read of the codes.

    y (B, total_k) float32: query coordinates, blocks side by side. allowed (N,) bool: rows that may be returned; None: all.
    candidates: None scores every row by (14); an int R re-scores the R nearest by Hamming distance per direction; {"recall": .95} picks R from the
    calibration made at index time.
    """

    y: NDArray[np.float32]
    top_k: int = 10
    score: Score = "influence"
    direction: Direction = "both"
    allowed: NDArray[np.bool_] | None = None
    candidates: int | dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """positions (B, k) int64, best first, -1 beyond a query's count; scores (B, k) float32, 0 there; counts (B,) int64 of real entries."""

    positions: NDArray[np.int64]
    scores: NDArray[np.float32]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Proponents (highest score first) and opponents (lowest first); the one not asked for is None.

    n_candidates: Hamming neighbours asked for per query and direction (0 when exhaustive); n_scored: rows scored by (14), all queries together;
    recall: what the calibration promises for n_candidates, where it was asked for.
    """

    proponents: Ranking | None
    opponents: Ranking | None
    method: Method
    n_candidates: int
    n_scored: int
    recall: float | None = None


def check(request: SearchRequest, n_rows: int, total_k: int) -> None:
    """Refuse what cannot be searched. Raises SettingError or LimitError naming the field."""
    y = request.y
    if y.ndim != 2 or y.shape[1] != total_k:
        raise ValueError(f"y must be (queries, {total_k}), not {y.shape}")
    if not np.isfinite(y).all():
        raise SettingError("the query's coordinates are not finite; its gradient overflowed", field="queries")
    if isinstance(request.top_k, bool) or not isinstance(request.top_k, int) or request.top_k < 1:
        raise LimitError(f"top_k must be an integer of at least 1, not {request.top_k!r}", field="top_k")
    if request.score not in ("influence", "cosine"):
        raise SettingError(f"score must be influence or cosine, not {request.score!r}", field="score")
    if request.direction not in ("proponents", "opponents", "both"):
        raise SettingError(f"direction must be proponents, opponents or both, not {request.direction!r}", field="direction")
    if request.allowed is not None and request.allowed.shape != (n_rows,):
        raise ValueError(f"allowed must be ({n_rows},), not {request.allowed.shape}")


def spans(layout: BlockLayout) -> list[tuple[int, int, int, int]]:
    """(first byte, bytes, first coordinate, bits) of each block."""
    return list(zip(layout.byte_offsets, layout.widths, layout.offsets, layout.k, strict=False))  # offsets have one entry more


def total_rows(segments: Sequence[SegmentView]) -> int:
    """Positions run from 0 to this; segments lie end to end."""
    return max((s.base + s.n for s in segments), default=0)
