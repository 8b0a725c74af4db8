"""Rows of several segments under one schema, without changing what any of them says."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from engine.store.rows import FIXED, META, SKETCHED

_SKETCHED = pa.schema([("norm_sq", pa.float32()), ("loss", pa.float32()), ("n_tokens", pa.int32()), ("flags", pa.uint8())])
assert tuple(_SKETCHED.names) == SKETCHED


def common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The fixed columns and every metadata column whose type is the same wherever it occurs; the others move to `extra`."""
    kinds: dict[str, set[pa.DataType]] = {}
    for schema in schemas:
        for field in schema:
            if field.name.startswith(META):
                kinds.setdefault(field.name, set()).add(field.type)
    typed = [pa.field(name, next(iter(kind))) for name, kind in sorted(kinds.items()) if len(kind) == 1]
    return pa.schema([*FIXED, *typed, pa.field("extra", pa.large_string()), *_SKETCHED])


def aligned(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table's rows under `schema`: absent columns null, metadata columns that it lacks as JSON in `extra`."""
    columns = [table.column(f.name) if f.name in table.column_names else pa.nulls(table.num_rows, f.type) for f in schema]
    moved = [name for name in table.column_names if name.startswith(META) and name not in schema.names]
    if moved:
        extra = [json.loads(v) if v else {} for v in table.column("extra").to_pylist()]
        for name in moved:
            for row, value in zip(extra, table.column(name).to_pylist(), strict=True):
                if value is not None:
                    row[name.removeprefix(META)] = value
        columns[schema.names.index("extra")] = pa.array([json.dumps(e, ensure_ascii=False, sort_keys=True) if e else None for e in extra], pa.large_string())
    return pa.table(columns, schema=schema)
