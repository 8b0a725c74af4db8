"""Rows of the training data to examples, with every bad row counted and named; class names for a classifier."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.data.reading import BadRow, Row, read_rows
from engine.data.settings import DataSettings
from engine.data.tokens import resolve_kind, to_example
from engine.errors import DataError
from engine.example import Example
from engine.model import LoadedModel

MAX_CLASSES = 10_000
LISTED = 20


@dataclass
class Rows:
    """What was read: usable rows, and bad ones with their reasons."""

    good: list[Row] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)


def read(settings: DataSettings) -> Rows:
    """All rows. Raises DataError at the first bad one with --on-error fail, or when every one is bad."""
    rows = Rows()
    for row in read_rows(settings):
        if isinstance(row, Row):
            rows.good.append(row)
        else:
            reject(rows.bad, row, settings)
    if not rows.good:
        raise nothing_usable(rows)
    return rows


def reject(bad: list[BadRow], row: BadRow, settings: DataSettings) -> None:
    if settings.on_error == "fail":
        raise DataError(f"{row.file}:{row.line}: {row.reason}", field="data")
    bad.append(row)


def tokenise(rows: Rows, loaded: LoadedModel, settings: DataSettings) -> list[Example]:
    """Examples of the good rows; rows that cannot be used are added to `rows.bad`. Raises DataError when none is left, naming the first reason."""
    examples: list[Example] = []
    resolved: DataSettings | None = None
    for number, row in enumerate(rows.good):
        try:
            resolved = resolved or resolve_kind(row, loaded, settings)
            examples.append(to_example(row, loaded, resolved, training=True, default_id=str(number)))
        except DataError as e:
            if e.field == "max_length":
                raise
            reject(rows.bad, BadRow(row.file, row.line, e.message), settings)
    if not examples:
        raise nothing_usable(rows)
    return examples


def nothing_usable(rows: Rows) -> DataError:
    first = f"; the first bad row: {rows.bad[0].file}:{rows.bad[0].line}: {rows.bad[0].reason}" if rows.bad else ""
    return DataError(f"the data has no usable row{first}", field="data")


def class_names(rows: Sequence[Row], settings: DataSettings) -> list[str]:
    """Names of the classes in the data: those that occur, sorted, or LABEL_0 ... LABEL_max for numbers. Raises DataError for names mixed with numbers, one class only, or absurdly many."""
    values = [row.values[settings.label_field] for row in rows if settings.label_field in row.values]
    numbers = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
    names = sorted({v for v in values if isinstance(v, str)})
    if numbers and names:
        raise DataError(f"field {settings.label_field!r} has both class numbers and names; use one of them", field="label_field")
    found = [f"LABEL_{i}" for i in range(min(max(numbers), MAX_CLASSES) + 1)] if numbers else names
    if len(found) > MAX_CLASSES:
        raise DataError(f"field {settings.label_field!r} would make more than {MAX_CLASSES:,} classes", field="label_field")
    if len({*numbers}) + len(names) < 2:
        what = f"only the class {(names or numbers)[0]!r}" if values and (names or numbers) else "no usable class"
        raise DataError(f"field {settings.label_field!r} has {what}; a classifier needs two classes or more", field="label_field")
    return found


def check_classes(examples: Sequence[Example]) -> None:
    """Raises DataError when the usable examples have one class only."""
    classes = {e.labels for e in examples if isinstance(e.labels, int)}
    if len(classes) < 2:
        raise DataError(f"the usable rows have only the class {next(iter(classes), None)!r}; a classifier needs two classes or more", field="label_field")


def data_hash(examples: Sequence[Example]) -> str:
    """SHA-256 over token ids, targets and labels, in order."""
    h = hashlib.sha256()
    for e in examples:
        h.update(len(e).to_bytes(8, "little"))
        h.update(e.input_ids.tobytes())
        h.update(e.target_mask.tobytes())
        h.update(e.labels.to_bytes(8, "little", signed=True) if isinstance(e.labels, int) else e.labels.tobytes())
    return h.hexdigest()


def report(rows: Rows, examples: Sequence[Example]) -> dict[str, Any]:
    """Counts, and the first bad rows by line."""
    return {
        "examples": len(examples),
        "truncated": sum(e.truncated for e in examples),
        "tokens": sum(len(e) for e in examples),
        "targets": sum(e.n_targets for e in examples),
        "bad_rows": len(rows.bad),
        "first_bad_rows": [f"{b.file}:{b.line}: {b.reason}" for b in rows.bad[:LISTED]],
    }
