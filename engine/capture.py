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

from engine.attention import same_kernel
from engine.errors import ModelError, NumericalError
from engine.example import Batch
from engine.experts import ExpertLinear
from engine.loss import Labels, LossStats, forward_backward
from engine.model import LoadedModel
from engine.modules import TrackedModule, bare, evaluation_mode
from engine.placement import release_heap
from engine.recompute import recomputed_layers

Consume = Callable[[TrackedModule, Tensor, Tensor], None]


@dataclass(slots=True)
class Captured:
    """One module's part of a pass, before a bias's constant is appended.

    a (B, T', d), delta (B, T', d_out), delta 0 where nothing is. keep (B, T') bool: real positions, None where all are. positions (B, T') int64: the place
    in the example's text, None where T' is the batch's T (or a multiple, for a module called several times).
    """

    module: TrackedModule
    a: Tensor
    delta: Tensor
    keep: Tensor | None
    positions: Tensor | None


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
    tokens: list[Tensor | None] = field(default_factory=list)  # for an expert: which of the flattened B * T tokens it saw
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
        that sees one vector per example (a pooler) gives (B, 1, ...), an expert (B, T', ...) with T' the most tokens of one example that were routed to
        it. check: raise NumericalError naming module and example id at the first non-finite activation or gradient. Raises DataError for ids outside
        the vocabulary or examples beyond the context.
        """

        def complete(c: Captured) -> None:
            a = c.a if c.keep is None else c.a.masked_fill(~c.keep[..., None], 0)
            if c.module.bias:
                one = a.new_ones((*a.shape[:2], 1)) if c.keep is None else c.keep[..., None].to(a.dtype)
                a = torch.cat([a, one], dim=-1)
            consume(c.module, a, c.delta)

        return self.stream(batch, complete, labels=labels, seed=seed, check=check)

    def stream(self, batch: Batch, consume: Callable[[Captured], None], *, labels: Labels = "true", seed: int = 0, check: bool = False) -> LossStats:
        """As `run`, with a as the module got it: no 1 for the bias, and whatever the model left at padding (delta is 0 there)."""
        run = _Run(self.modules, batch, consume, check)
        # of weights that are kept elsewhere, the graph of a pass that is not recomputed would hold every one
        recomputed = recomputed_layers(bare(self.loaded.model), self.loaded.kept_elsewhere)
        with _frozen(bare(self.loaded.model)), run.hooked(), same_kernel(self.loaded.device), recomputed, torch.enable_grad():
            stats = forward_backward(self.loaded, batch, labels, seed, run.start_backward)
        run.flush()
        if self.loaded.kept_elsewhere:
            release_heap()
        return stats


class _Run:
    """State of one pass; nothing outlives it."""

    def __init__(self, modules: Sequence[TrackedModule], batch: Batch, consume: Callable[[Captured], None], check: bool) -> None:
        self.modules = modules
        self.batch = batch
        self.consume = consume
        self.check = check
        self.calls = {m.name: _Calls() for m in modules}
        self.real: Tensor | None = None if bool(batch.attention_mask.all()) else batch.attention_mask > 0
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
            calls.tokens.append(args[1] if isinstance(module, ExpertLinear) else None)
            calls.shapes.append(output.shape)
            calls.deltas.append(None)
        return output

    def _arrived(self, tracked: TrackedModule, index: int, delta: Tensor | None) -> None:
        calls = self.calls[tracked.name]
        calls.deltas[index] = None if delta is None else delta.detach()  # autograd says None for a gradient that is zero throughout
        calls.waiting -= 1
        if calls.waiting == 0:
            self._emit(tracked, self.calls.pop(tracked.name))

    def flush(self) -> None:
        """Modules whose output does not reach the loss (in part or at all) still get their turn, with zeros."""
        for m in reversed(self.modules):
            calls = self.calls.pop(m.name, None)
            if calls is not None and calls.inputs:
                self._emit(m, calls)
            elif calls is not None and isinstance(m.module, ExpertLinear):  # no token of this batch was routed to it
                self._emit_unused(m)
            elif calls is not None:
                raise ModelError(f"module {m.name} was tracked and not called in the forward pass")

    def _emit_unused(self, m: TrackedModule) -> None:
        weight: Any = m.module.weight
        rows = (len(self.batch.ids), 1)
        a, delta = weight.new_zeros((*rows, m.d_in - m.bias)), weight.new_zeros((*rows, m.d_out))
        nowhere = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self.consume(Captured(m, a, delta, nowhere.bool(), nowhere))

    def _emit(self, tracked: TrackedModule, calls: _Calls) -> None:
        parts = []
        for (x, version), tokens, delta, shape in zip(calls.inputs, calls.tokens, calls.deltas, calls.shapes, strict=True):
            if x._version != version:
                raise ModelError(f"the input of module {tracked.name} is changed in place after its use, so its gradient cannot be taken")
            d = x.new_zeros(shape) if delta is None else delta
            parts.append(self._plain(tracked, x, d) if tokens is None else self._routed(tracked, x, d, tokens))
        c = parts[0] if len(parts) == 1 else _joined(parts)
        if self.check:
            self._refuse_non_finite(c)
        self.consume(c)

    def _plain(self, tracked: TrackedModule, x: Tensor, delta: Tensor) -> Captured:
        a, delta = self._by_example(tracked, x.to(delta.device)), self._by_example(tracked, delta)  # a may come from the device of the layer below
        keep = None
        if self.real is not None and delta.shape[1] == self.real.shape[1]:
            keep = self.real.to(delta.device)
            delta = delta.masked_fill(~keep[..., None], 0)
        return Captured(tracked, a, delta, keep, None)

    def _routed(self, tracked: TrackedModule, x: Tensor, delta: Tensor, tokens: Tensor) -> Captured:
        """An expert's tokens (n,), gathered example by example into (B, T', ...)."""
        b, t = self.batch.input_ids.shape
        if self.real is not None:
            on = self.real.to(tokens.device).reshape(-1)[tokens]
            x, delta, tokens = x[on], delta[on], tokens[on]
        example = tokens // t
        counts = torch.bincount(example, minlength=b)
        width = max(1, int(counts.max()))
        place = torch.arange(len(tokens), device=tokens.device) - (counts.cumsum(0) - counts)[example]  # tokens ascend, so examples do
        at = example * width + place

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros((b * width, *values.shape[1:])).index_copy_(0, at, values).view(b, width, *values.shape[1:])

        return Captured(tracked, spread(x), spread(delta), spread(torch.ones_like(tokens)).bool(), spread(tokens % t))

    def _by_example(self, tracked: TrackedModule, x: Tensor) -> Tensor:
        """(B, T, d) from (B, T, d), (B, 1, T, d), (B*T, d) or, for one vector per example, (B, d) -> (B, 1, d)."""
        b, t = self.batch.input_ids.shape
        if x.dim() == 3 and x.shape[0] == b:
            return x
        if x.dim() == 4 and x.shape[0] == b and 1 in x.shape[1:3]:
            return x.reshape(b, -1, x.shape[3])
        if x.dim() == 2 and x.shape[0] == b * t:
            return x.reshape(b, t, -1)
        if x.dim() == 2 and x.shape[0] == b:
            return x[:, None]
        raise ModelError(f"module {tracked.name} is fed {tuple(x.shape)}, which does not divide into the {b} examples of the batch")

    def _refuse_non_finite(self, c: Captured) -> None:
        """Raise NumericalError naming module and first example. At padding only the gradient counts."""
        for what, x in (("activation", c.a), ("output gradient", c.delta)):
            bad = ~torch.isfinite(x).all(-1)
            if c.keep is not None:
                bad &= c.keep
            if bool(bad.any()):
                i = int(bad.any(1).nonzero()[0])
                raise NumericalError(f"module {c.module.name}: non-finite {what} in example {self.batch.ids[i]!r}")


def _joined(parts: list[Captured]) -> Captured:
    """The calls of one module, one after the other along T."""
    first = parts[0]
    keep = None if first.keep is None else torch.cat([p.keep for p in parts if p.keep is not None], dim=1)
    positions = None if first.positions is None else torch.cat([p.positions for p in parts if p.positions is not None], dim=1)
    return Captured(first.module, torch.cat([p.a for p in parts], dim=1), torch.cat([p.delta for p in parts], dim=1), keep, positions)


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Inside, no weight requires a gradient and nothing drops out."""
    training = [m for m in model.modules() if m.training]
    wanted = [p for p in model.parameters() if p.requires_grad]
    for p in wanted:
        p.requires_grad_(False)
    if training:
        evaluation_mode(model)
    try:
        yield
    finally:
        for p in wanted:
            p.requires_grad_(True)
        for m in training:
            m.training = True
