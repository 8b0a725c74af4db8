"""`eogp compact`: rewrite segments without their deleted rows, and merge small ones. What was deleted is gone from every file afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from engine.errors import StoreError
from engine.store import Manifest, Segment, Store, StoreWriter
from engine.store.files import disk_errors, new_folder
from engine.store.manifest import CURRENT, FileEntry, SegmentEntry
from engine.store.merge import aligned, common_schema
from engine.store.segment import CODES, ROWS, SCALES, SEGMENT_FILES
from engine.store.writer import segment_name
from indexer.job import unfinished_append
from indexer.report import reason_of

CHUNK = 16_384


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments that become one, and the rows of each that live on (ascending, within the segment)."""

    segments: list[Segment]
    live: list[NDArray[np.int64]]

    @property
    def rows(self) -> int:
        return sum(len(x) for x in self.live)

    @property
    def unchanged(self) -> bool:
        return len(self.segments) == 1 and self.rows == self.segments[0].n


def compact(path: Path, *, segment_rows: int = 1_000_000) -> tuple[str, int, int]:
    """(generation, rows removed, segments now). Ids, order and metadata stay; positions move up. Raises StoreError for an unfinished append."""
    Store.open(path)
    with StoreWriter(path) as writer, disk_errors(path):
        unfinished = unfinished_append(path)
        if unfinished:
            raise unfinished
        store = Store.open(path)
        if not len(store.deleted) == store.manifest.deleted:
            raise StoreError(f"{path}: the manifest and the tombstones disagree; run `eogp verify`", code="damaged-store")
        groups = list(_groups(store, segment_rows))
        segments: list[SegmentEntry] = []
        files: dict[str, FileEntry] = {n: e for n, e in store.manifest.files.items() if n.startswith("shared/")}
        number = store.manifest.next_segment
        for group in groups:
            if group.unchanged:
                name = group.segments[0].name
                files |= {n: e for n, e in store.manifest.files.items() if n.startswith(f"segments/{name}/")}
            else:
                name = segment_name(number)
                with new_folder(writer.segment_path(number)) as folder:
                    _write(folder, group, store)
                files |= writer.entries(f"segments/{name}/{file}" for file in SEGMENT_FILES)
                number += 1
            segments.append(SegmentEntry(name=name, rows=group.rows))
        removed = store.n_rows - sum(s.rows for s in segments)
        if removed or number != store.manifest.next_segment:
            manifest = _without_deleted(store, segments, files, number)
            writer.commit(manifest)
        generation = (path / CURRENT).read_text(encoding="utf-8").strip()
        live = Store.open(path)
        writer.sweep(live.manifest, generations=True)
        return generation, removed, len(segments)


def _groups(store: Store, segment_rows: int) -> Iterator[_Group]:
    """Neighbouring segments together up to segment_rows; segments without a living row vanish."""
    group = _Group([], [])
    for segment in store.segments:
        alive = np.ones(segment.n, np.bool_)
        inside = store.deleted[(store.deleted >= segment.base) & (store.deleted < segment.base + segment.n)] - segment.base
        alive[inside] = False
        live = np.flatnonzero(alive)
        if not len(live):
            continue
        if group.segments and group.rows + len(live) > segment_rows:
            yield group
            group = _Group([], [])
        group.segments.append(segment)
        group.live.append(live)
    if group.segments:
        yield group


def _write(folder: Path, group: _Group, store: Store) -> None:
    layout = store.layout
    codes = np.empty((group.rows, layout.code_bytes), np.uint8)
    scales = np.empty((group.rows, layout.n_blocks), np.float16)
    schema = common_schema([s.table.schema for s in group.segments])
    at = 0
    with pa.OSFile(str(folder / ROWS), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for segment, live in zip(group.segments, group.live, strict=True):
            codes[at : at + len(live)] = segment.codes[live]
            scales[at : at + len(live)] = segment.scales[live]
            at += len(live)
            for chunk in _chunks(live):
                writer.write_table(aligned(segment.table.take(pa.array(chunk)), schema).combine_chunks())
    index = faiss.IndexBinaryFlat(8 * layout.code_bytes)
    index.add(codes)
    faiss.write_index_binary(index, str(folder / CODES))
    np.save(folder / SCALES, scales, allow_pickle=False)


def _chunks(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]


def _without_deleted(store: Store, segments: Sequence[SegmentEntry], files: dict[str, FileEntry], number: int) -> Manifest:
    """The manifest of what is left, its counts lowered by what is gone."""
    counts, flagged = json.loads(json.dumps(store.manifest.counts)), dict(store.manifest.flagged)
    for segment in store.segments:
        inside = store.deleted[(store.deleted >= segment.base) & (store.deleted < segment.base + segment.n)] - segment.base
        gone = segment.table.select(["row", "kind", "input_ids", "truncated", "n_tokens", "flags"]).take(pa.array(inside))
        _subtract(counts, "rows", len(inside))
        _subtract(counts, "tokens", pc.sum(pc.list_value_length(gone.column("input_ids"))).as_py() or 0)
        _subtract(counts, "targets", pc.sum(gone.column("n_tokens")).as_py() or 0)
        _subtract(counts, "truncated", pc.sum(gone.column("truncated")).as_py() or 0)
        for kind in gone.column("kind").to_pylist():
            _subtract(counts.get("kinds", {}), kind, 1)
        for row, flag in zip(gone.column("row").to_pylist(), gone.column("flags").to_pylist(), strict=True):
            if flag:
                _subtract(counts.get("flagged", {}), reason_of(flag), 1)
                flagged.pop(str(row), None)
    return store.manifest.model_copy(update={"segments": list(segments), "files": files, "next_segment": number, "flagged": flagged, "counts": counts})


def _subtract(counts: dict[str, Any], name: str, n: int) -> None:
    if name in counts:
        counts[name] -= n
