"""Examples to training batches: order by seed and epoch, length-sorted inside shuffled chunks, labels beside the positions that predict them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from engine.example import Example, collate
from indexer.finetune.selection import Selector

IGNORED = -100
CHUNK_BATCHES = 16


class LengthSortedBatches(Sampler[list[int]]):
    """Batches of positions 0..n-1: a permutation drawn from (seed, epoch) is cut into chunks of 16 batches, sorted by length inside a chunk, and the chunk's
    batches are shuffled. Every position occurs once an epoch; the order depends on nothing but lengths, batch size, seed and `epoch`."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch, 1])
        order = rng.permutation(len(self.lengths))
        step = CHUNK_BATCHES * self.batch_size
        for start in range(0, len(order), step):
            chunk = order[start : start + step]
            chunk = chunk[np.argsort(-self.lengths[chunk], kind="stable")]
            batches = [chunk[i : i + self.batch_size].tolist() for i in range(0, len(chunk), self.batch_size)]
            for i in rng.permutation(len(batches)):
                yield batches[i]


class Collator:
    """Numbered examples to the tensors of one pass.

    input_ids, attention_mask (B, T) int64, right-padded. labels: for a causal LM (B, T), the token that position t predicts where that one is a target, else
    -100 (already shifted); for classification (B,) the class. With a `selector`, selected (B, K) int64 positions in ascending order and selected_mask (B, K)
    bool (off: a filler for an example with fewer positions than the batch's K) are added, and labels (B, K) are those of the selected positions.
    """

    def __init__(self, pad_id: int, selector: Selector | None = None) -> None:
        self.pad_id = pad_id
        self.selector = selector
        self.epoch = 0

    def __call__(self, items: Sequence[tuple[int, Example]]) -> dict[str, torch.Tensor]:
        batch = collate([e for _, e in items], [i for i, _ in items], self.pad_id)
        labels = batch.labels if batch.classification else next_labels(batch.labels, batch.target_mask)
        tensors = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": labels}
        if self.selector is not None:
            predicting = None if batch.classification else (labels != IGNORED).numpy()
            selected, mask = self.selector.draw([i for i, _ in items], [len(e) for _, e in items], predicting, self.epoch)
            tensors["selected"], tensors["selected_mask"] = torch.from_numpy(selected), torch.from_numpy(mask)
            if not batch.classification:
                tensors["labels"] = labels.gather(1, tensors["selected"]).masked_fill(~tensors["selected_mask"], IGNORED)
        return tensors


def next_labels(labels: torch.Tensor, target_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) int64: at position t the token t + 1 if it is a target, else -100."""
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = torch.where(target_mask[:, 1:], labels[:, 1:], IGNORED)
    return shifted


def split(n: int, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions 0..n-1 into (training, held out), both ascending; at least one of each where share > 0 and n > 1."""
    held = min(max(round(n * share), 1), n - 1) if share > 0 else 0
    order = np.random.default_rng([seed, 2]).permutation(n)
    return np.sort(order[held:]), np.sort(order[:held])
