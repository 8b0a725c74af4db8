"""Ray Data reads and tokenises: a read task per source, a pool of tokenisers behind them, and the order of the sources kept."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from engine.cluster import cause_of
from engine.data.reading import BadRow, Row, Source, read_source
from engine.data.settings import DataSettings
from engine.data.tokens import to_example
from engine.errors import DataError
from engine.model import LoadedModel
from indexer.prepare import Record, Tokenised, blames_settings

RECORDS = 512  # per row of the dataset: enough that moving them costs little beside tokenising them
SOURCE, PICKLED = "source", "records"


class Sources(Datasource):
    """A user's sources as rows of (position of the source, pickled records): the same reader as without a cluster, so the same rows are bad for the same reasons."""

    def __init__(self, sources: Sequence[Source], settings: DataSettings) -> None:
        self.sources, self.settings = list(sources), settings

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None) -> list[ReadTask]:
        """One per source; a source is a stream, and is read by one task."""

        def task(position: int, source: Source) -> ReadTask:
            return ReadTask(lambda: _blocks(position, source, self.settings), BlockMetadata(None, None, [source.name], None))

        return [task(i, source) for i, source in enumerate(self.sources)]

    def estimate_inmemory_data_size(self) -> int | None:
        return None


def _blocks(position: int, source: Source, settings: DataSettings) -> Iterator[pa.Table]:
    records: list[Row | BadRow] = []
    for record in read_source(source, settings):
        records.append(record)
        if len(records) == RECORDS:
            yield _block(position, records)
            records = []
    yield _block(position, records)


def _block(position: int, records: Sequence[Record]) -> pa.Table:
    return pa.table({SOURCE: pa.array([position], pa.int32()), PICKLED: pa.array([pickle.dumps(records)], pa.large_binary())})


class Tokeniser:
    """Rows to examples. What cannot be a row stays a BadRow; a mistake in the settings ends the job."""

    def __init__(self, loaded: LoadedModel, settings: DataSettings) -> None:
        self.loaded, self.settings = loaded, settings

    def __call__(self, batch: pa.Table) -> Iterable[pa.Table]:
        for position, pickled in zip(batch.column(SOURCE).to_pylist(), batch.column(PICKLED).to_pylist(), strict=True):
            yield _block(position, [self._one(r) if isinstance(r, Row) else r for r in pickle.loads(pickled)])

    def _one(self, row: Row) -> Record:
        try:
            example = to_example(row, self.loaded, self.settings, training=True, default_id="0")
            return Tokenised(row.file, row.line, replace(example, offsets=None))  # not kept, and as large as all the rest
        except DataError as e:
            if blames_settings(e):
                raise
            return BadRow(row.file, row.line, e.message)


def read_tokenised(loaded: LoadedModel, tokenisers: int, sources: Sequence[Source], settings: DataSettings, skip: int) -> Iterator[tuple[int, Record]]:
    """(position of the source, record) in the order of the sources, the first `skip` records left out.

    settings: as the first good row resolved them. Raises DataError as the reader here would: a file that cannot be read, settings that no row fits.
    """
    # parsing waits for the disk, and must not wait for a tokeniser
    rows = ray.data.read_datasource(Sources(sources, settings), num_cpus=0.01)
    rows.context.execution_options.preserve_order = True
    rows.context.enable_progress_bars = False
    bare = replace(loaded, model=SimpleNamespace(config=loaded.model.config))  # tokenising needs no weights
    tokenised = rows.map_batches(Tokeniser, fn_constructor_args=(bare, settings), batch_size=None, batch_format="pyarrow", concurrency=(1, max(tokenisers, 1)))
    try:
        for row in tokenised.iter_rows():
            records = pickle.loads(row[PICKLED])
            passed = min(skip, len(records))
            skip -= passed
            for record in records[passed:]:
                yield int(row[SOURCE]), record
    except ray.exceptions.RayError as e:
        ours = cause_of(e)
        raise ours if ours is not None else e from None
