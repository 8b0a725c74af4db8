"""`eogp delete`: tombstones; the rows leave every answer at once, and the disk with `eogp compact`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import DataError, SettingError
from engine.search import compile_filter
from engine.store import Store, StoreWriter
from indexer.job import unfinished_append


def delete(path: Path, *, ids: Sequence[str] = (), where: dict[str, Any] | None = None) -> tuple[str, int]:
    """Delete the rows that have one of the ids or match the filter; (generation, rows deleted now). Raises DataError for an id that no row has."""
    if not ids and where is None:
        raise SettingError("nothing to delete; give --ids or --where", field="ids")
    Store.open(path)
    with StoreWriter(path) as writer:
        unfinished = unfinished_append(path)
        if unfinished:
            raise unfinished
        store = Store.open(path)
        gone = np.zeros(store.n_rows, np.bool_)
        gone[store.deleted] = True
        chosen = np.zeros(store.n_rows, np.bool_)
        if ids:
            positions = store.positions_of(ids)
            if len(positions) < len(set(ids)):
                known = {r.id for r in store.rows(positions)}
                missing = sorted(set(ids) - known)
                raise DataError(f"no row has the id {missing[0][:100]!r}{f' (nor {len(missing) - 1:,} others)' if len(missing) > 1 else ''}", field="ids")
            chosen[positions] = True
        if where is not None:
            chosen |= compile_filter(where, store.metadata, store.ids)
        new = int((chosen & ~gone).sum())
        if not new:
            return store.generation, 0
        return writer.commit(store.manifest, np.flatnonzero(chosen | gone)), new
