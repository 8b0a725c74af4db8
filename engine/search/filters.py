"""Filters on metadata and ids, compiled to one bool per row from Arrow columns.

Grammar: {"field": "kind", "eq": v} | {"field": f, "in": [...]} | {"field": f, "gt"|"gte"|"lt"|"lte": v, ...} | {"field": f, "exists": true}
       | {"and": [...]} | {"or": [...]} | {"not": {...}}; the field "id" is the row's id. A row that lacks the field matches nothing but exists: false and not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from engine.errors import LimitError, UserError

MAX_DEPTH = 32
MAX_CLAUSES = 256
MAX_VALUES = 10_000
_RANGES = {"gt": "greater", "gte": "greater_equal", "lt": "less", "lte": "less_equal"}
_TESTS = {"eq", "in", "exists", *_RANGES}


class FilterError(UserError):
    """A filter that is not of the grammar, or asks for a field that the store lacks."""

    code = "bad-filter"


def compile_filter(condition: Any, table: pa.Table, ids: Sequence[str] | pa.ChunkedArray | pa.Array) -> NDArray[np.bool_]:
    """(N,) bool: which rows match. table: N rows of metadata columns; ids: N ids. Raises FilterError or LimitError naming the clause."""
    check_filter(condition)
    n = len(ids)
    mask = _evaluate(condition, table, ids)
    if len(mask) != n:
        raise ValueError(f"{n} ids but {len(mask)} rows of metadata")
    return mask


def check_filter(condition: Any) -> int:
    """Count the clauses of a filter, refusing what the grammar does not know and what exceeds its limits; needs no store."""
    clauses, stack = 0, [(condition, 1, "filter")]
    while stack:
        node, depth, where = stack.pop()
        clauses += 1
        if clauses > MAX_CLAUSES:
            raise LimitError(f"filter has more than {MAX_CLAUSES} clauses", field="filter")
        if depth > MAX_DEPTH:
            raise LimitError(f"filter is nested deeper than {MAX_DEPTH} levels", field="filter")
        if not isinstance(node, dict) or not node:
            raise FilterError(f"{where} must be an object such as {{'field': 'kind', 'eq': 'speech'}}, not {_short(node)}", field="filter")
        joins = {"and", "or", "not"} & set(node)
        if joins:
            if len(node) != 1:
                raise FilterError(f"{where} has {_short(sorted(map(str, node)))}; and, or, not stand alone in their object", field="filter")
            name = joins.pop()
            inner = node[name]
            if name == "not":
                stack.append((inner, depth + 1, f"{where}.not"))
            elif not isinstance(inner, list) or not inner:
                raise FilterError(f"{where}.{name} must be a list of at least one condition, not {_short(inner)}", field="filter")
            else:
                stack += [(part, depth + 1, f"{where}.{name}[{i}]") for i, part in enumerate(inner[: MAX_CLAUSES + 1])]
            continue
        _check_leaf(node, where)
    return clauses


def _check_leaf(node: dict[str, Any], where: str) -> None:
    field = node.get("field")
    if not isinstance(field, str):
        raise FilterError(f"{where} needs a field name in 'field', or one of and, or, not", field="filter")
    tests = set(node) - {"field"}
    unknown = tests - _TESTS
    if unknown:
        raise FilterError(f"{where}: unknown test {_short(sorted(map(str, unknown))[0])}; known are {', '.join(sorted(_TESTS))}", field="filter")
    if not tests or (len(tests) > 1 and not tests <= set(_RANGES)):
        raise FilterError(f"{where} must have exactly one of eq, in, exists, or a range of gt, gte, lt, lte", field="filter")
    for test in sorted(tests):
        value = node[test]
        if test == "in":
            if not isinstance(value, list):
                raise FilterError(f"{where}.in must be a list, not {_short(value)}", field="filter")
            if len(value) > MAX_VALUES:
                raise LimitError(f"{where}.in has {len(value)} values; at most {MAX_VALUES} are allowed", field="filter")
            for v in value:
                _check_scalar(v, f"{where}.in")
        elif test == "exists":
            if not isinstance(value, bool):
                raise FilterError(f"{where}.exists must be true or false, not {_short(value)}", field="filter")
        else:
            _check_scalar(value, f"{where}.{test}")
            if test != "eq" and isinstance(value, bool):
                raise FilterError(f"{where}.{test} must be a number or a string, not {_short(value)}", field="filter")


def _check_scalar(value: Any, where: str) -> None:
    if not isinstance(value, str | int | float | bool):
        raise FilterError(f"{where} must be a string, number, true or false, not {_short(value)}", field="filter")
    if isinstance(value, float) and not math.isfinite(value):
        raise FilterError(f"{where} must be a finite number", field="filter")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise FilterError(f"{where} must fit in 64 bits", field="filter")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise FilterError(f"{where} holds text that is not valid Unicode (a lone surrogate)", field="filter") from None


def _evaluate(node: dict[str, Any], table: pa.Table, ids: Any) -> NDArray[np.bool_]:
    if "and" in node or "or" in node:
        join = np.logical_and if "and" in node else np.logical_or
        parts = node["and"] if "and" in node else node["or"]
        mask = _evaluate(parts[0], table, ids)
        for part in parts[1:]:
            join(mask, _evaluate(part, table, ids), out=mask)
        return mask
    if "not" in node:
        return ~_evaluate(node["not"], table, ids)
    field = node["field"]
    if field == "id":
        column = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else pa.array(ids, pa.string())
    elif field in table.column_names:
        column = table.column(field)
    else:
        known = ", ".join(["id", *table.column_names][:20])
        raise FilterError(f"filter: this store has no field {_short(field)}; it has {known}", field="filter")
    tests = {t: v for t, v in node.items() if t != "field"}
    masks = [_test(column, field, test, value) for test, value in tests.items()]
    return np.logical_and.reduce(masks) if len(masks) > 1 else masks[0]


def _test(column: Any, field: str, test: str, value: Any) -> NDArray[np.bool_]:
    n = len(column)
    if test == "exists":
        present = np.asarray(column.is_valid())
        return present if value else ~present
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    values = value if test == "in" else [value]
    usable = [v for v in values if _comparable(v, kind)]
    if not usable:
        if test in _RANGES:
            raise FilterError(f"filter: field {_short(field)} holds {kind}, which has no order with {_short(value)}", field="filter")
        return np.zeros(n, np.bool_)  # nothing of another type is equal
    compare = getattr(pc, _RANGES.get(test, "equal"))
    found = pc.is_in(column, value_set=_array(usable, kind)) if test == "in" else compare(_plain(column), _scalar(value, kind))
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False), np.bool_)


def _comparable(value: Any, kind: pa.DataType) -> bool:
    if isinstance(value, bool):
        return bool(pa.types.is_boolean(kind))
    if isinstance(value, str):
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _plain(column: Any) -> Any:
    return pc.cast(column, column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    # numbers of another width or kind meet in a common type
    return pa.scalar(value) if isinstance(value, int | float) and not isinstance(value, bool) else pa.scalar(value, kind)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind):
        values = [int(v) for v in values if float(v).is_integer()]
        return pa.array([v for v in values if _fits(v, kind)], kind)
    return pa.array(values, kind)


def _fits(value: int, kind: pa.DataType) -> bool:
    try:
        pa.scalar(value, kind)
    except (pa.ArrowInvalid, OverflowError):
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
