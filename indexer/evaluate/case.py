"""What is evaluated: a store, its model, its rows as examples, and held-out queries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.curvature import Curvature
from engine.data.reading import BadRow, read_rows
from engine.data.tokens import resolve_kind, to_example
from engine.errors import DataError, SettingError, StoreError
from engine.example import Example, Kind
from engine.query import QueryEngine
from engine.store.store import StoredRow
from indexer.evaluate.settings import EvaluateSettings


@dataclass
class Case:
    """engine: the opened store with its model; positions (N,): rows that take part, in order; examples and queries as the model sees them."""

    engine: QueryEngine
    positions: NDArray[np.int64]
    examples: list[Example]
    queries: list[Example]

    def curvature(self) -> Curvature:
        """The whole curvature. Raises StoreError where the store does not keep it."""
        folder = self.engine.store.full_dir
        if folder is None:
            raise StoreError(
                f"{self.engine.store.path} keeps no full curvature, which fidelity and ek-fac need; index with --keep-curvature", code="no-curvature"
            )
        return Curvature.load(folder)


def as_example(row: StoredRow) -> Example:
    """A stored row as the example that was indexed."""
    labels = row.input_ids if row.labels is None else row.labels
    kind: Kind = row.kind  # type: ignore[assignment]  # a Kind by the store's schema, a str by its column
    return Example(row.id, row.input_ids, labels, row.target_mask, row.text, metadata=row.metadata, truncated=row.truncated, kind=kind)


def read_queries(engine: QueryEngine, settings: EvaluateSettings) -> list[Example]:
    """The first `max_queries` queries, tokenised like a query of the service. Raises DataError at a bad row: a silently smaller set would mislead."""
    if not settings.queries:
        raise SettingError("name a file of held-out queries with --queries", field="queries")
    data = engine.data.model_copy(update={"data": settings.queries})
    found: list[Example] = []
    resolved = None
    for row in read_rows(data):
        if isinstance(row, BadRow):
            raise DataError(f"{row.file}:{row.line}: {row.reason}", field="queries")
        resolved = resolved or resolve_kind(row, engine.loaded, data)
        found.append(to_example(row, engine.loaded, resolved, training=False, default_id=str(len(found))))
        if len(found) == settings.max_queries:
            break
    if not found:
        raise DataError(f"{', '.join(settings.queries)}: no query", field="queries")
    return found


def open_case(engine: QueryEngine, settings: EvaluateSettings) -> Case:
    """All rows of the store that are neither deleted nor flagged, and the queries."""
    positions = np.flatnonzero(~engine.store.excluded)
    if len(positions) < 2:
        raise StoreError(f"{engine.store.path} has {len(positions)} usable rows; at least 2 are needed")
    return Case(engine, positions, [as_example(row) for row in engine.store.rows(positions)], read_queries(engine, settings))
