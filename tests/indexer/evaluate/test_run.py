"""`eogp evaluate` from the command line on a tiny store: every metric once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.cli import build
from engine.errors import SettingError
from indexer.evaluate import measure, metrics, report
from indexer.evaluate.retrain import Retrainer
from indexer.evaluate.run import evaluate
from indexer.evaluate.scores import MethodScores
from indexer.evaluate.settings import EvaluateSettings


class FakeRetrainer:
    """A world where each example lowers each query's loss by its effect."""

    def __init__(self, effect: np.ndarray) -> None:
        self.effect = effect
        self.examples = list(range(effect.shape[1]))

    def losses(self, members: np.ndarray, seed: int) -> np.ndarray:
        return (100 - self.effect[:, members].sum(1)).astype(np.float32)


@pytest.fixture
def effect() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((5, 40))


def test_lds_and_ceiling_in_an_additive_world(effect: np.ndarray) -> None:
    scores = {"right": MethodScores(effect, 1), "wrong": MethodScores(-effect, 1)}
    retrainer: Any = FakeRetrainer(effect)
    figures, about = measure.lds(scores, retrainer, EvaluateSettings(subsets=12, second_seed_subsets=4, bootstrap=100))
    assert figures["right"]["lds"][0] == pytest.approx(1.0) and figures["wrong"]["lds"][0] == pytest.approx(-1.0)
    assert about == {"subsets": 12, "second_seed_subsets": 4, "ceiling": pytest.approx(1.0)}


def test_removal_in_an_additive_world(effect: np.ndarray) -> None:
    """Without the top 10 % (4 of 40) a query's loss rises by the sum of their effects."""
    scores = {"right": MethodScores(effect, 1), "reversed": MethodScores(-effect, 1)}
    retrainer: Any = FakeRetrainer(effect)
    found = measure.removal(scores, retrainer, EvaluateSettings(removal_shares=[0.1]), metrics.resamples(3, 100))
    expected = np.mean([np.sort(effect[q])[-4:].sum() for q in range(3)])
    assert found["right"]["qld 10%"][0] == pytest.approx(expected, abs=1e-4)
    assert found["reversed"]["qld 10%"][0] == pytest.approx(np.mean([np.sort(effect[q])[:4].sum() for q in range(3)]), abs=1e-4)


def test_subsets_hold_half_and_differ() -> None:
    masks = measure.subset_masks(41, 6, 0)
    assert (masks.sum(1) == 20).all() and len({m.tobytes() for m in masks}) == 6
    np.testing.assert_array_equal(masks, measure.subset_masks(41, 6, 0))


@pytest.fixture
def arguments(built: Path, tiny_model_folder: Path, tmp_path: Path) -> list[str]:
    queries = tmp_path / "queries.jsonl"
    rows = [{"text": f"The yen of number {i} is France", "kind": "a"} for i in range(3)]
    queries.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return ["evaluate", str(built), "--queries", str(queries), "--base-model", str(tiny_model_folder), "--out", str(tmp_path / "out"), "--bootstrap", "100"]


def test_every_metric_from_the_command_line(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric_flags = [part for m in ("fidelity", "lds", "qld", "tail-patch", "facts") for part in ("--metrics", m)]
    small = ["--fact-field", "kind", "--subsets", "3", "--second-seed-subsets", "2", "--epochs", "1", "--batch-size", "16", "--learning-rate", "1e-3"]
    small += ["--removal-queries", "1", "--removal-shares", "0.05"]
    run = CliRunner().invoke(build(), [*arguments, *metric_flags, *small], catch_exceptions=False)
    assert run.exit_code == 0
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert set(record["methods"]) == {"random", "bm25", "gradient-dot", "gradient-cosine", "ek-fac", "store", "store-cosine"}
    labels = {"bytes_per_example", "ndcg@20", "spearman", "recall@10", "lds", "qld 5%", "tail-patch", "fact recall@1", "fact recall@10", "fact MRR"}
    assert all(set(own) == labels for own in record["methods"].values())
    exact = record["methods"]["ek-fac"]
    assert exact["ndcg@20"] == exact["recall@10"] == [1.0, 1.0, 1.0]
    for own in record["methods"].values():
        assert 0 <= own["fact MRR"] <= 1 and -1 <= own["lds"][0] <= 1 and own["lds"][1] <= own["lds"][0] <= own["lds"][2]
    assert record["about"]["lds"]["subsets"] == 3 and -1 <= record["about"]["lds"]["ceiling"] <= 1
    assert (tmp_path / "out" / "evaluation.png").stat().st_size > 5000
    assert "gradient-cosine" in run.output and "LDS ceiling" in run.output
    monkeypatch.setattr(Retrainer, "train", lambda *_: pytest.fail("trained again although every outcome is cached"))
    again = CliRunner().invoke(build(), [*arguments, *metric_flags, *small], catch_exceptions=False)
    assert again.exit_code == 0
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["methods"] == record["methods"]


def test_mistakes_are_one_sentence(built: Path, arguments: list[str]) -> None:
    with pytest.raises(SettingError, match="--fact-field"):
        evaluate(built, EvaluateSettings(metrics=["facts"]))
    with pytest.raises(SettingError, match="add it to --methods"):
        evaluate(built, EvaluateSettings(methods=["store"]))
    with pytest.raises(SettingError, match="removal-shares: shares lie between 0 and 1"):
        CliRunner().invoke(build(), [*arguments, "--removal-shares", "5"], catch_exceptions=False)


def test_undefined_figures_are_null_and_a_dash(tmp_path: Path) -> None:
    figures = {"m": {"lds": [math.nan, math.nan, math.nan], "mrr": 0.5}}
    report.write_json(tmp_path / "e.json", {"figures": figures})
    assert json.loads((tmp_path / "e.json").read_text())["figures"]["m"] == {"lds": [None, None, None], "mrr": 0.5}
    assert report.shown(math.nan) == "–" and report.shown(0.5) == "0.500" and report.shown([0.5, 0.4, 0.6]) == "0.500 [0.40, 0.60]"
    report.plot(tmp_path / "e.png", figures, {"m": 3.0})
    assert (tmp_path / "e.png").stat().st_size > 1000
