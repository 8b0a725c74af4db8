"""`eogp index`: from a model and its data to a store, in stages that each resume where they were interrupted.

prepare (read, tokenise) -> curvature -> projection (select, spill, PCA, left-out rows) -> sketch (one segment per shard) -> calibrate -> commit.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.budget import SketchPlan, choose_budget
from engine.coordinates import CoordinateMap
from engine.curvature import Curvature
from engine.data.fingerprint import fingerprint_sources
from engine.data.reading import Source, find_sources
from engine.data.settings import DataSettings
from engine.errors import StoreError, UserError
from engine.model import LoadedModel, load_model
from engine.modules import ModuleReport, track
from engine.search import Searcher
from engine.selection import select_coordinates
from engine.sketcher import Sketcher, spill_files
from engine.store import Manifest, Store, StoreWriter
from engine.store.files import disk_errors, fsync, new_folder, write_file
from engine.store.manifest import CURRENT, ModelEntry, SegmentEntry, SketchEntry, SourceEntry, current_generation, read_manifest
from indexer.calibrate import candidate_recall, coverage_summary
from indexer.executor import Executor, executor_for
from indexer.interruption import StopRequest, stop_on_signals
from indexer.job import WORK, Job, first_difference
from indexer.plan import describe, estimate, measure_rates, require_disk, require_memory
from indexer.prepare import Prepared, prepare
from indexer.report import count_flags, write_report
from indexer.reporter import Reporter
from indexer.samples import Samples, draw_samples
from indexer.settings import OPERATIONAL, IndexSettings
from indexer.versions import versions
from indexer.weights import weights_hash

LEFT_OUT, CALIBRATION, COMPLETE = "left_out.npz", "calibration.json", "complete"
GIGA = 1e9


def index(store: Path, settings: IndexSettings, reporter: Reporter | None = None) -> dict[str, Any]:
    """Build the store, or go on with an interrupted run; returns the report. Raises a UserError with one sentence."""
    reporter = reporter or Reporter(log_json=settings.log_json)
    with executor_for(settings, reporter) as executor:
        return _index(store, settings, reporter, executor)


def _index(store: Path, settings: IndexSettings, reporter: Reporter, executor: Executor) -> dict[str, Any]:
    sources = find_sources(settings)
    loaded = load_model(settings)
    settings = settings.model_copy(update={"model": _absolute(settings.model), "threads": torch.get_num_threads()})
    identity = {
        "command": "index",
        "settings": kept_settings(settings),
        "data": fingerprint_sources(sources, settings),
        "model": loaded.fingerprint,
    }
    finished = _finished(store, identity)
    if finished is not None:
        reporter.say(f"{store}: already complete (generation {finished})")
        return complete_report(store, finished, reporter)
    fresh = not store.exists()
    try:
        with StoreWriter(store) as writer, stop_on_signals() as stop, disk_errors(store):
            job = Job(store, identity, restart=settings.restart)
            if not job.resumed:
                _clear(store)
            executor.use(loaded, settings, stop)
            return Indexing(store, settings, reporter, writer, job, loaded, sources, identity, stop, executor).run()
    except UserError as e:
        if fresh and e.code != "disk-full" and not any((store / "segments").iterdir()):
            shutil.rmtree(store, ignore_errors=True)  # a mistake leaves nothing half-written
        raise


@dataclass
class Indexing:
    """One run of the job."""

    store: Path
    settings: IndexSettings
    reporter: Reporter
    writer: StoreWriter
    job: Job
    loaded: LoadedModel
    sources: list[Source]
    identity: dict[str, Any]
    stop: StopRequest
    executor: Executor

    def run(self) -> dict[str, Any]:
        """All stages; returns the report."""
        if self.job.resumed:
            self.reporter.say(f"{self.store}: going on with an interrupted run")
        self.modules = track(self.loaded)
        prepared = self._prepare()
        samples = draw_samples(prepared.n, fit_examples=self.settings.fit_examples, pca_examples=self.settings.pca_examples, seed=self.settings.seed)
        self._plan(prepared, samples)
        curvature = self._fit(prepared, samples)
        sketcher = self._project(prepared, samples, curvature)
        segments, busy = self.executor.sketch(sketcher, self.job.sketch, prepared, self.writer, 0, self.reporter)
        manifest = self._manifest(prepared, samples, sketcher, segments)
        generation = self._commit(manifest, prepared)
        report = write_report(self.store, generation, prepared, self.reporter, {"busy_share": busy})
        self.job.finish()
        return report

    def _prepare(self) -> Prepared:
        with self.reporter.stage("prepare", unit="examples") as stage:
            return prepare(
                self.sources,
                data_settings(self.settings),
                self.loaded,
                self.job.prepared,
                shard_rows=self.settings.shard_rows,
                stage=stage,
                stop=self.stop,
                read=self.executor.reader,
            )

    def _plan(self, prepared: Prepared, samples: Samples) -> None:
        plan = choose_budget(self.modules.tracked, self.settings, n_fit=len(samples.pca))
        self.reporter.event("calibrating")
        rates = measure_rates(self.loaded, self.modules, prepared, self.settings)
        found = estimate(prepared, self.modules, plan, samples, self.settings, self.loaded, rates)
        self.keeps_curvature = found.keeps_curvature
        bad = sum(1 for _ in prepared.bad_rows())
        self.reporter.say("\n".join(describe(prepared, self.modules, plan, samples, self.loaded, found, bad)))
        for note in (*self.loaded.notes, *self.modules.notes):
            self.reporter.say(f"note       {note}")
        require_memory(found, self.loaded)
        require_disk(self.store, found)

    def _fit(self, prepared: Prepared, samples: Samples) -> Curvature:
        if (self.job.sketch / CALIBRATION).is_file() and (not self.keeps_curvature or self._full.is_dir()):
            return Curvature({}, {}, self.settings.damping)  # the projection is there; nothing needs the curvature any more
        examples = prepared.examples(samples.curvature)
        with self.reporter.stage("curvature", unit="steps") as stage:

            def progress(phase: str, done: int, total: int) -> None:
                stage.reach(done, total)
                self.stop.check("while fitting the curvature")

            curvature = self.executor.fit(self.modules.tracked, examples, prepared.rows(samples.curvature), self.settings, self.job.curvature, progress)
        if self.keeps_curvature and not self._full.is_dir():
            with new_folder(self._full) as folder:
                curvature.save(folder)
        return curvature

    @property
    def _full(self) -> Path:
        return self.job.folder / "full"

    def _project(self, prepared: Prepared, samples: Samples, curvature: Curvature) -> Sketcher:
        if not (self.job.sketch / CALIBRATION).is_file():
            with new_folder(self.job.sketch) as folder:
                self._fit_projection(prepared, samples, curvature, folder)
            shutil.rmtree(self.job.coordinates, ignore_errors=True)
        if not self.keeps_curvature or self._full.is_dir():
            shutil.rmtree(self.job.curvature, ignore_errors=True)
        self.fitted = json.loads((self.job.sketch / CALIBRATION).read_text(encoding="utf-8"))
        return Sketcher.load(self.job.sketch, self.loaded, batch_tokens=self.settings.batch_tokens)

    def _fit_projection(self, prepared: Prepared, samples: Samples, curvature: Curvature, folder: Path) -> None:
        usable = [m for m in self.modules.tracked if m.name in curvature.modules]
        plan = choose_budget(usable, self.settings, n_fit=len(samples.pca))
        selected = select_coordinates(curvature, plan.blocks, plan.m, joint=plan.joint)
        coordinates = CoordinateMap.from_curvature(self.loaded, curvature, selected.positions)
        z = self._coordinates(prepared, samples, coordinates)
        with self.reporter.stage("projection", unit="GFLOP") as stage:

            def progress(done: float, total: float) -> None:
                stage.reach(int(done / GIGA), math.ceil(total / GIGA))
                self.stop.check("while fitting the projection")

            projection = plan.fit(z, seed=self.settings.seed, device=self.loaded.device, progress=progress, checkpoint=self.job.coordinates)
            del z
            sketcher = Sketcher(self.loaded, coordinates, projection, batch_tokens=self.settings.batch_tokens)
            sketcher.save(folder)
            sketcher = Sketcher.load(folder, self.loaded, batch_tokens=self.settings.batch_tokens)  # what is stored is what is used
            self._left_out(prepared, samples, sketcher, folder)
        fitted = {"plan": _described(plan, selected.kept_share), "skipped": curvature.skipped, "coverage": self._coverage}
        (folder / CALIBRATION).write_text(json.dumps(fitted), encoding="utf-8")

    def _coordinates(self, prepared: Prepared, samples: Samples, coordinates: CoordinateMap) -> dict[str, NDArray[np.float32]]:
        """Stage-1 coordinates of the projection's fitting set on disk; those of an interrupted run where they are all there."""
        folder = self.job.coordinates
        if (folder / COMPLETE).is_file():
            return spill_files(coordinates, len(samples.pca), folder, mode="r")
        shutil.rmtree(folder, ignore_errors=True)
        with self.reporter.stage("coordinates", total=len(samples.pca)) as stage:

            def progress(n: int) -> None:
                stage.advance(n)
                self.stop.check("before fitting the projection")

            z = self.executor.spill(coordinates, prepared.examples(samples.pca), prepared.rows(samples.pca), folder, self.settings.batch_tokens, progress)
            for file in sorted(folder.iterdir()):
                fsync(file)
            write_file(folder / COMPLETE, "")
        return z

    def _left_out(self, prepared: Prepared, samples: Samples, sketcher: Sketcher, folder: Path) -> None:
        """Query coordinates of the left-out rows, for calibration when all rows are sketched."""
        self._coverage: dict[str, float] | None = None
        queries = sketcher.query(prepared.examples(samples.held_out))
        good = queries.flags == 0
        np.savez(folder / LEFT_OUT, y=queries.y[good], positions=samples.held_out[good])
        if queries.coverage is not None and good.any():
            self._coverage = coverage_summary(queries.coverage[good])

    def _manifest(self, prepared: Prepared, samples: Samples, sketcher: Sketcher, segments: list[SegmentEntry]) -> Manifest:
        layout, fitted = sketcher.projection.layout, self.fitted
        shared = sum(p.stat().st_size for p in self._sketch_files())
        resolved = prepared.settings().model_dump(mode="json")
        coverage = fitted["coverage"]
        return Manifest(
            software=versions(),
            settings={**kept_settings(self.settings), **{k: v for k, v in resolved.items() if k != "data"}},
            model=model_entry(self.loaded, self.modules, fitted["skipped"]),
            data=[SourceEntry(**d) for d in self.identity["data"]],
            sketch=SketchEntry(
                layout=layout.to_json(),
                c=[float(v) for v in sketcher.projection.c],
                scale=sketcher.projection.scale,
                method=sketcher.projection.method,
                plan={**fitted["plan"], "fit": sketcher.projection.info},
                bytes_per_example=layout.payload_bytes,
                shared_bytes=shared,
            ),
            coverage_threshold=coverage["threshold"] if coverage else None,
            calibration={"coverage": coverage},
            counts=counts_of(prepared),
            training_run=training_run(self.loaded.source),
            next_row=prepared.n,
            next_segment=len(prepared.shards),
            segments=segments,
        )

    def _sketch_files(self) -> list[Path]:
        return sorted(p for p in self.job.sketch.iterdir() if p.name not in (LEFT_OUT, CALIBRATION))

    def _commit(self, manifest: Manifest, prepared: Prepared) -> str:
        """Measure candidate recall on the finished segments, put the shared files in place, publish."""
        with self.reporter.stage("finish", unit="steps", total=3) as stage:
            with new_folder(self.store / "shared" / "sketch") as folder:
                for file in self._sketch_files():
                    shutil.copy2(file, folder / file.name)
            if self._full.is_dir():
                with new_folder(self.store / "shared" / "full") as folder:
                    shutil.copytree(self._full, folder, dirs_exist_ok=True)
            stage.advance()
            draft = Store(self.store, "draft", manifest)
            counts, flagged = count_flags([self.writer.segment_path(int(s.name)) for s in manifest.segments])
            left_out = np.load(self.job.sketch / LEFT_OUT)
            searcher = Searcher(draft.segments, draft.layout, draft.c, excluded=draft.excluded)
            recall = candidate_recall(searcher, left_out["y"], left_out["positions"])
            stage.advance()
            shared = [name for name in ("shared/sketch", "shared/full") if (self.store / name).is_dir()]
            files = {**self.writer.entries(shared), **self.writer.segment_entries(int(s.name) for s in manifest.segments)}
            generation = self.writer.commit(
                manifest.model_copy(
                    update={
                        "counts": {**manifest.counts, **counts},
                        "flagged": flagged,
                        "calibration": {**(manifest.calibration or {}), "recall": recall},
                        "files": files,
                    }
                )
            )
            stage.advance()
        return generation


