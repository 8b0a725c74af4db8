"""Accuracy and macro F1 against a naive loop."""

from __future__ import annotations

import numpy as np
import pytest

from indexer.finetune.metrics import classification_metrics


def test_against_a_naive_loop() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    scores = []
    for c in range(4):
        tp = sum(t == c and p == c for t, p in zip(true, predicted, strict=True))
        fp = sum(t != c and p == c for t, p in zip(true, predicted, strict=True))
        fn = sum(t == c and p != c for t, p in zip(true, predicted, strict=True))
        precision, recall = tp / (tp + fp), tp / (tp + fn)
        scores.append(2 * precision * recall / (precision + recall))
    found = classification_metrics(predicted, true, 4)
    assert found["accuracy"] == pytest.approx(float((true == predicted).mean()))
    assert found["f1"] == pytest.approx(float(np.mean(scores)))


def test_a_class_that_never_occurs_is_left_out_of_f1() -> None:
    found = classification_metrics(np.array([0, 1, 1]), np.array([0, 1, 1]), 3)
    assert found == {"accuracy": 1.0, "f1": 1.0}
