"""Rows of several segments under one schema, without changing what any of them says."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from engine.store.rows import FIXED, META, NESTED, SKETCHED, as_json

_SKETCHED = pa.schema([("norm_sq", pa.float32()), ("loss", pa.float32()), ("n_tokens", pa.int32()), ("flags", pa.uint8())])
assert tuple(_SKETCHED.names) == SKETCHED


def common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The fixed columns and every metadata column that has one type, and is not both values and JSON; the other fields move to `extra`."""
    kinds: dict[str, set[tuple[str, pa.DataType]]] = {}
    for schema in schemas:
        for field in schema:
            if field.name.startswith((META, NESTED)):
                prefix = META if field.name.startswith(META) else NESTED
                kinds.setdefault(field.name.removeprefix(prefix), set()).add((prefix, field.type))
    one = {name: next(iter(kind)) for name, kind in kinds.items() if len(kind) == 1}
    kept = [pa.field(prefix + name, kind) for name, (prefix, kind) in sorted(one.items())]
    return pa.schema([*FIXED, *kept, pa.field("extra", pa.large_string()), *_SKETCHED])


def aligned(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table's rows under `schema`: absent columns null, metadata columns that it lacks in `extra`."""
    columns = [table.column(f.name) if f.name in table.column_names else pa.nulls(table.num_rows, f.type) for f in schema]
    moved = [name for name in table.column_names if name.startswith((META, NESTED)) and name not in schema.names]
    if moved:
        extra = [json.loads(v) if v else {} for v in table.column("extra").to_pylist()]
        for name in moved:
            for row, value in zip(extra, table.column(name).to_pylist(), strict=True):
                if value is not None:
                    nested = name.startswith(NESTED)
                    row[name.removeprefix(NESTED if nested else META)] = json.loads(value) if nested else value
        columns[schema.names.index("extra")] = pa.array([as_json(e) if e else None for e in extra], pa.large_string())
    return pa.table(columns, schema=schema)
