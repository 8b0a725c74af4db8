"""Retraining: reproducible, cached, a model left alone, a recipe read from the model's record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.reading import Row
from engine.data.settings import DataSettings
from engine.data.tokens import to_example
from engine.errors import SettingError
from engine.example import Example
from engine.model import LoadedModel, load_model
from engine.settings import ModelSettings
from indexer.evaluate.retrain import Recipe, Retrainer, query_losses, read_recipe, tail_patch, training_loss
from indexer.evaluate.settings import EvaluateSettings


@pytest.fixture
def loaded(tiny_model_folder: Path) -> LoadedModel:
    return load_model(ModelSettings(model=str(tiny_model_folder)))


def examples_of(loaded: LoadedModel, texts: tuple[str, ...]) -> list[Example]:
    return [to_example(Row("", i, {"text": t}), loaded, DataSettings(), training=True, default_id=str(i)) for i, t in enumerate(texts)]


@pytest.fixture
def retrainer(loaded: LoadedModel, texts: tuple[str, ...], tmp_path: Path) -> Retrainer:
    made = examples_of(loaded, texts)
    return Retrainer(loaded, Recipe("base", epochs=4, learning_rate=5e-3, batch_size=4), made, made[:2], tmp_path)


def test_query_losses_equal_a_loop(loaded: LoadedModel, texts: tuple[str, ...]) -> None:
    examples = examples_of(loaded, texts)
    found = query_losses(loaded, examples, batch_tokens=40)
    for e, loss in zip(examples, found, strict=True):
        logp = torch.log_softmax(loaded.model(input_ids=torch.from_numpy(e.input_ids)[None]).logits[0], -1)
        expected = -sum(float(logp[t - 1, e.input_ids[t]]) for t in range(1, len(e)))
        assert loss == pytest.approx(expected, rel=1e-5)


def test_training_loss_is_the_mean_over_targets(loaded: LoadedModel, texts: tuple[str, ...]) -> None:
    examples = examples_of(loaded, texts)
    expected = query_losses(loaded, examples).sum() / sum(e.n_targets for e in examples)
    assert float(training_loss(loaded, examples)) == pytest.approx(float(expected), rel=1e-5)


def test_training_lowers_the_loss_and_leaves_the_base(retrainer: Retrainer) -> None:
    before = query_losses(retrainer.base, retrainer.queries)
    after = retrainer.losses(np.arange(10), 0)
    assert (after < 0.9 * before).all()
    np.testing.assert_array_equal(query_losses(retrainer.base, retrainer.queries), before)


def test_outcomes_are_reproducible_and_depend_on_set_and_seed(retrainer: Retrainer) -> None:
    half = np.array([0, 2, 4, 6, 8])
    first = query_losses(retrainer.train(half, 1), retrainer.queries)
    np.testing.assert_array_equal(first, query_losses(retrainer.train(half, 1), retrainer.queries))
    assert not np.array_equal(first, query_losses(retrainer.train(half, 2), retrainer.queries))
    assert not np.array_equal(first, query_losses(retrainer.train(half + 1, 1), retrainer.queries))


def test_a_known_outcome_is_not_trained_again(retrainer: Retrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    half = np.array([1, 3, 5])
    first = retrainer.losses(half, 0)
    again = Retrainer(retrainer.base, retrainer.recipe, retrainer.examples, retrainer.queries, retrainer.path.parent)
    monkeypatch.setattr(Retrainer, "train", lambda *_: pytest.fail("trained again"))
    np.testing.assert_array_equal(again.losses(half[::-1], 0), first)


def test_another_task_has_another_cache(retrainer: Retrainer) -> None:
    parts: list[tuple[Any, ...]] = [
        (Recipe("base", epochs=5, learning_rate=5e-3, batch_size=4), retrainer.examples, retrainer.queries),
        (retrainer.recipe, retrainer.examples[1:], retrainer.queries),
        (retrainer.recipe, retrainer.examples, retrainer.queries[1:]),
    ]
    paths = {Retrainer(retrainer.base, recipe, e, q, retrainer.path.parent).path for recipe, e, q in parts}
    assert len(paths | {retrainer.path}) == 4


def test_tail_patch_teaches_and_leaves_the_model(loaded: LoadedModel, texts: tuple[str, ...]) -> None:
    examples = examples_of(loaded, texts)
    before = query_losses(loaded, examples)
    assert tail_patch(loaded, [examples[3]], examples[3], 1e-3) > 0
    np.testing.assert_array_equal(query_losses(loaded, examples), before)
    assert all(p.grad is None for p in loaded.model.parameters())


def test_the_recipe_comes_from_the_record(tmp_path: Path) -> None:
    settings = EvaluateSettings()
    with pytest.raises(SettingError, match="--base-model"):
        read_recipe(str(tmp_path), settings)
    record = {
        "setting model": "some/base",
        "setting method": "full",
        "setting epochs": 7.0,
        "setting batch_size": 5,
        "setting learning_rate": 0.1,
        "setting clip": 0.5,
    }
    (tmp_path / "finetune.json").write_text(json.dumps(record), encoding="utf-8")
    assert read_recipe(str(tmp_path), settings) == Recipe("some/base", 7.0, 0.1, 5, clip=0.5)
    changed = EvaluateSettings(base_model="other", epochs=1.0)
    assert read_recipe(str(tmp_path), changed) == Recipe("other", 1.0, 0.1, 5, clip=0.5)
    (tmp_path / "finetune.json").write_text(json.dumps({**record, "setting method": "lora"}), encoding="utf-8")
    with pytest.raises(SettingError, match="lora"):
        read_recipe(str(tmp_path), settings)