def kept_settings(settings: IndexSettings) -> dict[str, Any]:
    """What reproduces the run, JSON-able."""
    return settings.model_dump(mode="json", exclude=set(OPERATIONAL))


def data_settings(settings: DataSettings) -> DataSettings:
    """The data's part of a larger table."""
    return DataSettings(**{name: getattr(settings, name) for name in DataSettings.model_fields})


def model_entry(loaded: LoadedModel, modules: ModuleReport, skipped: dict[str, str]) -> ModelEntry:
    """What the manifest keeps of the model."""
    return ModelEntry(
        source=_absolute(loaded.source) or "",
        task=loaded.task,
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention=loaded.attention,
        fingerprint=loaded.fingerprint,
        weights=weights_hash(loaded),
        tracked_share=round(modules.share, 6),
        skipped={**{name: reason for name, reason, _ in modules.skipped}, **skipped},
    )


def counts_of(prepared: Prepared) -> dict[str, Any]:
    """Counts that the prepared rows give."""
    kinds: dict[str, int] = {}
    for summary in prepared.summaries:
        for kind, n in summary["kinds"].items():
            kinds[kind] = kinds.get(kind, 0) + n
    bad = sum(1 for _ in prepared.bad_rows())
    return {
        "rows": prepared.n,
        "tokens": prepared.total("tokens"),
        "targets": prepared.total("targets"),
        "truncated": prepared.total("truncated"),
        "bad": bad,
        "kinds": kinds,
    }


