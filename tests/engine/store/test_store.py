"""Opening a store, reading rows, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from benchmarks.synthetic_store import synthetic_examples
from engine.errors import StoreError
from engine.store import Store, StoreWriter

MakeStore = Callable[..., Path]


def test_codes_are_the_mapped_index(make_store: MakeStore) -> None:
    path = make_store(100, shard_rows=40)
    store = Store.open(path)
    assert [(s.base, s.n) for s in store.segments] == [(0, 40), (40, 40), (80, 20)]
    for segment in store.segments:
        in_memory = faiss.read_index_binary(str(path / "segments" / segment.name / "codes.faiss"))
        expected = faiss.vector_to_array(in_memory.xb).reshape(segment.n, -1)
        np.testing.assert_array_equal(segment.codes, expected)
        assert not segment.codes.flags.writeable
        distances, _ = segment.index.search(np.ascontiguousarray(segment.codes[:5]), 1)
        np.testing.assert_array_equal(distances[:, 0], 0)
        assert segment.scales.shape == (segment.n, 2) and segment.scales.dtype == np.float16


def test_rows_come_back_as_given(make_store: MakeStore) -> None:
    store = Store.open(make_store(100, shard_rows=40))
    rng = np.random.default_rng(0)
    first = synthetic_examples(rng, range(40))
    rows = store.rows([39, 0, 99, 0])
    assert [r.id for r in rows] == ["row-39", "row-0", "row-99", "row-0"]
    assert rows[0].text == first[39].text
    assert rows[0].metadata == first[39].metadata
    np.testing.assert_array_equal(rows[0].input_ids, first[39].input_ids)
    np.testing.assert_array_equal(rows[0].target_mask, first[39].target_mask)
    assert rows[0].labels is None and rows[0].line == 40
    with pytest.raises(IndexError):
        store.rows([100])


def test_positions_of_ids(make_store: MakeStore) -> None:
    store = Store.open(make_store(100, shard_rows=40))
    assert store.position_of("row-77") == 77
    assert store.positions_of(["row-5", "nobody", "row-81"]).tolist() == [5, 81]
    with pytest.raises(StoreError, match="nobody"):
        store.position_of("nobody")


def test_metadata_is_one_table(make_store: MakeStore) -> None:
    store = Store.open(make_store(100, shard_rows=40))
    assert store.metadata.num_rows == 100
    assert store.metadata.column("year").to_pylist() == [1790 + i for i in range(100)]
    assert store.metadata.column("score").null_count == 20
    assert json.loads(store.metadata.column("tags")[8].as_py()) == ["carbon"]


def test_flagged_rows_are_excluded(make_store: MakeStore) -> None:
    store = Store.open(make_store(200, flagged=0.1))
    assert 0 < store.excluded.sum() < 60
    np.testing.assert_array_equal(store.excluded, store.column("flags") != 0)


@pytest.mark.parametrize("name", ["codes.faiss", "scales.npy", "rows.arrow"])
@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_truncated_or_missing_files_are_refused_by_name(make_store: MakeStore, name: str, harm: str) -> None:
    path = make_store(50)
    file = path / "segments" / "000000" / name
    if harm == "remove":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StoreError, match=f"000000/{name}") as error:
        Store.open(path)
    assert error.value.code == "damaged-store"


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_a_flipped_bit_is_found_when_asked(make_store: MakeStore) -> None:
    path = make_store(50)
    _flip(path / "segments" / "000000" / "codes.faiss")
    Store.open(path)
    with pytest.raises(StoreError, match=r"codes\.faiss: its content differs"):
        Store.open(path, verify=True)


@pytest.mark.parametrize("name", ["generations/000001/manifest.json", "generations/000001/manifest.sha256", "CURRENT"])
def test_a_flipped_bit_in_the_small_files_is_always_found(make_store: MakeStore, name: str) -> None:
    path = make_store(50)
    _flip(path / name)
    with pytest.raises(StoreError, match=r"manifest\.json|CURRENT"):
        Store.open(path)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such store"):
        Store.open(tmp_path / "nothing")
    with pytest.raises(StoreError, match="holds no generation"):
        Store.open(tmp_path)


def test_a_newer_format_is_named(make_store: MakeStore) -> None:
    path = make_store(10)
    with StoreWriter(path) as writer:
        writer.commit(Store.open(path).manifest.model_copy(update={"format_version": 9}))
    with pytest.raises(StoreError, match="format version 9"):
        Store.open(path)


def test_the_second_writer_is_refused(make_store: MakeStore) -> None:
    path = make_store(10)
    with StoreWriter(path), pytest.raises(StoreError, match="is writing this store"):
        StoreWriter(path)
    StoreWriter(path).close()


def test_tombstones_exclude_rows(make_store: MakeStore) -> None:
    path = make_store(100, shard_rows=40)
    with StoreWriter(path) as writer:
        assert writer.commit(Store.open(path).manifest, np.array([3, 50])) == "000002"
    store = Store.open(path, verify=True)
    assert np.flatnonzero(store.excluded).tolist() == [3, 50]
    assert store.positions_of(["row-3", "row-4"]).tolist() == [4]
