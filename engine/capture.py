"""Activations and output gradients of the tracked modules, one backward pass, no weight gradients.

Hooks on the modules' outputs see delta = d(sum of the examples' losses)/d(output); G = sum_t delta_t a_t^T is left to the consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ModelError, NumericalError
from engine.example import Batch
from engine.loss import Labels, LossStats, forward_backward
from engine.model import LoadedModel
from engine.modules import TrackedModule, bare

Consume = Callable[[TrackedModule, Tensor, Tensor], None]


class _Root(torch.autograd.Function):
    """Makes a graph begin at this output: a copy that requires a gradient, though nothing below it does."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


@dataclass(slots=True)
class _Calls:
    """The calls of one module in one forward pass: inputs with their version counters, and output gradients as they arrive."""

    inputs: list[tuple[Tensor, int]] = field(default_factory=list)
    deltas: list[Tensor | None] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    waiting: int = 0


class Capture:
    """Streams (a, delta) of each module to a consumer, in the order of the backward pass."""

    def __init__(self, loaded: LoadedModel, modules: Sequence[TrackedModule]) -> None:
        self.loaded = loaded
        self.modules = list(modules)

    def run(self, batch: Batch, consume: Consume, *, labels: Labels = "true", seed: int = 0, check: bool = False) -> LossStats:
        """Call consume(module, a (B, T, d_in), delta (B, T, d_out)) once per module, both in the model's dtype and 0 at padding.

        a ends in the constant 1 of a bias. A module that is called n times in a forward gives (B, n*T, ...): the calls one after the other. A module
        that sees one vector per example (a pooler) gives (B, 1, ...). check: raise NumericalError naming module and example id at the first
        non-finite activation or gradient. Raises DataError for ids outside the vocabulary or examples beyond the context.
        """
        mask = batch.attention_mask.bool()

        def complete(module: TrackedModule, a: Tensor, delta: Tensor) -> None:
            if a.shape[1] % mask.shape[1] == 0:
                keep = mask.to(a.device).repeat(1, a.shape[1] // mask.shape[1])[..., None]
                a = a.masked_fill(~keep, 0)
                one = keep.to(a.dtype)
            else:
                one = a.new_ones((*a.shape[:2], 1))
            consume(module, torch.cat([a, one], dim=-1) if module.bias else a, delta)

        return self.stream(batch, complete, labels=labels, seed=seed, check=check)

    def stream(self, batch: Batch, consume: Consume, *, labels: Labels = "true", seed: int = 0, check: bool = False) -> LossStats:
        """As `run`, with a as the module got it: no 1 for the bias, and whatever the model left at padding (delta is 0 there)."""
        run = _Run(self.modules, batch, consume, check)
        with _frozen(bare(self.loaded.model)), run.hooked(), torch.enable_grad():
            stats = forward_backward(self.loaded, batch, labels, seed, run.start_backward)
        run.flush()
        return stats


class _Run:
    """State of one pass; nothing outlives it."""

    def __init__(self, modules: Sequence[TrackedModule], batch: Batch, consume: Consume, check: bool) -> None:
        self.modules = modules
        self.batch = batch
        self.consume = consume
        self.check = check
        self.calls = {m.name: _Calls() for m in modules}
        self.padding: Tensor | None = None if bool(batch.attention_mask.all()) else batch.attention_mask == 0
        self.in_backward = False

    def start_backward(self) -> None:
        self.in_backward = True
        for calls in self.calls.values():
            calls.waiting = len(calls.inputs)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [m.module.register_forward_hook(partial(self._forward, m), with_kwargs=True) for m in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, tracked: TrackedModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        if not output.requires_grad:
            output = _Root.apply(output, torch.zeros((), requires_grad=True))
        if not self.in_backward:  # else a checkpointed block is being run again: its graph is made the same way, nothing is recorded
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            calls = self.calls[tracked.name]
            output.register_hook(partial(self._arrived, tracked, len(calls.inputs)))
            calls.inputs.append((x.detach(), x._version))
            calls.shapes.append(output.shape)
            calls.deltas.append(None)
        return output

    def _arrived(self, tracked: TrackedModule, index: int, delta: Tensor) -> None:
        calls = self.calls[tracked.name]
        calls.deltas[index] = delta.detach()
        calls.waiting -= 1
        if calls.waiting == 0:
            self._emit(tracked, self.calls.pop(tracked.name))

    def flush(self) -> None:
        """Modules whose output does not reach the loss (in part or at all) still get their turn, with zeros."""
        for m in reversed(self.modules):
            calls = self.calls.pop(m.name, None)
            if calls is not None and calls.inputs:
                self._emit(m, calls)
            elif calls is not None:
                raise ModelError(f"module {m.name} was tracked and not called in the forward pass")

    def _emit(self, tracked: TrackedModule, calls: _Calls) -> None:
        inputs, deltas = [], []
        for (x, version), delta, shape in zip(calls.inputs, calls.deltas, calls.shapes, strict=True):
            if x._version != version:
                raise ModelError(f"the input of module {tracked.name} is changed in place after its use, so its gradient cannot be taken")
            d = self._by_example(tracked, x.new_zeros(shape) if delta is None else delta)
            if self.padding is not None and d.shape[1] == self.padding.shape[1]:
                d = d.masked_fill(self.padding.to(d.device)[..., None], 0)
            inputs.append(self._by_example(tracked, x))
            deltas.append(d)
        a = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
        delta_all = deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=1)
        if self.check:
            self._refuse_non_finite(tracked, a, delta_all)
        self.consume(tracked, a, delta_all)

    def _by_example(self, tracked: TrackedModule, x: Tensor) -> Tensor:
        """(B, T, d) from (B, T, d), (B*T, d) or, for one vector per example, (B, d) -> (B, 1, d)."""
        b, t = self.batch.input_ids.shape
        if x.dim() == 3 and x.shape[0] == b:
            return x
        if x.dim() == 2 and x.shape[0] == b * t:
            return x.reshape(b, t, -1)
        if x.dim() == 2 and x.shape[0] == b:
            return x[:, None]
        raise ModelError(f"module {tracked.name} is fed {tuple(x.shape)}, which does not divide into the {b} examples of the batch")

    def _refuse_non_finite(self, tracked: TrackedModule, a: Tensor, delta: Tensor) -> None:
        """Raise NumericalError naming module and first example. At padding only the gradient counts."""
        for what, x in (("activation", a), ("output gradient", delta)):
            bad = ~torch.isfinite(x).all(-1)
            if what == "activation" and self.padding is not None and bad.shape == self.padding.shape:
                bad &= ~self.padding.to(bad.device)
            if bool(bad.any()):
                i = int(bad.any(1).nonzero()[0])
                raise NumericalError(f"module {tracked.name}: non-finite {what} in example {self.batch.ids[i]!r}")


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Inside, no weight requires a gradient and nothing drops out."""
    training = model.training
    wanted = [p for p in model.parameters() if p.requires_grad]
    for p in wanted:
        p.requires_grad_(False)
    model.eval()
    try:
        yield
    finally:
        for p in wanted:
            p.requires_grad_(True)
        if training:
            model.train()
