"""Hamming candidates from the segments' FAISS binary indexes; equation (14) has the last word on them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.errors import LimitError, SettingError
from engine.search.gpu_candidates import GpuCandidates
from engine.search.request import SegmentView, spans


def query_bits(y: NDArray[np.float32], layout: BlockLayout, *, complement: bool) -> NDArray[np.uint8]:
    """Signs of y as codes (B, code_bytes), laid out as the store's; complemented for opponents. Padding bits are 0 on both sides."""
    parts = []
    for _, _, bit, k in spans(layout):
        positive = y[:, bit : bit + k] >= 0
        parts.append(np.packbits(~positive if complement else positive, axis=1, bitorder="little"))
    return np.concatenate(parts, axis=1)


def hamming_candidates(
    segments: Sequence[SegmentView],
    layout: BlockLayout,
    y: NDArray[np.float32],
    r: int,
    allowed: NDArray[np.bool_] | None,
    *,
    complement: bool,
    gpu: GpuCandidates | None = None,
) -> list[NDArray[np.int64]]:
    """Positions of the r rows nearest to each query's signs by Hamming distance, among the allowed ones; ties go to the lower position.

    gpu: indexes of the same segments on a GPU, used where their limits allow it.
    """
    gpu = gpu if gpu is not None and gpu.serves(r, allowed) else None
    bits = query_bits(y, layout, complement=complement)
    distances: list[list[NDArray[np.int64]]] = [[] for _ in y]
    positions: list[list[NDArray[np.int64]]] = [[] for _ in y]
    for number, s in enumerate(segments):
        mask = None if allowed is None else allowed[s.base : s.base + s.n]
        kept = s.n if mask is None else int(np.count_nonzero(mask))
        if not kept:
            continue
        if gpu is not None:
            d, found = gpu.nearest(number, bits, r, allowed)
        else:
            d, found = s.index.search(bits, min(r, kept), params=None if mask is None else _selector(mask))
        for q in range(len(y)):
            real = found[q] >= 0  # FAISS fills up with -1
            distances[q].append(d[q][real].astype(np.int64))
            positions[q].append(found[q][real].astype(np.int64) + s.base)
    nearest = []
    for q in range(len(y)):
        d = np.concatenate(distances[q]) if distances[q] else np.zeros(0, np.int64)
        p = np.concatenate(positions[q]) if positions[q] else np.zeros(0, np.int64)
        nearest.append(p[np.lexsort((p, d))[:r]])
    return nearest


def pick_candidates(asked: int | dict[str, float], calibration: Sequence[dict[str, float]], n_rows: int, k: int) -> tuple[int, float | None]:
    """R and the recall that the calibration measured for it (None where R was given). Raises SettingError or LimitError naming the field."""
    if isinstance(asked, bool) or not isinstance(asked, int | dict):
        raise SettingError("candidates must be a number of rows or an object {'recall': 0.95}", field="candidates")
    if isinstance(asked, int):
        if asked < 1:
            raise LimitError(f"candidates must be at least 1, not {asked}", field="candidates")
        return min(max(asked, k), max(n_rows, 1)), None
    recall = asked.get("recall")
    if set(asked) != {"recall"} or isinstance(recall, bool) or not isinstance(recall, int | float) or not 0 < recall <= 1:
        raise SettingError("candidates must be a number of rows or an object {'recall': r} with 0 < r <= 1", field="candidates")
    if not calibration:
        raise SettingError("this store has no calibration of candidate recall; give candidates as a number of rows", field="candidates")
    for point in sorted(calibration, key=lambda p: p["candidates"]):
        if point["recall"] >= recall:
            return min(max(int(point["candidates"]), k), max(n_rows, 1)), float(point["recall"])
    return max(n_rows, 1), 1.0


def _selector(mask: NDArray[np.bool_]) -> Any:
    faiss: Any = import_module("faiss")  # its stubs do not know the Python wrappers
    packed = np.packbits(mask, bitorder="little")
    parameters = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(packed))
    parameters.keep = packed  # FAISS keeps a bare pointer
    return parameters
