"""Filters against a loop over Python dictionaries, and everything that a filter may not be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import LimitError
from engine.search import FilterError, check_filter, compile_filter
from engine.search.filters import MAX_CLAUSES, MAX_DEPTH, MAX_VALUES

ROWS: list[dict[str, Any]] = [
    {"kind": "fact", "year": 1900, "weight": 0.5, "good": True},
    {"kind": "speech", "year": 1950, "weight": 2.0, "good": False},
    {"kind": "fact", "year": None, "weight": None, "good": None},
    {"kind": None, "year": 2000, "weight": 2.0, "good": True},
    {"kind": "Ünïcode", "year": -5, "weight": -1.5, "good": False},
]
IDS = [f"row-{i}" for i in range(len(ROWS))]


def table(kind_type: Any = None) -> pa.Table:
    types = {"kind": kind_type or pa.string(), "year": pa.int64(), "weight": pa.float64(), "good": pa.bool_()}
    return pa.table({name: pa.array([r[name] for r in ROWS], t) for name, t in types.items()})


def holds(condition: dict[str, Any], i: int) -> bool:
    if "and" in condition:
        return all(holds(c, i) for c in condition["and"])
    if "or" in condition:
        return any(holds(c, i) for c in condition["or"])
    if "not" in condition:
        return not holds(condition["not"], i)
    value = IDS[i] if condition["field"] == "id" else ROWS[i][condition["field"]]
    if "exists" in condition:
        return (value is not None) == condition["exists"]
    if value is None:
        return False

    def same(v: Any) -> bool:
        return isinstance(v, bool) == isinstance(value, bool) and v == value

    tests = {
        "eq": lambda v: same(v),
        "in": lambda v: any(same(x) for x in v),
        "gt": lambda v: value > v,
        "gte": lambda v: value >= v,
        "lt": lambda v: value < v,
        "lte": lambda v: value <= v,
    }
    return all(tests[name](v) for name, v in condition.items() if name != "field")


texts = st.sampled_from(["fact", "speech", "Ünïcode", "nothing", "row-1"])
numbers = st.one_of(st.integers(-10, 2100), st.floats(-10, 2100), st.sampled_from([1900, 1950.0, 2.0, 2, -1.5]))
values = st.one_of(texts, numbers, st.booleans())
fields = st.sampled_from(["kind", "year", "weight", "good", "id"])
leaves = st.one_of(
    st.builds(lambda f, v: {"field": f, "eq": v}, fields, values),
    st.builds(lambda f, v: {"field": f, "in": v}, fields, st.lists(values, max_size=4)),
    st.builds(lambda f, v: {"field": f, "exists": v}, fields, st.booleans()),
    st.builds(
        lambda f, t: {"field": f, **t}, st.sampled_from(["year", "weight"]), st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), numbers, min_size=1)
    ),
    st.builds(lambda f, t: {"field": f, **t}, st.sampled_from(["kind", "id"]), st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), texts, min_size=1)),
)
conditions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda c: {"and": c}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda c: {"or": c}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda c: {"not": c}, inner),
    ),
    max_leaves=6,
)


@given(conditions)
@settings(max_examples=200, deadline=None)
def test_filters_equal_a_loop(condition: dict[str, Any]) -> None:
    expected = [holds(condition, i) for i in range(len(ROWS))]
    assert compile_filter(condition, table(), IDS).tolist() == expected
    assert compile_filter(condition, table(pa.large_string()), pa.chunked_array([pa.array(IDS, pa.large_string())])).tolist() == expected


def test_dictionary_columns_behave_like_their_values() -> None:
    coded = table().set_column(0, "kind", table()["kind"].dictionary_encode())
    for condition in (
        {"field": "kind", "eq": "fact"},
        {"field": "kind", "in": ["fact", "speech"]},
        {"field": "kind", "gt": "g"},
        {"field": "kind", "exists": False},
    ):
        assert compile_filter(condition, coded, IDS).tolist() == [holds(condition, i) for i in range(len(ROWS))]


def test_no_rows_and_no_metadata() -> None:
    assert compile_filter({"field": "id", "eq": "a"}, pa.table({}), []).tolist() == []
    assert compile_filter({"field": "id", "in": ["row-2"]}, pa.table({}), IDS).tolist() == [False, False, True, False, False]
    with pytest.raises(FilterError, match="no field 'kind'; it has id"):
        compile_filter({"field": "kind", "eq": "a"}, pa.table({}), IDS)


def test_whole_numbers_keep_all_their_digits() -> None:
    big = pa.table({"n": pa.array([2**62, 2**62 + 1], pa.int64())})
    assert compile_filter({"field": "n", "eq": 2**62 + 1}, big, ["a", "b"]).tolist() == [False, True]
    assert compile_filter({"field": "n", "in": [2**62]}, big, ["a", "b"]).tolist() == [True, False]
    small = pa.table({"n": pa.array([1, 2], pa.int8())})
    assert compile_filter({"field": "n", "lt": 10**12}, small, ["a", "b"]).tolist() == [True, True]
    assert compile_filter({"field": "n", "in": [10**12, 1]}, small, ["a", "b"]).tolist() == [True, False]


@pytest.mark.parametrize(
    "condition",
    [
        None,
        [],
        {},
        "kind",
        {"field": "kind"},
        {"field": 3, "eq": 1},
        {"eq": 1},
        {"field": "kind", "eq": None},
        {"field": "kind", "eq": [1]},
        {"field": "kind", "eq": {"a": 1}},
        {"field": "kind", "eq": float("nan")},
        {"field": "kind", "eq": 10**30},
        {"field": "kind", "eq": "\ud800"},
        {"field": "kind", "like": "f%"},
        {"field": "kind", "in": "fact"},
        {"field": "kind", "in": [None]},
        {"field": "kind", "exists": 1},
        {"field": "kind", "eq": "a", "gt": "b"},
        {"field": "kind", "gt": True},
        {"and": []},
        {"and": {"field": "kind", "eq": "a"}},
        {"not": [{"field": "kind", "eq": "a"}]},
        {"and": [{"field": "kind", "eq": "a"}], "or": [{"field": "kind", "eq": "a"}]},
        {"or": [{"field": "kind", "eq": "a"}, 3]},
        {"field": "kind", "gt": 3},
        {"field": "year", "lt": "a"},
        {"field": "nothing", "eq": 1},
    ],
)
def test_what_is_not_a_filter_is_refused(condition: Any) -> None:
    with pytest.raises(FilterError) as raised:
        compile_filter(condition, table(), IDS)
    assert raised.value.field == "filter"
    assert len(raised.value.message) < 300


def test_limits() -> None:
    leaf = {"field": "kind", "eq": "a"}
    deep: dict[str, Any] = leaf
    for _ in range(MAX_DEPTH - 1):
        deep = {"not": deep}
    assert check_filter(deep) == MAX_DEPTH
    for wrong, message in (
        ({"not": deep}, "deeper than"),
        ({"and": [leaf] * MAX_CLAUSES}, "more than"),
        ({"and": [leaf] * 10**6}, "more than"),
        ({"field": "kind", "in": ["a"] * (MAX_VALUES + 1)}, "at most"),
    ):
        with pytest.raises(LimitError, match=message):
            check_filter(wrong)
    assert compile_filter({"field": "kind", "in": ["fact"] * MAX_VALUES}, table(), IDS).tolist() == [True, False, True, False, False]


def test_a_result_that_can_be_changed_is_the_callers_own() -> None:
    ids = pa.array(IDS)
    mask = compile_filter({"field": "id", "exists": True}, table(), ids)
    mask &= np.arange(len(IDS)) > 2
    assert compile_filter({"field": "id", "exists": True}, table(), ids).all()
