"""Examples to columns and back, metadata under one schema, and merging without changing what rows say."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic_store import synthetic_sketch
from engine.blocks import BlockLayout
from engine.example import Example
from engine.store.merge import aligned, common_schema
from engine.store.rows import add_sketch, examples_of, examples_table, fixed_width, mask_of, metadata_at, metadata_table, spans_of

LAYOUT = BlockLayout(("a", "b"), (12, 5))


def example(i: int, metadata: dict[str, Any], labels: Any = None) -> Example:
    ids = np.arange(i + 1, i + 6)
    mask = np.array([False, True, True, False, True])
    if isinstance(labels, int):
        return Example(f"e{i}", ids, labels, np.zeros(5, np.bool_), f"text {i}", metadata=metadata, kind="classification")
    return Example(f"e{i}", ids, ids if labels is None else np.asarray(labels), mask, f"text {i}", metadata=metadata, truncated=i % 2 == 1)


def table(metadata: list[dict[str, Any]]) -> pa.Table:
    made = examples_table([example(i, m) for i, m in enumerate(metadata)], list(range(len(metadata))), [0] * len(metadata), [1] * len(metadata))
    return add_sketch(made, synthetic_sketch(np.random.default_rng(0), len(metadata), LAYOUT))


def test_examples_come_back(tmp_path: Any) -> None:
    given_examples = [example(0, {"a": 1}), example(1, {}, labels=[9, 2, 7, 4, 8]), example(2, {"a": None, "b": [1, {"c": 2.5}]}, labels=2)]
    back = examples_of(examples_table(given_examples, [0, 1, 2], [0, 0, 0], [1, 2, 3]))
    for a, b in zip(given_examples, back, strict=True):
        assert (a.id, a.text, a.kind, a.truncated) == (b.id, b.text, b.kind, b.truncated)
        np.testing.assert_array_equal(a.input_ids, b.input_ids)
        np.testing.assert_array_equal(a.labels, b.labels)
        np.testing.assert_array_equal(a.target_mask, b.target_mask)
        assert {k: v for k, v in a.metadata.items() if v is not None} == b.metadata


@given(st.lists(st.booleans(), max_size=40))
def test_spans_are_the_runs_of_a_mask(values: list[bool]) -> None:
    mask = np.array(values, np.bool_)
    spans = spans_of(mask)
    np.testing.assert_array_equal(mask_of(spans, len(mask)), mask)
    assert len(spans) % 2 == 0 and all(a < b for a, b in pairwise(spans))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), inner, max_size=3),
    max_leaves=5,
)
rows_of_metadata = st.lists(st.dictionaries(st.sampled_from(["x", "y", "meta.x", "extra", ""]), json_values, max_size=4), min_size=1, max_size=6)


def plain(m: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in m.items() if v is not None}


@settings(max_examples=25, deadline=None)
@given(st.lists(rows_of_metadata, min_size=1, max_size=3))
def test_any_metadata_survives_storing_and_merging(segments: list[list[dict[str, Any]]]) -> None:
    tables = [table(rows) for rows in segments]
    schema = common_schema([t.schema for t in tables])
    merged = pa.concat_tables([aligned(t, schema) for t in tables])
    columns = merged.to_pydict()
    flat = [m for rows in segments for m in rows]
    for i, m in enumerate(flat):
        got = metadata_at(columns, i)
        assert got == plain(m) and {k: type(v) for k, v in got.items()} == {k: type(v) for k, v in plain(m).items()}
    assert metadata_table([merged]).to_pydict() == metadata_table(tables).to_pydict()


def test_metadata_of_unlike_segments_has_one_type() -> None:
    found = metadata_table([table([{"n": 1, "s": "a", "m": 1}]), table([{"n": 2.5, "m": "x"}, {"m": [1]}])])
    assert found.to_pydict() == {"m": ["1", "x", "[1]"], "n": [1.0, 2.5, None], "s": ["a", None, None]}
    assert metadata_table([table([{}, {}])]).num_columns == 0


def test_fixed_width_columns() -> None:
    column = pa.chunked_array([pa.array([1, 2, 3], pa.int32()).slice(1), pa.array([], pa.int32()), pa.array([7], pa.int32())])
    np.testing.assert_array_equal(fixed_width(column), np.array([2, 3, 7], np.int32))
    assert fixed_width(column).dtype == np.int32 and fixed_width(pa.chunked_array([], pa.float32())).shape == (0,)
    with pytest.raises(IndexError):
        fixed_width(column)[3]
