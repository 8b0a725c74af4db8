"""Ids must be unique in a store: 64-bit hashes of the ids seen so far, with where each was."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import DataError
from engine.store import Store

_LINE_BITS = 48


class KnownIds:
    """About 100 bytes per id. `store`: ids that an append must not repeat, deleted rows' ids left free."""

    def __init__(self, store: Store | None = None) -> None:
        self._where: dict[int, int] = {}
        self._store = store
        self._stored: set[int] | None = None

    def add(self, id: str, source: int, line: int) -> None:
        self._where[hash(id)] = source << _LINE_BITS | line

    def add_all(self, ids: Sequence[str], sources: Sequence[int], lines: Sequence[int]) -> None:
        for id, source, line in zip(ids, sources, lines, strict=True):
            self.add(id, source, line)

    def check(self, id: str, names: Sequence[str], first_source: int) -> None:
        """Raises DataError naming the row that has the id already."""
        where = self._where.get(hash(id))
        if where is not None:
            source, line = where >> _LINE_BITS, where & ((1 << _LINE_BITS) - 1)
            raise DataError(f"its id is that of {names[source - first_source]}:{line}", field="id")
        if self._store is not None and self._store.n_rows:
            self._check_store(id)

    def _check_store(self, id: str) -> None:
        assert self._store is not None
        if self._stored is None:
            self._stored = {h for segment in self._store.segments for h in map(hash, segment.table.column("id").to_pylist())}
        if hash(id) not in self._stored:
            return
        for position in self._store.positions_of([id]).tolist():  # none where the row was deleted, which leaves its id free
            row = self._store.rows([position])[0]
            raise DataError(f"its id is that of {row.source or 'a row'}:{row.line} in the store", field="id")
