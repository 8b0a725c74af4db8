"""Metadata as a store can keep it and a response can return it: JSON values, and nothing that JSON cannot say."""

from __future__ import annotations

import datetime
import decimal
import math
from typing import Any

import numpy as np

from engine.data.reading import json_type
from engine.errors import DataError

DEPTH_LIMIT = 32


def clean_metadata(values: dict[str, Any]) -> dict[str, Any]:
    """Dates become ISO text, decimals and array scalars numbers, NaN and infinities null; null fields are left out.

    Raises DataError naming a field that cannot be kept: bytes, lone surrogates, deep nesting.
    """
    return {name: value for name, raw in values.items() if (value := _clean(raw, _key(name), 0)) is not None}


def _clean(value: Any, where: str, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        if not value.isascii():
            _key(value, where)
        return value
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if depth >= DEPTH_LIMIT:
        raise DataError(f"metadata field {where!r} is nested more than {DEPTH_LIMIT} deep", field=where)
    if isinstance(value, dict):
        return {_key(str(k), where): _clean(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_clean(v, where, depth + 1) for v in value]
    raise DataError(f"metadata field {where!r} is {json_type(value)}, which cannot be kept; remove the column", field=where)


def _key(text: str, where: str | None = None) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        name = f"field {where!r}" if where is not None else "name"
        raise DataError(f"metadata {name} has a lone surrogate, which is not valid Unicode", field=where) from None
    return text
