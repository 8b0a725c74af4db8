"""The commands `eogp finetune` and `eogp run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import SettingError
from indexer.finetune_cli import app


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"Row {i} of the data."}) + "\n" for i in range(12)), encoding="utf-8")
    return path


def test_finetune_takes_flags(tmp_path: Path, data: Path) -> None:
    flags = ["--new", "gpt2", "--layers", "1", "--width", "8", "--heads", "2", "--vocabulary", "280", "--epochs", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, ["finetune", str(tmp_path / "out"), "--data", str(data), *flags])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_layer"] == 1
    assert json.loads((tmp_path / "out" / "finetune.json").read_text())["setting epochs"] == 1.0


def test_mistakes_name_the_flag(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["finetune", str(tmp_path / "out"), "--data", str(data), "--new", "gpt2", "--epochs", "0"])
    assert isinstance(done.exception, SettingError) and "--epochs" in done.exception.message and done.exception.exit_code == 2
    monkeypatch.setenv("EOGP_WARMUP", "2")
    done = CliRunner().invoke(app, ["finetune", str(tmp_path / "out"), "--data", str(data), "--new", "gpt2"])
    assert isinstance(done.exception, SettingError) and "EOGP_WARMUP" in done.exception.message
    assert not (tmp_path / "out").exists()


def test_run_needs_its_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", str(tmp_path / "none.yaml")])
    assert isinstance(done.exception, SettingError) and "does not exist" in done.exception.message
