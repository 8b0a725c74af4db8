"""Losses summed over target tokens, their gradient with respect to the last hidden states, and labels sampled from the model.

The vocabulary head runs on chunks of target positions, so that the logits of a batch never exist at once, and its softmax is differentiated in
closed form: d loss / d logits = softmax - onehot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import DataError
from engine.example import Batch
from engine.head import head_of
from engine.model import LoadedModel
from engine.modules import bare

Labels = Literal["true", "sampled"]
CHUNK_BYTES = 32 * 10**6


@dataclass(frozen=True, slots=True)
class LossStats:
    """loss (B,) float32 in nats, summed over targets; n_targets (B,) int64."""

    loss: Tensor
    n_targets: Tensor


def uniforms(seed: int, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform in [0, 1) per (seed, row, position), from a counter-based hash (three rounds of splitmix64): no state, no order, no batch."""
    with np.errstate(over="ignore"):
        x = _mix(np.full(1, seed, np.uint64))
        x = _mix(x + rows.astype(np.uint64))
        x = _mix(x + positions.astype(np.uint64))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def cross_entropy(logits: Tensor, labels: Tensor | None, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits (n, V) -> loss (n,) and d loss / d logits (n, V), in float32 at least.

    labels (n,): the true classes; or None, and the class is drawn by inverse CDF: the first whose cumulative probability exceeds u (n,).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logp = torch.log_softmax(logits, dim=-1)
    p = logp.exp()
    if labels is None:
        assert u is not None
        cdf = p.cumsum(-1)
        threshold = u.to(cdf.dtype)[:, None] * cdf[:, -1:]
        last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())  # the last class of positive probability, where u rounds up to 1
        labels = torch.minimum(torch.searchsorted(cdf, threshold, right=True), last)[:, 0].clamp_(max=cdf.shape[1] - 1)  # the last where p is not a number
    loss = -logp.gather(1, labels[:, None])[:, 0]
    p[torch.arange(len(labels), device=p.device), labels] -= 1
    return loss, p


def forward_backward(loaded: LoadedModel, batch: Batch, labels: Labels, seed: int, before_backward: Callable[[], None]) -> LossStats:
    """One forward and one backward pass of the summed loss; gradients reach whatever hooks the caller has set.

    `before_backward` is called between the two. Raises DataError for ids outside the vocabulary or examples longer than the context.
    """
    check_batch(loaded, batch)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **loaded.call_options}
    if batch.classification:
        return _classification(loaded, batch, inputs, labels, seed, before_backward)
    rows = batch.rows.cpu().numpy()
    b, t = batch.target_mask.nonzero(as_tuple=True)
    n_targets = batch.target_mask.sum(1)
    u_all = uniforms(seed, rows[b.cpu().numpy()], t.cpu().numpy()) if labels == "sampled" else None
    hidden, head = _last_hidden(loaded, inputs)
    chosen = hidden.detach()[b.to(hidden.device), t.to(hidden.device) - 1]
    targets = batch.labels[b, t].to(hidden.device)
    grads, losses = torch.empty_like(chosen), []
    step = max(1, CHUNK_BYTES // (4 * loaded.vocab_size))
    for start in range(0, len(chosen), step):
        part = slice(start, start + step)
        h = chosen[part].requires_grad_(head is not None)
        logits = h if head is None else head(h)
        u = None if u_all is None else torch.from_numpy(u_all[part]).to(logits.device)
        loss, grad = cross_entropy(logits.detach(), targets[part].to(logits.device) if u is None else None, u)
        losses.append(loss.to(hidden.device))
        grads[part] = grad if head is None else torch.autograd.grad(logits, h, grad.to(logits.dtype))[0]
    summed = torch.zeros(len(batch.ids), dtype=torch.float64, device=hidden.device)
    if losses:
        summed.index_add_(0, b.to(hidden.device), torch.cat(losses).double())
    full = torch.zeros_like(hidden)
    full[b.to(hidden.device), t.to(hidden.device) - 1] = grads
    before_backward()
    _backward(hidden, full)
    return LossStats(summed.float().to(batch.input_ids.device), n_targets)


def _classification(loaded: LoadedModel, batch: Batch, inputs: dict[str, Any], labels: Labels, seed: int, before_backward: Callable[[], None]) -> LossStats:
    """Cross-entropy over the classes; a sampled class takes the uniform of position 0."""
    logits: Tensor = bare(loaded.model)(**inputs).logits
    rows = batch.rows.cpu().numpy()
    u = torch.from_numpy(uniforms(seed, rows, np.zeros_like(rows))).to(logits.device)
    loss, grad = cross_entropy(logits.detach(), batch.labels.to(logits.device) if labels == "true" else None, u)
    before_backward()
    _backward(logits, grad)
    return LossStats(loss.float().to(batch.labels.device), torch.ones_like(batch.labels))


def check_batch(loaded: LoadedModel, batch: Batch) -> None:
    """Refuse what would index outside an embedding: DataError naming the example."""
    if batch.input_ids.shape[1] > loaded.max_length:
        longest = batch.ids[int(batch.attention_mask.sum(1).argmax())]
        raise DataError(f"example {longest!r} has {batch.input_ids.shape[1]} tokens, and the model's context holds {loaded.max_length}", code="too-long")
    wrong = ((batch.input_ids < 0) | (batch.input_ids >= loaded.vocab_size)) & (batch.attention_mask > 0)
    n_labels = loaded.vocab_size
    if batch.classification:
        n_labels = int(bare(loaded.model).config.num_labels)
        bad_label = (batch.labels < 0) | (batch.labels >= n_labels)
    else:
        bad_label = (((batch.labels < 0) | (batch.labels >= n_labels)) & batch.target_mask).any(1)
        if bool(batch.target_mask[:, 0].any()):
            raise ValueError("target_mask[:, 0] is on: the first token is predicted from nothing")
    if bool(wrong.any()):
        i = int(wrong.any(1).nonzero()[0])
        token = int(batch.input_ids[i][wrong[i]][0])
        raise DataError(f"example {batch.ids[i]!r} has token id {token}, and the model's vocabulary ends at {loaded.vocab_size - 1}", code="token-out-of-range")
    if bool(bad_label.any()):
        i = int(bad_label.nonzero()[0])
        raise DataError(f"example {batch.ids[i]!r} has a label outside 0..{n_labels - 1}", code="label-out-of-range")


def _backward(output: Tensor, grad: Tensor) -> None:
    if output.requires_grad:
        torch.autograd.backward([output], [grad.to(output.dtype)])


def _last_hidden(loaded: LoadedModel, inputs: dict[str, Any]) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """(B, T, d) hidden states and the function from rows of them to logits; (B, T, V) logits and None where model and head do not come apart."""
    model = bare(loaded.model)
    if not loaded.separable_head:
        return model(**inputs).logits, None
    return model.base_model(**inputs).last_hidden_state, lambda h: head_of(model, h)
