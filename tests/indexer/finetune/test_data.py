"""Order, batches, labels beside the positions that predict them, and the selection of positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import SettingError
from engine.example import Example
from indexer.finetune.data import Collator, LengthSortedBatches, next_labels, split
from indexer.finetune.selection import Selector


def example(ids: list[int], targets: list[int] | None = None, label: int | None = None) -> Example:
    array = np.array(ids, np.int64)
    mask = np.zeros(len(ids), np.bool_)
    mask[targets if targets is not None else range(1, len(ids))] = label is None
    return Example("x", array, array if label is None else label, mask, "")


def test_every_position_once_an_epoch_in_an_order_of_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 1003)
    sampler = LengthSortedBatches(lengths, 8, seed=3)
    first = list(sampler)
    assert sorted(i for b in first for i in b) == list(range(1003))
    assert len(first) == len(sampler) == 126
    assert list(LengthSortedBatches(lengths, 8, seed=3)) == first
    sampler.epoch = 1
    second = list(sampler)
    assert second != first and sorted(i for b in second for i in b) == list(range(1003))
    assert list(LengthSortedBatches(lengths, 8, seed=4)) != first


def test_batches_hold_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 2048)

    def padded(batches: list[list[int]]) -> int:
        return sum(len(b) * max(int(lengths[i]) for i in b) for b in batches)

    sampler = LengthSortedBatches(lengths, 16, seed=0)
    shuffled = np.random.default_rng(1).permutation(2048).reshape(-1, 16).tolist()
    assert padded(list(sampler)) < 1.15 * lengths.sum() < padded(shuffled)


def test_labels_stand_at_the_position_that_predicts_them() -> None:
    labels, targets = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[False, True, False, True]])
    assert next_labels(labels, targets).tolist() == [[6, -100, 8, -100]]


def test_collated_rows_without_selection() -> None:
    batch = Collator(9)([(0, example([1, 2, 3, 4])), (1, example([5, 6], [1]))])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, -100], [6, -100, -100, -100]]
    assert Collator(0)([(0, example([1, 2], label=1)), (1, example([3], label=0))])["labels"].tolist() == [1, 0]


def test_collated_labels_of_selected_positions() -> None:
    rows = [(i, example(list(range(10, 10 + n)), list(range(4, n)))) for i, n in enumerate((12, 7, 5))]
    batch = Collator(0, Selector(6, seed=1))(rows)
    everything = Collator(0)(rows)["labels"]
    assert batch["selected"].shape == (3, 6)
    assert batch["selected_mask"].sum(1).tolist() == [6, 6, 5]
    for b, (_, row) in enumerate(rows):
        chosen = batch["selected"][b][batch["selected_mask"][b]].tolist()
        assert chosen == sorted(set(chosen)) and max(chosen) < len(row)
        assert len(set(batch["selected"][b].tolist())) == 6  # fillers are distinct, too
        assert batch["labels"][b][batch["selected_mask"][b]].tolist() == everything[b][chosen].tolist()
        assert (batch["labels"][b][~batch["selected_mask"][b]] == -100).all()
        assert (batch["labels"][b] != -100).any()  # one position at least predicts a target


def test_selection_depends_on_seed_epoch_and_row_alone() -> None:
    selector = Selector(3, seed=5)
    one, _ = selector.draw([7], [20], None, epoch=2)
    both, _ = selector.draw([4, 7], [9, 20], None, epoch=2)
    assert one[0].tolist() == both[1].tolist()
    others = [selector.draw([7], [20], None, epoch=3), selector.draw([8], [20], None, epoch=2), Selector(3, seed=6).draw([7], [20], None, epoch=2)]
    assert all(other[0][0].tolist() != one[0].tolist() for other in others)


def test_selection_is_uniform() -> None:
    counts = np.zeros(10)
    for row in range(3000):
        counts[Selector(3, seed=0).draw([row], [10], None, epoch=0)[0][0]] += 1
    assert np.abs(counts - 900).max() < 5 * np.sqrt(3000 * 0.3 * 0.7)


@pytest.mark.parametrize(("k", "length", "count"), [(4, 10, 4), (4, 3, 3), (0.25, 10, 3), (0.25, 1, 1), (0.5, 8, 4), (1, 5, 1)])
def test_k_is_a_number_or_a_share(k: float, length: int, count: int) -> None:
    assert Selector(k, 0).count(length) == count


@pytest.mark.parametrize("k", [0, -1, 1.5, float("nan"), float("inf")])
def test_k_that_is_neither(k: float) -> None:
    with pytest.raises(SettingError, match="selected_tokens"):
        Selector(k, 0)


def test_split_is_disjoint_and_leaves_something() -> None:
    kept, held = split(100, 0.2, seed=0)
    assert len(held) == 20 and sorted([*kept, *held]) == list(range(100))
    assert [len(x) for x in split(2, 0.9, seed=0)] == [1, 1]
    assert [len(x) for x in split(5, 0.0, seed=0)] == [5, 0]
    assert split(100, 0.2, seed=1)[1].tolist() != held.tolist()
