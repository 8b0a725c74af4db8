"""`eogp append`: more rows under the same curvature and projection, in new segments and a new generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.data.fingerprint import fingerprint_sources
from engine.data.reading import find_sources
from engine.data.settings import DataSettings
from engine.errors import ModelError
from engine.fit_curvature import sample_positions
from engine.model import LoadedModel, fingerprint_mismatch, load_model
from engine.sketcher import Sketcher
from engine.store import Store, StoreWriter
from engine.store.files import disk_errors
from engine.store.manifest import SegmentEntry, SourceEntry, current_generation
from indexer.calibrate import drift
from indexer.duplicates import KnownIds
from indexer.executor import Executor, executor_for
from indexer.index import complete_report, counts_of
from indexer.interruption import stop_on_signals
from indexer.job import Job, first_difference, interrupted
from indexer.prepare import Prepared, prepare
from indexer.report import count_flags, write_report
from indexer.reporter import Reporter
from indexer.settings import AppendSettings

DRIFT_ROWS = 128
BELOW_EXPECTED = 0.15  # three times the share that the calibration's definition gives


def append(path: Path, settings: AppendSettings, reporter: Reporter | None = None) -> dict[str, Any]:
    """Add rows to a store, or go on with an interrupted append; returns the report. Raises a UserError with one sentence."""
    reporter = reporter or Reporter(log_json=settings.log_json)
    current_generation(path)
    with executor_for(settings, reporter) as executor:
        return _append(path, settings, reporter, executor)


def _append(path: Path, settings: AppendSettings, reporter: Reporter, executor: Executor) -> dict[str, Any]:
    with StoreWriter(path) as writer, stop_on_signals() as stop, disk_errors(path):
        store = Store.open(path)
        data = _data_settings(store, settings)
        sources = find_sources(data)
        loaded, batch_tokens = _load(store, settings)
        fingerprints = fingerprint_sources(sources, data)
        identity = {
            "command": "append",
            "generation": store.generation,
            "settings": {**data.model_dump(mode="json"), "batch_tokens": batch_tokens, "shard_rows": settings.shard_rows, "threads": torch.get_num_threads()},
            "data": fingerprints,
        }
        if _committed(path, store):
            same = first_difference({**(interrupted(path) or {}), "generation": ""}, {**json.loads(json.dumps(identity)), "generation": ""}) is None
            report = complete_report(path, store.generation, reporter)
            if same:
                reporter.say(f"{path}: already appended (generation {store.generation})")
                return report
        job = Job(path, identity, restart=settings.restart)
        first = store.manifest.next_segment
        if not job.resumed:
            writer.sweep(store.manifest)
        executor.use(loaded, store.model_settings(settings), stop)
        with reporter.stage("prepare") as stage:
            prepared = prepare(
                sources,
                data,
                loaded,
                job.prepared,
                shard_rows=settings.shard_rows,
                first_row=store.manifest.next_row,
                first_source=len(store.manifest.data),
                known=KnownIds(store),
                stage=stage,
                stop=stop,
                read=executor.reader,
            )
        sketcher = Sketcher.load(store.sketch_dir, loaded, batch_tokens=batch_tokens)
        moved = _drift(store, prepared, sketcher, reporter)
        segments, busy = executor.sketch(sketcher, store.sketch_dir, prepared, writer, first, reporter)
        generation = commit(store, writer, prepared, segments, [SourceEntry(**f) for f in fingerprints])
        report = write_report(path, generation, prepared, reporter, {"busy_share": busy, "drift": moved})
        job.finish()
        return report


def _committed(path: Path, store: Store) -> bool:
    """Whether the interrupted run that the store holds is an append that was killed after its commit."""
    before = interrupted(path)
    return before is not None and before.get("command") == "append" and before.get("generation") != store.generation


def commit(store: Store, writer: StoreWriter, prepared: Prepared, segments: list[SegmentEntry], sources: list[SourceEntry]) -> str:
    """Publish a generation with the new segments behind the old ones."""
    before = store.manifest
    first = before.next_segment
    manifest = before.model_copy(
        update={
            "data": [*before.data, *sources],
            "segments": [*before.segments, *segments],
            "next_row": before.next_row + prepared.n,
            "next_segment": first + len(prepared.shards),
            "files": {**before.files, **writer.segment_entries(int(s.name) for s in segments)},
        }
    )
    counts, flagged = count_flags([writer.segment_path(int(s.name)) for s in segments])
    update = {"counts": add_counts(before.counts, {**counts_of(prepared), **counts}), "flagged": {**before.flagged, **flagged}}
    return writer.commit(manifest.model_copy(update=update), store.deleted)


def add_counts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Counts added up, nested ones too."""
    summed = dict(a)
    for name, value in b.items():
        summed[name] = add_counts(a.get(name, {}), value) if isinstance(value, dict) else a.get(name, 0) + value
    return summed


def _data_settings(store: Store, given: AppendSettings) -> DataSettings:
    """The store's own data settings; what was given now wins, except for what rows mean."""
    explicit = {name: getattr(given, name) for name in given.model_fields_set if name in DataSettings.model_fields}
    return DataSettings(**{**store.data_settings().model_dump(), "data": [], **explicit})


def _load(store: Store, given: AppendSettings) -> tuple[LoadedModel, int]:
    threads = given.threads or int(store.manifest.settings.get("threads", 0))
    settings = store.model_settings(given).model_copy(update={"threads": threads})
    loaded = load_model(settings, check_dtype=False)
    difference = fingerprint_mismatch(store.manifest.model.fingerprint, loaded.fingerprint)
    if difference:
        raise ModelError(f"{loaded.source} is not the model that {store.path} was built with: {difference}", field="model")
    return loaded, given.batch_tokens or int(store.manifest.settings.get("batch_tokens", 4096))


def _drift(store: Store, prepared: Prepared, sketcher: Sketcher, reporter: Reporter) -> dict[str, float] | None:
    """Coverage of up to 128 new rows against that of the rows left out when the projection was fitted; a warning where they lie outside."""
    positions = np.array(sample_positions(prepared.n, DRIFT_ROWS, 0), np.int64)
    queries = sketcher.query(prepared.examples(positions))
    if queries.coverage is None:
        return None
    found = drift(queries.coverage[queries.flags == 0], store.manifest.calibration, store.manifest.coverage_threshold)
    if found is None:
        return None
    text = (
        f"drift: coverage of the new rows {found['median_new']:.3f} (median of {found['rows']:.0f}) against {found['median_old']:.3f} of the old ones; "
        f"{found['below_threshold']:.0%} lie below the threshold that 5 % of the old ones do"
    )
    if found["below_threshold"] > BELOW_EXPECTED:
        text = f"warning: {text}. The projection does not span these rows well: index again with them, or expect poor rankings for what they teach"
    reporter.say(text, **found)
    return found
