"""`eogp run`: one file for both parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.errors import SettingError
from engine.store import Store
from indexer.finetune.both import parse, run

SENTENCES = [f"The {a} {b} sees a {c}." for a in ("red", "old", "big", "sad") for b in ("cat", "dog", "cow") for c in ("bird", "fish")]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in SENTENCES), encoding="utf-8")
    training = {"new": "gpt2", "layers": 1, "width": 16, "heads": 2, "vocabulary": 290, "context": 32, "epochs": 1, "batch-size": 8}
    return {
        "out": str(tmp_path / "model"), "store": str(tmp_path / "store"), "data": str(data), "seed": 3, "device": "cpu",
        "finetune": training, "index": {"bytes_per_example": 16},
    }  # fmt: skip


def write(tmp_path: Path, config: dict[str, Any]) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_shared_settings_reach_both(tmp_path: Path, config: dict[str, Any]) -> None:
    out, store, training, indexing = parse(write(tmp_path, config))
    assert (out, store) == (tmp_path / "model", tmp_path / "store")
    assert training.data == indexing.data == [config["data"]]
    assert training.seed == indexing.seed == 3
    assert training.batch_size == 8 and indexing.bytes_per_example == 16 and indexing.model == config["out"]


def test_adapters_that_were_not_merged_are_what_is_indexed(tmp_path: Path, config: dict[str, Any]) -> None:
    config["finetune"] = {"model": "base", "method": "lora", "merge": False}
    indexing = parse(write(tmp_path, config))[3]
    assert indexing.model == "base" and indexing.adapters == str(tmp_path / "model" / "adapters")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": None}, "'out' must name a folder"),
        ({"epochs": 2}, "'epochs' is not a setting that both parts know"),
        ({"model": "x"}, "'model' belongs under finetune: alone"),
        ({"index": {"model": "x"}}, "'model' belongs under finetune: alone"),
        ({"index": {"no_such": 1}}, "unknown setting 'no_such'"),
        ({"finetune": 3}, "'finetune' must be a mapping"),
        ({"finetune": {"epochs": -1}}, "epochs in .*greater than 0"),
        ({"index": {"bytes_per_example": 0}}, "bytes_per_example in .*greater than or equal"),
    ],
)
def test_mistakes_are_found_before_work_starts(tmp_path: Path, config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        run(write(tmp_path, config | change))
    assert not (tmp_path / "model").exists() and not (tmp_path / "store").exists()


def test_training_and_indexing_in_one_go(tmp_path: Path, config: dict[str, Any]) -> None:
    path = write(tmp_path, config)
    run(path)
    store = Store.open(Path(config["store"]))
    assert store.n_rows == len(SENTENCES)
    trained = json.loads((tmp_path / "model" / "finetune.json").read_text())
    linked = json.loads(store.manifest.model_dump_json())["training_run"]
    assert trained["data"] in json.dumps(linked)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    run(path)  # both are finished: nothing is done twice
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    config["finetune"]["epochs"] = 2
    with pytest.raises(SettingError, match="was trained with epochs 1"):
        run(write(tmp_path, config))
