"""The loss curve's plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indexer.finetune import plots
from indexer.finetune.plots import plot_curve
from indexer.finetune.progress import read_curve


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    path = tmp_path / "loss.jsonl"
    lines = [json.dumps({"step": s, "loss": 1 / s}) for s in range(1, 5)] + [json.dumps({"step": 4, "eval_loss": 0.3})]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo', encoding="utf-8")
    return path


def test_a_half_written_line_is_dropped(curve: Path) -> None:
    assert [line["step"] for line in read_curve(curve)] == [1, 2, 3, 4, 4]


def test_a_png_is_written(curve: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert plot_curve(curve, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_plotted_without_lines_or_matplotlib(curve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plot_curve(tmp_path / "missing.jsonl", tmp_path / "loss.png")
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert not plot_curve(curve, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
