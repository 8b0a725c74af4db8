"""Whole checkpoints, rotation, and the record that a resumed run must match."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import SettingError
from indexer.finetune.checkpoints import RECORD, check_record, checkpoints, rotate, seal, write_json


def make(root: Path, step: int, *, sealed: bool = True) -> Path:
    folder = root / f"checkpoint-{step}"
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * step)
    (folder / "inner" / "state").write_bytes(b"y")
    if sealed:
        seal(folder)
    return folder


def test_only_whole_ones_count_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        make(tmp_path, step)
    make(tmp_path, 200, sealed=False)
    (tmp_path / "checkpoint-x").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    (tmp_path / "checkpoint-100" / "weights").write_bytes(b"short")
    (tmp_path / "checkpoint-9" / "inner" / "state").unlink()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-20"]


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        make(tmp_path, step)
    make(tmp_path, 6, sealed=False)
    rotate(tmp_path, 2, str(tmp_path / "checkpoint-1"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-4", "checkpoint-5"]


def test_a_record_must_match(tmp_path: Path) -> None:
    root = tmp_path / "out" / "checkpoints"
    root.mkdir(parents=True)
    with pytest.raises(SettingError, match="nothing to resume"):
        check_record(root, {"a": 1})
    write_json(root / RECORD, {"a": 1, "b": [1.5, None]})
    check_record(root, {"b": [1.5, None], "a": 1})
    with pytest.raises(SettingError, match="a was 1 and is now 2") as e:
        check_record(root, {"a": 2, "b": [1.5, None]})
    assert e.value.field == "a"
    with pytest.raises(SettingError, match="c was None and is now 3"):
        check_record(root, {"a": 1, "b": [1.5, None], "c": 3})


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    write_json(tmp_path / "a.json", {"x": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
