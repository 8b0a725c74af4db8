"""The sketching stage: one segment per prepared shard, the disk busy on both sides while the model works."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from engine.example import Example
from engine.sketcher import Sketcher
from engine.store import StoreWriter
from engine.store.manifest import SegmentEntry
from engine.store.rows import examples_of
from engine.store.writer import segment_name
from indexer.interruption import StopRequest
from indexer.prepare import Prepared
from indexer.reporter import Reporter

Loaded = tuple[pa.Table, list[Example], list[int]]


def sketch_shards(
    sketcher: Sketcher, prepared: Prepared, writer: StoreWriter, first_segment: int, reporter: Reporter, stop: StopRequest
) -> tuple[list[SegmentEntry], float]:
    """Sketch every shard that has no segment yet. Returns the segments of all shards, and the share of the stage's time that the model was at work.

    The next shard is read and the last one written by two other threads. Batches never cross a shard, so a segment does not depend on what was resumed.
    """
    todo, done = unsketched(prepared, writer, first_segment)
    layout = sketcher.projection.layout
    busy = 0.0
    with reporter.stage("sketch", total=prepared.n, done=done) as stage, ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
        ahead: Future[Loaded] | None = reading.submit(_read, prepared, todo[0]) if todo else None
        written: Future[None] | None = None
        for position, i in enumerate(todo):
            assert ahead is not None
            table, examples, rows = ahead.result()
            ahead = reading.submit(_read, prepared, todo[position + 1]) if position + 1 < len(todo) else None
            started = time.perf_counter()
            sketch = sketcher.sketch(examples, rows, stage.advance)
            busy += time.perf_counter() - started
            stage.reach(done := done + len(examples), prepared.n)  # rows without a target pass through no batch
            if written is not None:
                written.result()
            written = writing.submit(writer.write_segment, first_segment + i, table, sketch, layout)
            if stop.set:
                written.result()
                stop.check(f"after {done:,} of {prepared.n:,} examples")
        if written is not None:
            written.result()
        share = busy / max(stage.seconds, 1e-9) if todo else 1.0
    return segments_of(prepared, first_segment), round(share, 4)


def unsketched(prepared: Prepared, writer: StoreWriter, first_segment: int) -> tuple[list[int], int]:
    """Shards that have no segment yet, and the rows of those that have."""
    todo = [i for i in range(len(prepared.shards)) if prepared.summaries[i]["rows"] and not writer.has_segment(first_segment + i)]
    return todo, prepared.n - sum(prepared.summaries[i]["rows"] for i in todo)


def segments_of(prepared: Prepared, first_segment: int) -> list[SegmentEntry]:
    """The manifest's entries of all shards' segments."""
    return [SegmentEntry(name=segment_name(first_segment + i), rows=s["rows"]) for i, s in enumerate(prepared.summaries) if s["rows"]]


def _read(prepared: Prepared, shard: int) -> Loaded:
    table = prepared.table(shard)
    return table, examples_of(table), [int(r) for r in table.column("row").to_pylist()]