def training_run(source: str) -> dict[str, Any] | None:
    """The record that `eogp finetune` left beside the model, if there is one."""
    record = Path(source) / "finetune.json"
    try:
        return dict(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def complete_report(store: Path, generation: str, reporter: Reporter) -> dict[str, Any]:
    """The report of a run that committed; written now where it was killed before it could, and then its working folder goes."""
    work = store / WORK
    if not read_report(store, generation) and (work / "prepared").is_dir():
        write_report(store, generation, Prepared(work / "prepared"), reporter, {})
    shutil.rmtree(work, ignore_errors=True)
    return read_report(store, generation)


def read_report(store: Path, generation: str) -> dict[str, Any]:
    """The report of the run that made a generation; empty where it is gone."""
    path = store / "reports" / generation / "report.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _described(plan: SketchPlan, kept_share: float) -> dict[str, Any]:
    return {**plan.to_json(), "m": dict(plan.m), "kept_share": round(kept_share, 6)}


def _absolute(name: str | None) -> str | None:
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def _clear(store: Path) -> None:
    """Remove what an abandoned run left; a store without a generation holds nothing else."""
    for name in ("segments", "shared", "generations"):
        for path in (store / name).iterdir():
            shutil.rmtree(path)


def _finished(store: Path, identity: dict[str, Any]) -> str | None:
    """The generation of this very run, if the store holds it. Raises StoreError for a store that holds another."""
    if not (store / CURRENT).is_file():
        return None
    generation = current_generation(store)
    manifest = read_manifest(store, "000001" if (store / "generations" / "000001").is_dir() else generation)
    same = ["shard_rows", "batch_tokens", "seed", "data", "model", "bytes_per_example", "k", "m", "method", "blocks"]
    wanted, found = identity["settings"], manifest.settings
    difference = first_difference({k: found.get(k) for k in same}, {k: wanted.get(k) for k in same}) or first_difference(
        [d.sha256 for d in manifest.data], [d["sha256"] for d in identity["data"]]
    )
    if difference:
        raise StoreError(
            f"{store}: holds a store already, made with another {difference}; add rows with `eogp append`, or choose another folder", code="store-exists"
        )
    return generation
