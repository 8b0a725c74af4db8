"""Examples as Arrow columns and back: the part of a segment that holds text, tokens and metadata.

Columns: row (running number), id, kind, text, input_ids, target_spans (flat [start, end) token pairs), labels (null where equal to input_ids),
label (class, or null), truncated, source (position in the manifest's data) and line, one `meta.NAME` per metadata field whose values share one type, one
`json.NAME` (JSON text) per field of lists and objects, and `extra`: a JSON object of what fits no such column. A sketched segment adds norm_sq, loss, n_tokens and flags.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.example import Example
from engine.signs import Sketch

META, NESTED = "meta.", "json."
_INT64 = range(-(2**63), 2**63)
FIXED = pa.schema(
    [
        ("row", pa.int64()),
        ("id", pa.large_string()),
        ("kind", pa.string()),
        ("text", pa.large_string()),
        ("input_ids", pa.large_list(pa.int32())),
        ("target_spans", pa.large_list(pa.int32())),
        ("labels", pa.large_list(pa.int32())),
        ("label", pa.int32()),
        ("truncated", pa.bool_()),
        ("source", pa.int32()),
        ("line", pa.int64()),
    ]
)
SKETCHED = ("norm_sq", "loss", "n_tokens", "flags")


def fixed_width(column: pa.ChunkedArray | pa.Array) -> NDArray[Any]:
    """A column of numbers without nulls as an array, not copied where it is one chunk. (Arrow's own conversion imports pandas.)"""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.frombuffer(c.buffers()[1], column.type.to_pandas_dtype(), len(c), c.offset * column.type.bit_width // 8) for c in chunks if len(c)]
    if not parts:
        return np.zeros(0, column.type.to_pandas_dtype())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def spans_of(mask: NDArray[np.bool_]) -> list[int]:
    """Runs of a target mask (T,) as flat [start, end) pairs."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [int(e) for e in edges]


def mask_of(spans: Sequence[int], length: int) -> NDArray[np.bool_]:
    """Inverse of `spans_of`."""
    mask = np.zeros(length, np.bool_)
    for start, end in zip(spans[::2], spans[1::2], strict=True):
        mask[start:end] = True
    return mask


def examples_table(examples: Sequence[Example], rows: Sequence[int], sources: Sequence[int], lines: Sequence[int]) -> pa.Table:
    """The columns of some examples; rows, sources and lines say their running numbers and where they came from."""
    labels = [None if isinstance(e.labels, int) or np.array_equal(e.labels, e.input_ids) else e.labels for e in examples]
    columns = {
        "row": rows,
        "id": [e.id for e in examples],
        "kind": [e.kind for e in examples],
        "text": [e.text for e in examples],
        "input_ids": [e.input_ids.astype(np.int32) for e in examples],
        "target_spans": [spans_of(e.target_mask) for e in examples],
        "labels": [None if x is None else x.astype(np.int32) for x in labels],
        "label": [e.labels if isinstance(e.labels, int) else None for e in examples],
        "truncated": [e.truncated for e in examples],
        "source": sources,
        "line": lines,
    }
    arrays = [pa.array(columns[f.name], f.type) for f in FIXED]
    names, metadata = metadata_columns([e.metadata for e in examples])
    return pa.table(arrays + metadata, names=[*FIXED.names, *names])


def metadata_columns(metadata: Sequence[dict[str, Any]]) -> tuple[list[str], list[pa.Array]]:
    """One typed column per field whose values share a type, JSON text for lists and objects, both sorted by name; everything else in `extra`."""
    extra: list[dict[str, Any]] = [{} for _ in metadata]
    names, arrays = [], []
    for name in sorted({k for m in metadata for k in m}):
        values = [m.get(name) for m in metadata]
        present = [v for v in values if v is not None]
        if not present:
            continue
        kind = _column_type(present)
        if kind is None and all(isinstance(v, list | dict) for v in present):
            names.append(NESTED + name)
            arrays.append(pa.array([None if v is None else as_json(v) for v in values], pa.large_string()))
            continue
        if kind is None:
            for into, value in zip(extra, values, strict=True):
                if value is not None:
                    into[name] = value
            continue
        names.append(META + name)
        arrays.append(pa.array(values, kind))
    names.append("extra")
    arrays.append(pa.array([as_json(e) if e else None for e in extra], pa.large_string()))
    return names, arrays


def as_json(value: Any) -> str:
    """JSON text, the same for equal values."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _column_type(values: list[Any]) -> pa.DataType | None:
    kinds = {type(v) for v in values}
    if kinds == {str}:
        return pa.large_string()
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int} and all(v in _INT64 for v in values):
        return pa.int64()
    if kinds == {float}:
        return pa.float64()
    return None


