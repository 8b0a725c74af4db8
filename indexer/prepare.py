"""The first stage: read and tokenise everything, to shards of rows on disk, before the model does any work.

Each prepared shard becomes one segment. Every bad row is known by the end of this stage, the fitting samples are drawn from rows that are known to be
good, and the later stages read tokens instead of text. A shard is written whole or not at all, so an interrupted run goes on after the last one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.data.reading import BadRow, Row, Source, read_source
from engine.data.settings import DataSettings
from engine.data.tokens import resolve_kind, to_example
from engine.errors import DataError
from engine.example import Example
from engine.model import LoadedModel
from engine.store.files import new_folder, write_file
from engine.store.rows import examples_of, examples_table
from engine.store.segment import read_table, write_table
from indexer.duplicates import KnownIds
from indexer.interruption import StopRequest
from indexer.reporter import Stage

ROWS, SUMMARY, BAD, DONE = "rows.arrow", "summary.json", "bad_rows.jsonl", "done.json"


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A row as an example, with the file and line that it came from. Its id is still open where the settings name no id field."""

    file: str
    line: int
    example: Example


Record = Row | BadRow | Tokenised
# (sources, settings as the first good row resolved them, records to pass over) -> (position of the source, record) in the order of the sources
ReadTokenised = Callable[[Sequence[Source], DataSettings, int], Iterator[tuple[int, Record]]]


def blames_settings(error: DataError) -> bool:
    """Whether the settings are wrong, not the row: no row would fare better."""
    return error.field in ("max_length", "kind", "append_eos") or error.code == "no-chat-template"


@dataclass
class _Shard:
    examples: list[Example] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    bad: list[dict[str, Any]] = field(default_factory=list)


