"""Hamming candidates on a GPU: FAISS's flat binary index there, where its limits allow it; the CPU's index answers everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.search.request import SegmentView

if TYPE_CHECKING:
    import torch

MOST = 2048  # neighbours that FAISS finds on a GPU in one search
SPARE = 1.2  # free memory that an index asks for, as a multiple of its codes
Make = Callable[[NDArray[np.uint8]], Any]  # codes (n, code_bytes) -> an index over them with search(codes, k)


class GpuCandidates:
    """One index per segment, made when it is first needed. Searches on a GPU take no selector: rows that may not be returned are asked for too and dropped.

    Ties in distance at the edge of the candidates may fall otherwise than on the CPU; whatever is found is re-scored by (14) all the same.
    """

    def __init__(self, segments: Sequence[SegmentView], make: Make) -> None:
        self.segments, self.make = list(segments), make
        self._indexes: list[Any] = []

    def serves(self, r: int, allowed: NDArray[np.bool_] | None) -> bool:
        """Whether r candidates among the allowed rows lie within FAISS's limit in every segment."""
        return all(self._wanted(s, r, allowed) <= MOST for s in self.segments)

    def nearest(self, number: int, bits: NDArray[np.uint8], r: int, allowed: NDArray[np.bool_] | None) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(distances, rows of segment `number`), (B, w) each, -1 where there is nothing, of the r nearest allowed rows and perhaps some more."""
        if not self._indexes:
            self._indexes.extend(self.make(s.codes) for s in self.segments)
        segment = self.segments[number]
        distances, rows = self._indexes[number].search(bits, self._wanted(segment, r, allowed))
        rows = np.asarray(rows, np.int64)
        if allowed is not None:
            rows[~allowed[segment.base + np.maximum(rows, 0)]] = -1
        return distances, rows

    def _wanted(self, segment: SegmentView, r: int, allowed: NDArray[np.bool_] | None) -> int:
        dropped = 0 if allowed is None else segment.n - int(np.count_nonzero(allowed[segment.base : segment.base + segment.n]))
        return min(r + dropped, segment.n)


def on_gpu(segments: Sequence[SegmentView], device: torch.device) -> GpuCandidates | None:
    """Candidates from `device`; None where FAISS has no GPU build, or where the codes do not fit there once more."""
    faiss: Any = import_module("faiss")  # its stubs do not know the GPU classes
    if device.type != "cuda" or not hasattr(faiss, "GpuIndexBinaryFlat") or not faiss.get_num_gpus():
        return None
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    if SPARE * sum(s.codes.nbytes for s in segments) > free:
        return None
    resources = faiss.StandardGpuResources()
    configuration = faiss.GpuIndexBinaryFlatConfig()
    configuration.device = device.index or 0

    def make(codes: NDArray[np.uint8]) -> Any:
        index = faiss.GpuIndexBinaryFlat(resources, 8 * codes.shape[1], configuration)
        index.add(np.ascontiguousarray(codes))
        return index

    return GpuCandidates(segments, make)
