"""One example as token ids with a target mask, and batches of them.

example -> token ids and target mask -> activations and output gradients -> ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Kind = Literal["text", "completion", "messages", "tokens", "classification"]


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenised example; the same type for training rows and for queries.

    input_ids (T,) int64. labels (T,) int64 for a causal LM (labels[t] is the token at t; what is scored is said by target_mask alone),
    or an int class for sequence classification. target_mask (T,) bool: token t is a target, predicted from position t - 1, so target_mask[0]
    is False; all False for classification. offsets (T, 2) int64 character spans in `text`, (0, 0) for added tokens; None where unknown.
    """

    id: str
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64] | int
    target_mask: NDArray[np.bool_]
    text: str
    offsets: NDArray[np.int64] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    kind: Kind = "text"

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def n_targets(self) -> int:
        """Number of target tokens (1 for classification)."""
        return 1 if isinstance(self.labels, int) else int(self.target_mask.sum())


@dataclass(slots=True)
class Batch:
    """Right-padded examples on a device.

    input_ids, attention_mask, labels (B, T) int64 (labels (B,) for classification); target_mask (B, T) bool; rows (B,) int64: the store-wide row
    numbers that seed sampled labels; ids: for error messages.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    target_mask: torch.Tensor
    rows: torch.Tensor
    ids: list[str]

    @property
    def classification(self) -> bool:
        return self.labels.dim() == 1


def collate(examples: Sequence[Example], rows: Sequence[int], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """Pad to the longest example, on the right."""
    if not examples:
        raise ValueError("an empty batch")
    import torch  # only here: what merely reads a store does without

    shape = (len(examples), max(len(e) for e in examples))
    input_ids = np.full(shape, pad_id, np.int64)
    attention = np.zeros(shape, np.int64)
    targets = np.zeros(shape, np.bool_)
    classification = isinstance(examples[0].labels, int)
    labels = np.zeros(shape[:1] if classification else shape, np.int64)
    for b, e in enumerate(examples):
        t = len(e)
        input_ids[b, :t] = e.input_ids
        attention[b, :t] = 1
        if isinstance(e.labels, int):
            labels[b] = e.labels
        else:
            labels[b, :t] = e.labels
            targets[b, :t] = e.target_mask

    def on(x: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(x).to(device)

    return Batch(on(input_ids), on(attention), on(labels), on(targets), on(np.asarray(rows, np.int64)), [e.id for e in examples])


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group positions 0..n-1 into batches of at most `batch_tokens` padded tokens (one example at least), longest first.

    Sorting is stable, so equal lengths keep their order and the plan depends on nothing but its arguments.
    """
    batches: list[list[int]] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda j: -lengths[j]):
        if not batches or (len(batches[-1]) + 1) * width > batch_tokens:
            batches.append([])
            width = max(lengths[i], 1)
        batches[-1].append(i)
    return batches
