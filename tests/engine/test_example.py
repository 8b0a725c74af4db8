import numpy as np
import pytest
import torch

from engine.example import Example, collate, plan_batches


def example(n: int, label: int | None = None) -> Example:
    ids = np.arange(1, n + 1, dtype=np.int64)
    mask = np.ones(n, np.bool_)
    mask[0] = False
    if label is not None:
        return Example(f"e{n}", ids, label, np.zeros(n, np.bool_), "", kind="classification")
    return Example(f"e{n}", ids, ids, mask, "")


def test_collate_pads_on_the_right() -> None:
    batch = collate([example(2), example(4)], [7, 9], pad_id=99)
    assert batch.input_ids.tolist() == [[1, 2, 99, 99], [1, 2, 3, 4]]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.target_mask.tolist() == [[False, True, False, False], [False, True, True, True]]
    assert batch.rows.tolist() == [7, 9]
    assert batch.ids == ["e2", "e4"]
    assert not batch.classification


def test_collate_classes() -> None:
    batch = collate([example(2, label=1), example(3, label=0)], [0, 1], pad_id=0)
    assert batch.classification
    assert batch.labels.tolist() == [1, 0]
    assert batch.labels.dtype == torch.int64
    assert example(3, label=0).n_targets == 1


def test_collate_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="empty"):
        collate([], [], 0)


@pytest.mark.parametrize("budget", [1, 8, 20, 1000])
def test_plan_batches_holds_the_budget_and_every_row(budget: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 12, 50).tolist()
    plan = plan_batches(lengths, budget)
    assert sorted(i for batch in plan for i in batch) == list(range(50))
    for batch in plan:
        width = max(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * width <= budget
    assert plan == plan_batches(lengths, budget)
