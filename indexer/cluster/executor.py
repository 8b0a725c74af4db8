"""The job's work on a cluster: one worker per GPU, or per few CPU threads, each with its own copy of the model; the driver alone writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from engine.coordinates import CoordinateMap
from engine.covariance import input_key
from engine.curvature import Curvature
from engine.errors import SettingError
from engine.example import Example, plan_batches
from engine.fit_curvature import Progress, add_to_checkpoint, fit_curvature, unfitted
from engine.model import LoadedModel
from engine.modules import TrackedModule
from engine.settings import FitSettings, ModelSettings
from engine.sketcher import Sketcher, spill_files
from engine.store import StoreWriter
from engine.store.manifest import SegmentEntry
from indexer.cluster.pool import Pool
from indexer.cluster.read import read_tokenised
from indexer.cluster.worker import Sent, Worker, read_files
from indexer.interruption import StopRequest
from indexer.prepare import Prepared, ReadTokenised
from indexer.reporter import Reporter
from indexer.shards import segments_of, unsketched
from indexer.versions import versions


class OnCluster:
    """An `indexer.executor.Executor`. Workers are started with the first work that needs the model.

    workers: how many; 0 takes one per GPU where the driver's model is on one, else one per as many CPUs as the driver's model has threads.
    """

    def __init__(self, workers: int, reporter: Reporter) -> None:
        self.asked, self.reporter = workers, reporter
        self._pool: Pool | None = None

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()

    def use(self, loaded: LoadedModel, settings: ModelSettings, stop: StopRequest) -> None:
        self.loaded, self.stop = loaded, stop
        self.on_gpu = loaded.device.type == "cuda"
        self.threads = max(torch.get_num_threads(), 1)
        self.model = ModelSettings(
            **{
                **{name: getattr(settings, name) for name in ModelSettings.model_fields},
                "device": loaded.device.type,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "threads": self.threads,
            }
        )
        have = ray.cluster_resources()
        per_worker, what = (1, "GPU") if self.on_gpu else (self.threads, "CPU")
        room = int(have.get(what, 0) // per_worker)
        self.workers = self.asked or room
        if not 0 < self.workers <= room:
            raise SettingError(
                f"--ray-workers {self.asked or 'auto'}: the cluster has {have.get(what, 0):g} {what}s, and a worker takes {per_worker}; "
                f"{f'ask for at most {room}, or lower --threads' if room else 'add nodes' if self.on_gpu else f'lower --threads (now {self.threads}) or add nodes'}",
                field="ray_workers",
            )

    @property
    def reader(self) -> ReadTokenised | None:
        return partial(read_tokenised, self.loaded, self.workers)

    def fit(
        self, tracked: Sequence[TrackedModule], examples: Sequence[Example], rows: Sequence[int], settings: FitSettings, checkpoint: Path, progress: Progress
    ) -> Curvature:
        """Each worker fits some of the modules on all examples, so that no sum is split between workers."""
        fit = FitSettings(**{name: getattr(settings, name) for name in FitSettings.model_fields})
        left = unfitted(self.loaded, tracked, examples, rows, fit, checkpoint)
        parts = shares(left, self.workers)
        if parts:
            sample = _sent((list(examples), list(rows)))
            for done, (_, files) in enumerate(self._run(parts, lambda actor, names: actor.fit.remote(names, sample, fit), "while fitting the curvature"), 1):
                for content in files:
                    add_to_checkpoint(checkpoint, content)
                progress("modules", done, len(parts))
        return fit_curvature(self.loaded, tracked, examples, rows, fit, checkpoint=checkpoint)

    def spill(
        self, coordinates: CoordinateMap, examples: Sequence[Example], rows: Sequence[int], folder: Path, batch_tokens: int, progress: Callable[[int], None]
    ) -> dict[str, NDArray[np.float32]]:
        """Batches as they would be here, each computed by one worker."""
        z = spill_files(coordinates, len(examples), folder)
        with TemporaryDirectory(dir=folder) as used:
            coordinates.save(Path(used))
            sent = _sent(read_files(Path(used)))

        def submit(actor: Any, chosen: list[int]) -> Any:
            return actor.coordinates.remote(sent, [examples[i] for i in chosen], [rows[i] for i in chosen])

        ends = np.cumsum(list(coordinates.widths.values()))
        for chosen, found in self._run(plan_batches([len(e) for e in examples], batch_tokens), submit, "while fitting the projection"):
            for name, end in zip(coordinates.widths, ends, strict=True):
                z[name][chosen] = found[:, end - coordinates.widths[name] : end]
            progress(len(chosen))
        return z

    def sketch(
        self, sketcher: Sketcher, folder: Path, prepared: Prepared, writer: StoreWriter, first_segment: int, reporter: Reporter
    ) -> tuple[list[SegmentEntry], float]:
        """One shard, one task; segments are written here, as they come back. The share is of the time of all workers."""
        todo, done = unsketched(prepared, writer, first_segment)
        layout, busy = sketcher.projection.layout, 0.0
        with reporter.stage("sketch", total=prepared.n, done=done) as stage, ThreadPoolExecutor(1) as writing:
            written: Future[None] | None = None
            if todo:
                sent = _sent(read_files(folder))

                def submit(actor: Any, shard: int) -> Any:
                    return actor.sketch.remote(sent, prepared.table(shard), sketcher.batch_tokens)

                for shard, (sketch, seconds) in self._run(todo, submit, "while sketching"):
                    if written is not None:
                        written.result()
                    written = writing.submit(writer.write_segment, first_segment + shard, prepared.table(shard), sketch, layout)
                    busy += seconds
                    stage.advance(len(sketch.codes))
            if written is not None:
                written.result()
            share = busy / max(stage.seconds * self.workers, 1e-9) if todo else 1.0
        return segments_of(prepared, first_segment), round(share, 4)

    def _run(self, items: Sequence[Any], submit: Callable[[Any, Any], Any], where: str) -> Iterator[tuple[Any, Any]]:
        if self._pool is None:
            self._pool = self._start()
        return self._pool.map(items, submit, lambda: self.stop.check(where))

    def _start(self) -> Pool:
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        share = 1.0 if self.on_gpu else 1 / max(-(-self.workers // nodes), 1)
        remote = ray.remote(Worker).options(num_cpus=self.threads, num_gpus=1 if self.on_gpu else 0, scheduling_strategy="SPREAD", max_restarts=0)
        sent = _sent((self.model, versions(), self.loaded.fingerprint))
        return Pool(self.workers, lambda: remote.remote(share), lambda actor: actor.start.remote(sent), self.reporter.say)


def _sent(content: Any) -> Sent:
    ref = ray.put(content)
    return Sent(ref.hex(), ref)


def shares(modules: Sequence[TrackedModule], n: int) -> list[list[str]]:
    """Names of modules in at most n parts of about equal arithmetic, last layers first; modules with a common input stay together.

    A part's backward passes end at its lowest module, so parts are runs of neighbours.
    """
    units: dict[str, list[TrackedModule]] = {}
    for module in modules:
        units.setdefault(input_key(module), []).append(module)
    costs = [_arithmetic(members) for members in units.values()]
    total, before = sum(costs), 0.0
    parts: list[list[str]] = [[] for _ in range(n)]
    for members, cost in reversed(list(zip(units.values(), costs, strict=True))):
        parts[min(int(n * (before + cost / 2) / total), n - 1)] += [m.name for m in members]
        before += cost
    return [part for part in parts if part]


def _arithmetic(members: Sequence[TrackedModule]) -> float:
    """Multiplications per token for covariances, rotations and corrected eigenvalues of modules with a common input."""
    return float(members[0].d_in ** 2 + sum(m.d_out**2 + m.n_parameters for m in members))
