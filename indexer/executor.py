"""Where the model's work is done: in this process, or on a cluster. Either way the same store comes out, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.coordinates import CoordinateMap
from engine.curvature import Curvature
from engine.example import Example
from engine.fit_curvature import Progress, fit_curvature
from engine.model import LoadedModel
from engine.modules import TrackedModule
from engine.settings import FitSettings, ModelSettings
from engine.sketcher import Sketcher, spill_coordinates
from engine.store import StoreWriter
from engine.store.manifest import SegmentEntry
from indexer.interruption import StopRequest
from indexer.prepare import Prepared, ReadTokenised
from indexer.reporter import Reporter
from indexer.settings import WorkerSettings
from indexer.shards import sketch_shards


class Executor(Protocol):
    """The kinds of work that a job hands out, each with the arguments and the result of the function that does it in this process."""

    def use(self, loaded: LoadedModel, settings: ModelSettings, stop: StopRequest) -> None:
        """Say once, before any work, which model it is for and what may end it."""
        ...

    @property
    def reader(self) -> ReadTokenised | None:
        """What reads and tokenises behind the first good row (`indexer.prepare`); None: this process."""
        ...

    def fit(
        self, tracked: Sequence[TrackedModule], examples: Sequence[Example], rows: Sequence[int], settings: FitSettings, checkpoint: Path, progress: Progress
    ) -> Curvature:
        """`engine.fit_curvature.fit_curvature`."""
        ...

    def spill(
        self, coordinates: CoordinateMap, examples: Sequence[Example], rows: Sequence[int], folder: Path, batch_tokens: int, progress: Callable[[int], None]
    ) -> dict[str, NDArray[np.float32]]:
        """`engine.sketcher.spill_coordinates`."""
        ...

    def sketch(
        self, sketcher: Sketcher, folder: Path, prepared: Prepared, writer: StoreWriter, first_segment: int, reporter: Reporter
    ) -> tuple[list[SegmentEntry], float]:
        """`indexer.shards.sketch_shards`; folder: where the sketcher was loaded from."""
        ...


class InProcess:
    """No cluster."""

    def use(self, loaded: LoadedModel, settings: ModelSettings, stop: StopRequest) -> None:
        self.loaded, self.stop = loaded, stop

    @property
    def reader(self) -> ReadTokenised | None:
        return None

    def fit(
        self, tracked: Sequence[TrackedModule], examples: Sequence[Example], rows: Sequence[int], settings: FitSettings, checkpoint: Path, progress: Progress
    ) -> Curvature:
        return fit_curvature(self.loaded, tracked, examples, rows, settings, checkpoint=checkpoint, progress=progress)

    def spill(
        self, coordinates: CoordinateMap, examples: Sequence[Example], rows: Sequence[int], folder: Path, batch_tokens: int, progress: Callable[[int], None]
    ) -> dict[str, NDArray[np.float32]]:
        return spill_coordinates(coordinates, examples, rows, folder, batch_tokens, progress)

    def sketch(
        self, sketcher: Sketcher, folder: Path, prepared: Prepared, writer: StoreWriter, first_segment: int, reporter: Reporter
    ) -> tuple[list[SegmentEntry], float]:
        return sketch_shards(sketcher, prepared, writer, first_segment, reporter, self.stop)


@contextmanager
def executor_for(settings: WorkerSettings, reporter: Reporter) -> Iterator[Executor]:
    """This process, or the cluster that the settings name, joined until the block ends. Raises SettingError where there is none."""
    if settings.ray is None:
        yield InProcess()
        return
    from engine.cluster import joined

    with joined(settings.ray):
        from indexer.cluster.executor import OnCluster  # which imports Ray

        on_cluster = OnCluster(settings.ray_workers, reporter)
        try:
            yield on_cluster
        finally:
            on_cluster.close()
