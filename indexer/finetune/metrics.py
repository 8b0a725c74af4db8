"""Held-out loss for language models; loss, accuracy and macro F1 for classifiers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def classification_metrics(predicted: NDArray[np.int64], true: NDArray[np.int64], classes: int) -> dict[str, float]:
    """accuracy, and f1: the mean over the classes that occur (in truth or prediction) of 2 TP / (2 TP + FP + FN)."""
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (true, predicted), 1)
    hits = np.diag(table)
    seen = table.sum(0) + table.sum(1)
    f1 = 2 * hits[seen > 0] / seen[seen > 0]
    return {"accuracy": float(hits.sum() / max(table.sum(), 1)), "f1": float(f1.mean()) if len(f1) else 0.0}