def add_sketch(table: pa.Table, sketch: Sketch) -> pa.Table:
    """The example columns with norm_sq, loss, n_tokens and flags."""
    for name in SKETCHED:
        table = table.append_column(name, pa.array(getattr(sketch, name)))
    return table


def example_at(columns: dict[str, Any], i: int) -> Example:
    """The i-th of some rows given as lists (`Table.to_pydict`), without character offsets, which are not kept."""
    ids = np.array(columns["input_ids"][i], np.int64)
    label, labels = columns["label"][i], columns["labels"][i]
    return Example(
        id=columns["id"][i],
        input_ids=ids,
        labels=int(label) if label is not None else ids if labels is None else np.array(labels, np.int64),
        target_mask=mask_of(columns["target_spans"][i], len(ids)),
        text=columns["text"][i],
        metadata=metadata_at(columns, i),
        truncated=columns["truncated"][i],
        kind=columns["kind"][i],
    )


def examples_of(table: pa.Table) -> list[Example]:
    """All rows of a table as examples."""
    columns = table.to_pydict()
    return [example_at(columns, i) for i in range(table.num_rows)]


def metadata_at(columns: dict[str, Any], i: int) -> dict[str, Any]:
    """The i-th row's metadata as it was given, nulls left out."""
    found = {name.removeprefix(META): values[i] for name, values in columns.items() if name.startswith(META) and values[i] is not None}
    found |= {name.removeprefix(NESTED): json.loads(values[i]) for name, values in columns.items() if name.startswith(NESTED) and values[i] is not None}
    extra = columns["extra"][i]
    return {**found, **json.loads(extra)} if extra else found


def metadata_table(tables: Iterable[pa.Table]) -> pa.Table:
    """Metadata of several tables under one schema, without the `meta.` prefix.

    A field that is an integer here and a float there becomes a float; any other mixture becomes text (JSON for what is not text).
    """
    parts = [(t.num_rows, _plain_columns(t)) for t in tables]
    merged = {name: _merged([(n, columns.get(name)) for n, columns in parts]) for name in sorted({name for _, columns in parts for name in columns})}
    if not merged:
        return pa.table({"": pa.nulls(sum(n for n, _ in parts))}).select([])
    return pa.table(merged)


def _plain_columns(table: pa.Table) -> dict[str, pa.ChunkedArray | list[Any]]:
    """Typed columns as they are, fields of `extra` as lists."""
    columns: dict[str, pa.ChunkedArray | list[Any]] = {}
    for prefix in (META, NESTED):
        columns |= {name.removeprefix(prefix): table.column(name) for name in table.column_names if name.startswith(prefix)}
    extra = table.column("extra")
    if extra.null_count < len(extra):
        parsed = [json.loads(v) if v else {} for v in extra.to_pylist()]
        for name in {k for e in parsed for k in e}:
            typed = _values(table, name) if name in columns else [None] * len(parsed)
            columns[name] = [e.get(name, v) for e, v in zip(parsed, typed, strict=True)]
    return columns


def _values(table: pa.Table, name: str) -> list[Any]:
    """A field's values from its own column."""
    if META + name in table.column_names:
        return list(table.column(META + name).to_pylist())
    return [None if v is None else json.loads(v) for v in table.column(NESTED + name).to_pylist()]


def _merged(parts: list[tuple[int, pa.ChunkedArray | list[Any] | None]]) -> pa.ChunkedArray:
    kinds = {_kind(column) for _, column in parts if column is not None}
    kind = kinds.pop() if len(kinds) == 1 else pa.float64() if kinds <= {pa.int64(), pa.float64()} else None
    chunks: list[pa.Array] = []
    for n, column in parts:
        if column is None:
            chunks.append(pa.nulls(n, kind or pa.large_string()))
        elif kind is None:
            values = column if isinstance(column, list) else column.to_pylist()
            chunks.append(pa.array([_as_text(v) for v in values], pa.large_string()))
        elif isinstance(column, list):
            chunks.append(pa.array([float(v) if v is not None and kind == pa.float64() else v for v in column], kind))
        else:
            chunks += [c if c.type == kind else c.cast(kind, safe=False) for c in column.chunks]
    return pa.chunked_array(chunks, kind or pa.large_string())


def _kind(column: pa.ChunkedArray | list[Any]) -> pa.DataType | None:
    """The one type of a column's values, or None where only text can hold them."""
    if not isinstance(column, list):
        return column.type
    present = [v for v in column if v is not None]
    numbers = all(type(v) in (int, float) for v in present)
    return _column_type(present) or (pa.float64() if numbers else None)


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else as_json(value)
