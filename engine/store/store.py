"""Opening a store: the live generation, checked and memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.data.settings import DataSettings
from engine.errors import SettingError, StoreError
from engine.settings import ModelSettings
from engine.store.manifest import DELETED, Manifest, current_generation, read_manifest
from engine.store.rows import SKETCHED, fixed_width, mask_of, metadata_at, metadata_table
from engine.store.segment import Segment
from engine.store.verify import check_files

if TYPE_CHECKING:
    from engine.query import QueryAnswer, QueryEngine


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row as stored: labels is None where equal to input_ids, a class for classification; loss summed over target tokens, in nats;
    source and line say which input it came from."""

    position: int
    row: int
    id: str
    kind: str
    text: str
    metadata: dict[str, Any]
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64] | int | None
    target_mask: NDArray[np.bool_]
    truncated: bool
    source: str
    line: int
    norm_sq: float
    loss: float
    n_tokens: int
    flags: int


class Store:
    """A generation of a store, open for reading; positions 0 .. n_rows - 1 run through its segments in order.

    A store that is appended to, compacted or replaced meanwhile does not change under a reader: open it again for the new generation.
    """

    def __init__(self, path: Path, generation: str, manifest: Manifest) -> None:
        self.path, self.generation, self.manifest = path, generation, manifest
        self._engine: tuple[str | None, QueryEngine] | None = None
        self.layout: BlockLayout = manifest.layout
        self.c: NDArray[np.float32] = np.array(manifest.sketch.c, np.float32)
        self.segments: list[Segment] = []
        base = 0
        for entry in manifest.segments:
            self.segments.append(Segment(path / "segments" / entry.name, base, entry.rows, self.layout))
            base += entry.rows
        self.n_rows = base
        self.excluded: NDArray[np.bool_] = self._flags() != 0
        self.deleted: NDArray[np.int64] = np.zeros(0, np.int64)
        if manifest.deleted:
            self.deleted = np.load(path / "generations" / generation / DELETED, allow_pickle=False)
            self.excluded[self.deleted] = True

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = False) -> Store:
        """Open the live generation. Checks every file's size and header, and with `verify` its hash. Raises StoreError naming the file."""
        path = Path(path)
        for attempt in range(3):
            generation = current_generation(path)
            try:
                manifest = read_manifest(path, generation)
                check_files(path, manifest, hashes=verify)
                return cls(path, generation, manifest)
            except StoreError:
                if attempt == 2 or current_generation(path) == generation:
                    raise
                continue  # compacted away while it was being opened
        raise AssertionError("unreachable")

    def query(self, *, model: str | None = None, **asked: Any) -> QueryAnswer:
        """Ask one question without a server: store.query(prompt="The capital of Peru is", completion=" Lima", top_k=5).

        asked: the fields of `engine.query.QueryInput` (text; prompt and completion; messages; input_ids; ...) and of `QuerySpec` (top_k, score, direction,
        filter, ...). model: where the store's model is now; it is loaded once and kept. Raises UserError naming the field, ModelError for another model.
        """
        from engine.query import QueryEngine, QueryInput, QuerySpec  # they open stores themselves

        if self._engine is None or model not in (None, self._engine[0]):
            self._engine = (model, QueryEngine.of(self, ModelSettings(model=model) if model else None))
        inputs = {f.name for f in fields(QueryInput)}
        unknown = set(asked) - inputs - {f.name for f in fields(QuerySpec)}
        if unknown:
            raise SettingError(f"query has no field {sorted(unknown)[0]!r}", field=sorted(unknown)[0])
        asked.setdefault("queries", (QueryInput(**{k: v for k, v in asked.items() if k in inputs}),))
        spec = QuerySpec(**{k: v for k, v in asked.items() if k not in inputs})
        return self._engine[1].answer([spec])[0].answers[0]

    def _flags(self) -> NDArray[np.uint8]:
        return np.concatenate([s.column("flags") for s in self.segments]) if self.segments else np.zeros(0, np.uint8)

    @property
    def sketch_dir(self) -> Path:
        """Where the sketcher of queries lies."""
        return self.path / "shared" / "sketch"

    @property
    def full_dir(self) -> Path | None:
        """Where the whole curvature lies, if it was kept."""
        folder = self.path / "shared" / "full"
        return folder if folder.is_dir() else None

    @property
    def recall(self) -> list[dict[str, float]] | None:
        """[{candidates: R, recall: r}, ...] measured on the left-out rows, or None."""
        return (self.manifest.calibration or {}).get("recall")

    def data_settings(self) -> DataSettings:
        """How the stored rows were read and tokenised."""
        return DataSettings(**{name: v for name, v in self.manifest.settings.items() if name in DataSettings.model_fields})

    def model_settings(self, given: ModelSettings | None = None) -> ModelSettings:
        """How to load the store's model: as it was loaded when the store was built, in the same precision; what `given` sets explicitly wins."""
        stored = {name: v for name, v in self.manifest.settings.items() if name in ModelSettings.model_fields}
        stored |= {"model": self.manifest.model.source or None, "dtype": self.manifest.model.dtype, "device": "auto", "threads": 0}
        explicit = {} if given is None else {name: getattr(given, name) for name in given.model_fields_set if name in ModelSettings.model_fields}
        return ModelSettings(**{**stored, **{name: v for name, v in explicit.items() if v is not None}})

    @cached_property
    def metadata(self) -> pa.Table:
        """One column per metadata field, one row per position, over all segments."""
        return metadata_table([s.table for s in self.segments])

    @cached_property
    def ids(self) -> pa.ChunkedArray:
        """Ids by position, mapped."""
        return self._column("id")

    def column(self, name: str) -> NDArray[Any]:
        """A fixed-width column by position: norm_sq, loss, n_tokens, flags, row."""
        return fixed_width(self._column(name)) if self.segments else np.zeros(0, np.uint8)

    def _column(self, name: str) -> pa.ChunkedArray:
        chunks = [c for s in self.segments for c in s.table.column(name).chunks]
        return pa.chunked_array(chunks) if chunks else pa.chunked_array([pa.array([], pa.large_string())])

    def position_of(self, id: str) -> int:
        """Position of a row by its id, deleted ones left out. Raises StoreError (code unknown-id)."""
        for position in self.positions_of([id]).tolist():
            return int(position)
        raise StoreError(f"no row has the id {id[:100]!r}", code="unknown-id", field="id")

    def positions_of(self, ids: Iterable[str]) -> NDArray[np.int64]:
        """Positions of the rows that have one of these ids, deleted ones left out, ascending."""
        wanted = pa.array(sorted(set(ids)), pa.large_string())
        found = fixed_width(pc.indices_nonzero(pc.is_in(self.ids, value_set=wanted))).astype(np.int64)
        return found[~np.isin(found, self.deleted)]

    def rows(self, positions: Sequence[int] | NDArray[np.int64]) -> list[StoredRow]:
        """The rows at these positions, in the order asked for."""
        wanted = np.asarray(positions, np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self.n_rows):
            raise IndexError(f"positions run from 0 to {self.n_rows - 1}")
        found: dict[int, StoredRow] = {}
        for segment in self.segments:
            inside = np.unique(wanted[(wanted >= segment.base) & (wanted < segment.base + segment.n)])
            if len(inside):
                columns = segment.table.take(pa.array(inside - segment.base)).to_pydict()
                found.update((int(p), self._row(int(p), columns, i)) for i, p in enumerate(inside))
        return [found[int(p)] for p in wanted]

    def _row(self, position: int, columns: dict[str, Any], i: int) -> StoredRow:
        ids = np.array(columns["input_ids"][i], np.int64)
        label, labels = columns["label"][i], columns["labels"][i]
        return StoredRow(
            position=position,
            row=columns["row"][i],
            id=columns["id"][i],
            kind=columns["kind"][i],
            text=columns["text"][i],
            metadata=metadata_at(columns, i),
            input_ids=ids,
            labels=label if label is not None else None if labels is None else np.array(labels, np.int64),
            target_mask=mask_of(columns["target_spans"][i], len(ids)),
            truncated=columns["truncated"][i],
            source=self.manifest.data[columns["source"][i]].name if columns["source"][i] < len(self.manifest.data) else "",
            line=columns["line"][i],
            **{name: columns[name][i] for name in SKETCHED},
        )