class Prepared:
    """The prepared shards of a folder: counts, tables, and examples by position (0 .. n - 1 over all shards)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = sorted(p for p in folder.iterdir() if p.is_dir() and p.name.isdigit()) if folder.is_dir() else []
        self.summaries = [json.loads((p / SUMMARY).read_text(encoding="utf-8")) for p in self.shards]
        self.starts = np.concatenate([[0], np.cumsum([s["rows"] for s in self.summaries])]).astype(np.int64)

    @property
    def n(self) -> int:
        return int(self.starts[-1])

    @property
    def complete(self) -> bool:
        return (self.folder / DONE).is_file()

    def total(self, name: str) -> int:
        """Sum of a count over the shards: rows, tokens, targets, truncated, text_bytes."""
        return sum(int(s[name]) for s in self.summaries)

    def settings(self) -> DataSettings:
        """The data settings as the first row resolved them."""
        return DataSettings(**json.loads((self.folder / DONE).read_text(encoding="utf-8"))["settings"])

    def table(self, shard: int) -> pa.Table:
        return read_table(self.shards[shard] / ROWS)

    def examples(self, positions: Sequence[int] | NDArray[np.int64]) -> list[Example]:
        """The examples at ascending positions."""
        found: list[Example] = []
        wanted = np.asarray(positions, np.int64)
        for i in range(len(self.shards)):
            inside = wanted[(wanted >= self.starts[i]) & (wanted < self.starts[i + 1])]
            if len(inside):
                found += examples_of(self.table(i).take(pa.array(inside - self.starts[i])))
        return found

    def rows(self, positions: Sequence[int] | NDArray[np.int64]) -> list[int]:
        """Store-wide row numbers at ascending positions."""
        first = self.summaries[0]["first_row"] if self.summaries else 0
        return [int(p) + first for p in positions]

    def bad_rows(self) -> Iterator[dict[str, Any]]:
        """{file, line, reason} of every bad row, in order."""
        for shard in self.shards:
            with (shard / BAD).open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)


def prepare(
    sources: Sequence[Source],
    settings: DataSettings,
    loaded: LoadedModel,
    folder: Path,
    *,
    shard_rows: int,
    first_row: int = 0,
    first_source: int = 0,
    known: KnownIds | None = None,
    stage: Stage,
    stop: StopRequest,
    read: ReadTokenised | None = None,
) -> Prepared:
    """Read and tokenise all sources into `folder`, going on where an earlier call was interrupted.

    first_row: the store's next running number; first_source: position of the first source in the manifest's data; known: ids of the store appended to.
    read: what reads and tokenises behind the first good row, elsewhere and in parallel; by default it is done here.
    Raises DataError at the first bad row with on_error=fail, and where no row is usable.
    """
    before = Prepared(folder)
    if before.complete:
        stage.advance(before.n)
        return before
    folder.mkdir(parents=True, exist_ok=True)
    work = _Preparation(sources, settings, loaded, folder, shard_rows, first_row, first_source, known or KnownIds(), stage, stop, read)
    work.go(before)
    return Prepared(folder)


@dataclass
class _Preparation:
    sources: Sequence[Source]
    settings: DataSettings
    loaded: LoadedModel
    folder: Path
    shard_rows: int
    first_row: int
    first_source: int
    known: KnownIds
    stage: Stage
    stop: StopRequest
    read: ReadTokenised | None

    def go(self, before: Prepared) -> None:
        self.resolved: DataSettings | None = None
        self.shard, self.number, self.consumed, self.next_row = _Shard(), 0, 0, self.first_row
        if before.summaries:
            self._restore(before)
        for source, record in self._records():
            self.consumed += 1
            self._take(record, self.first_source + source)
            if len(self.shard.examples) + len(self.shard.bad) // 64 >= self.shard_rows:  # bad rows alone must not grow a shard without bound
                self._flush()
                self.stop.check("while reading")
        if self.shard.examples or self.shard.bad:
            self._flush()
        if self.next_row == self.first_row:
            raise DataError(f"no usable row in {', '.join(s.name for s in self.sources)}{self._first_reason()}", field="data")
        assert self.resolved is not None
        write_file(self.folder / DONE, json.dumps({"settings": self.resolved.model_dump(mode="json")}))

    def _records(self) -> Iterator[tuple[int, Record]]:
        """What is not consumed yet, with the position of its source. Rows mean what the first good one made of the settings, so that one is found here."""
        skip = self.consumed
        if self.read is None or self.resolved is None:
            for i, source in enumerate(self.sources):
                for row in read_source(source, self.settings):
                    if skip:
                        skip -= 1
                        continue
                    yield i, row
                    if self.read is not None and self.resolved is not None:
                        yield from self.read(self.sources, self.resolved, self.consumed)
                        return
        else:
            yield from self.read(self.sources, self.resolved, skip)

    def _restore(self, before: Prepared) -> None:
        last = before.summaries[-1]
        self.number, self.consumed, self.next_row = len(before.shards), last["consumed"], last["next_row"]
        self.resolved = DataSettings(**last["settings"]) if last["settings"] else None
        for i in range(len(before.shards)):
            table = before.table(i)
            self.known.add_all(table.column("id").to_pylist(), table.column("source").to_pylist(), table.column("line").to_pylist())
        self.stage.advance(before.n)

    def _take(self, record: Record, source: int) -> None:
        if isinstance(record, BadRow):
            self._reject(record.file, record.line, record.reason)
            return
        try:
            resolved, example = self._example(record)
            if resolved.id_field != "auto":
                self.known.check(example.id, [s.name for s in self.sources], self.first_source)
        except DataError as e:
            if blames_settings(e):
                raise
            self._reject(record.file, record.line, e.message)
            return
        self.resolved = resolved
        if resolved.id_field != "auto":
            self.known.add(example.id, source, record.line)
        self.shard.examples.append(example)
        self.shard.rows.append(self.next_row)
        self.shard.sources.append(source)
        self.shard.lines.append(record.line)
        self.next_row += 1
        self.stage.advance()

    def _example(self, record: Row | Tokenised) -> tuple[DataSettings, Example]:
        if isinstance(record, Row):
            resolved = self.resolved or resolve_kind(record, self.loaded, self.settings)
            return resolved, to_example(record, self.loaded, resolved, training=True, default_id=str(self.next_row))
        assert self.resolved is not None  # nothing is tokenised elsewhere before
        return self.resolved, replace(record.example, id=str(self.next_row)) if self.resolved.id_field == "auto" else record.example

    def _reject(self, file: str, line: int, reason: str) -> None:
        if self.settings.on_error == "fail":
            raise DataError(f"{file}:{line}: {reason}", field="data")
        self.shard.bad.append({"file": file, "line": line, "reason": reason})

    def _flush(self) -> None:
        s, self.shard = self.shard, _Shard()
        first = self.next_row - len(s.rows)
        summary = {
            "first_row": first,
            "next_row": self.next_row,
            "rows": len(s.rows),
            "consumed": self.consumed,
            "tokens": sum(len(e) for e in s.examples),
            "targets": sum(e.n_targets for e in s.examples),
            "truncated": sum(e.truncated for e in s.examples),
            "text_bytes": sum(len(e.text.encode()) for e in s.examples),
            "kinds": dict(Counter(e.kind for e in s.examples)),
            "settings": self.resolved.model_dump(mode="json") if self.resolved else None,
        }
        with new_folder(self.folder / f"{self.number:06d}") as folder:
            write_table(folder / ROWS, examples_table(s.examples, s.rows, s.sources, s.lines))
            (folder / BAD).write_text("".join(json.dumps(b, ensure_ascii=False) + "\n" for b in s.bad), encoding="utf-8")
            (folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")
        self.number += 1

    def _first_reason(self) -> str:
        first = next(Prepared(self.folder).bad_rows(), None)
        return f"; the first bad row is {first['file']}:{first['line']}: {first['reason']}" if first else "; it is empty"
