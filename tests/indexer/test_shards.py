"""The sketching stage: a full disk, flagged rows, and the model at work while the disk is."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import engine.store.writer
import indexer.shards
from engine.errors import StoreError
from engine.signs import FLAG_NONFINITE, Sketch
from engine.sketcher import Sketcher
from engine.store import Store
from engine.store.rows import examples_of
from indexer.append import append
from indexer.index import index
from indexer.settings import AppendSettings, IndexSettings

from .conftest import corpus, write_jsonl  # type: ignore[import-not-found]  # a fixture module, resolved by pytest

Make = Callable[..., IndexSettings]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The disk is full from the `after`-th segment on, half-way through writing it."""
    whole, calls = engine.store.writer.write_segment, iter(range(10**6))

    def write(folder: Path, *rest: Any) -> None:
        if next(calls) >= after:
            (folder / "codes.faiss").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(folder, *rest)

    monkeypatch.setattr(engine.store.writer, "write_segment", write)


def test_a_full_disk_is_said_and_the_run_goes_on_later(
    built: Path, tmp_path: Path, index_settings: Make, monkeypatch: pytest.MonkeyPatch, store_content: Callable[[Path], dict[str, bytes]]
) -> None:
    settings = index_settings(built.parent / "data.jsonl")
    with monkeypatch.context() as full:
        fill_the_disk(full, 2)
        with pytest.raises(StoreError, match=r"the disk is full \(.* MB free\).*run the same command again") as error:
            index(tmp_path / "store", settings)
    assert error.value.code == "disk-full" and error.value.exit_code == 2
    assert sorted(p.name for p in (tmp_path / "store" / "segments").iterdir()) == ["000000", "000001"]
    index(tmp_path / "store", settings)
    assert store_content(tmp_path / "store") == store_content(built)


def test_a_store_still_opens_when_the_disk_fills_under_an_append(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Path(shutil.copytree(built, tmp_path / "store"))
    data = write_jsonl(tmp_path / "more.jsonl", corpus(40))
    settings = AppendSettings(data=[str(data)], shard_rows=16, log_json=True, threads=1)
    with monkeypatch.context() as full:
        fill_the_disk(full, 1)
        with pytest.raises(StoreError, match="the disk is full"):
            append(store, settings)
    assert Store.open(store, verify=True).n_rows == 80
    append(store, settings)
    assert Store.open(store, verify=True).n_rows == 120


def test_flagged_rows_are_counted_and_left_out(tmp_path: Path, index_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sketch = Sketcher.sketch

    def overflowing(self: Sketcher, examples: Any, rows: Any, progress: Any = None) -> Sketch:
        found = sketch(self, examples, rows, progress)
        for i, example in enumerate(examples):
            if "number 37 " in example.text:
                found.codes[i], found.scales[i], found.norm_sq[i], found.flags[i] = 0, 0, 0, FLAG_NONFINITE
        return found

    monkeypatch.setattr(Sketcher, "sketch", overflowing)
    report = index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", corpus(40))))
    assert report["counts"]["flagged"] == {"non-finite gradient": 1}
    store = Store.open(tmp_path / "store")
    assert np.flatnonzero(store.excluded).tolist() == [1] and store.manifest.flagged == {"1": "non-finite gradient"}
    assert store.rows([1])[0].text.startswith("The Peru of number 37 ")


def test_reading_and_writing_overlap_with_the_model(tmp_path: Path, index_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With reads, writes and the model each slowed by 50 ms per shard the stage takes the model's time, not the sum; the disk's work is never the model's thread's."""
    threads: dict[str, set[int]] = {"read": set(), "write": set(), "model": set()}
    slow = 0.05
    write, sketch = engine.store.writer.write_segment, Sketcher.sketch

    def wait(kind: str) -> None:
        threads[kind].add(threading.get_ident())
        time.sleep(slow)

    def slow_write(*args: Any) -> None:
        wait("write")
        write(*args)

    def slow_sketch(self: Sketcher, *args: Any) -> Sketch:
        wait("model")
        return sketch(self, *args)

    def slow_read(table: pa.Table) -> Any:
        wait("read")
        return examples_of(table)

    monkeypatch.setattr(engine.store.writer, "write_segment", slow_write)
    monkeypatch.setattr(Sketcher, "sketch", slow_sketch)
    monkeypatch.setattr(indexer.shards, "examples_of", slow_read)
    report = index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", corpus(128)), shard_rows=8))
    assert threads["model"] == {threading.get_ident()} and len(threads["read"]) == len(threads["write"]) == 1
    assert len(threads["read"] | threads["write"] | threads["model"]) == 3
    assert report["busy_share"] > 0.6  # one shard's reading at the start and one's writing at the end cannot overlap
