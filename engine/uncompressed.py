"""Uncompressed EK-FAC influence, the reference that sketches are measured against and that rescoring orders by.

influence(q, i) = <t_q, t_i> with t = (Q_S^T G Q_A) / sqrt(Lambda + lambda) over all coordinates of all tracked modules. Scores are formed as <W_q, G_i>,
W_q = Q_S ((Q_S^T G_q Q_A) / (Lambda + lambda)) Q_A^T: the same number, and no example needs a rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.capture import Capture
from engine.covariance import working_dtype
from engine.curvature import Curvature
from engine.errors import LimitError
from engine.example import Batch, Example, collate, plan_batches
from engine.groups import in_gb
from engine.memory import free_memory
from engine.model import LoadedModel
from engine.modules import TrackedModule, track
from engine.placement import device_of

SHARE = 0.5  # of the free memory that preconditioned query gradients take by default
EXAMPLES_BYTES = 1 << 26  # full gradients of examples formed at once


class UncompressedInfluence:
    """Influence from full gradients with a fitted curvature, streamed module by module.

    c: another damping factor than the curvature's. precondition=False leaves the inverse out: the plain gradient dot product. memory: bytes for the queries'
    gradients (default: half of what is free); where all modules do not fit, several passes over the examples are made.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        curvature: Curvature,
        *,
        tracked: Sequence[TrackedModule] | None = None,
        c: float | None = None,
        precondition: bool = True,
        memory: int | None = None,
        batch_tokens: int = 4096,
    ) -> None:
        self.loaded = loaded
        self.curvature = curvature if c is None else curvature.with_damping(c)
        self.modules = [m for m in (track(loaded).tracked if tracked is None else tracked) if m.name in self.curvature.modules]
        self.precondition = precondition
        self.memory = memory
        self.batch_tokens = batch_tokens
        self.dtype = working_dtype(loaded.dtype)

    def scores(self, queries: Sequence[Example], examples: Sequence[Example], *, progress: Callable[[int, int], None] | None = None) -> NDArray[np.float32]:
        """(Q, N) float32 influence of each example on each query, true labels; positive: training on the example lowers the query's loss.

        progress(batches done, batches in all). Raises LimitError where one module's query gradients exceed the memory.
        """
        total = np.zeros((len(queries), len(examples)))
        if not queries or not examples:
            return total.astype(np.float32)
        chunks = list(self._chunks(len(queries)))
        plan = plan_batches([len(e) for e in examples], self.batch_tokens)
        for done, chunk in enumerate(chunks):
            held = self.preconditioned(queries, chunk)
            capture = Capture(self.loaded, chunk)
            for step, chosen in enumerate(plan):
                found = torch.zeros(len(queries), len(chosen), dtype=torch.float64)

                def consume(m: TrackedModule, a: Tensor, delta: Tensor, held: dict[str, Tensor] = held, found: Tensor = found) -> None:
                    w = held[m.name]
                    for part, g in self._gradients(m, a, delta):
                        found[:, part] += (w @ g.reshape(g.shape[0], -1).T).to("cpu", torch.float64)

                capture.run(self._collate(examples, chosen), consume)
                total[:, chosen] += found.numpy()
                if progress is not None:
                    progress(done * len(plan) + step + 1, len(chunks) * len(plan))
        return total.astype(np.float32)

    def token_scores(self, queries: Sequence[Example], example: Example) -> NDArray[np.float32]:
        """(Q, T) float32: the share of each position of one training example in its influence ("through this position"); sums over T to the score."""
        total = np.zeros((len(queries), len(example)))
        for chunk in self._chunks(len(queries)):
            held = self.preconditioned(queries, chunk)

            def consume(m: TrackedModule, a: Tensor, delta: Tensor, held: dict[str, Tensor] = held) -> None:
                a, delta = a[0].to(self.dtype), delta[0].to(self.dtype)
                for q, w in enumerate(held[m.name]):
                    each = ((delta @ w.view(m.d_out, m.d_in)) * a).sum(-1)
                    if each.numel() % len(example) == 0:  # a module called several times gives its calls one after the other
                        total[q] += each.view(-1, len(example)).sum(0).double().cpu().numpy()
                    else:  # one vector for the whole example
                        total[q] += float(each.double().sum()) / len(example)

            Capture(self.loaded, chunk).run(self._collate([example], [0]), consume)
        return total.astype(np.float32)

    def half_whitened(self, examples: Sequence[Example], consume: Callable[[str, list[int], Tensor], None]) -> None:
        """Call consume(module, positions in `examples`, t (B, d_out, d_in)) for every module and batch."""
        for chunk in self._chunks(1):
            bases = {m.name: self._basis(m) for m in chunk}
            for chosen in plan_batches([len(e) for e in examples], self.batch_tokens):

                def on_module(
                    m: TrackedModule, a: Tensor, delta: Tensor, bases: dict[str, tuple[Tensor, Tensor, Tensor]] = bases, chosen: list[int] = chosen
                ) -> None:
                    q_s, q_a, inverse = bases[m.name]
                    root = inverse.sqrt()
                    for part, g in self._gradients(m, a, delta):
                        consume(m.name, chosen[part], (q_s.T @ g @ q_a).mul_(root))

                Capture(self.loaded, chunk).run(self._collate(examples, chosen), on_module)

    def preconditioned(self, queries: Sequence[Example], chunk: Sequence[TrackedModule]) -> dict[str, Tensor]:
        """{module: W (Q, d_out * d_in)} in the model's weight coordinates."""
        held = {m.name: torch.empty(len(queries), m.n_parameters, dtype=self.dtype, device=device_of(m.module)) for m in chunk}
        bases = {m.name: self._basis(m) for m in chunk} if self.precondition else {}
        for chosen in plan_batches([len(q) for q in queries], self.batch_tokens):

            def consume(m: TrackedModule, a: Tensor, delta: Tensor, chosen: list[int] = chosen) -> None:
                for part, g in self._gradients(m, a, delta):
                    if self.precondition:
                        q_s, q_a, inverse = bases[m.name]
                        g = q_s @ ((q_s.T @ g @ q_a) * inverse) @ q_a.T
                    held[m.name][chosen[part]] = g.reshape(g.shape[0], -1)

            Capture(self.loaded, chunk).run(self._collate(queries, chosen), consume)
        return held

    def _basis(self, m: TrackedModule) -> tuple[Tensor, Tensor, Tensor]:
        """(q_s, q_a, 1 / (Lambda + lambda)) on the module's device."""
        c, where = self.curvature.modules[m.name], device_of(m.module)
        lam = c.dense_lambda().to(where, self.dtype)
        return c.q_s.to(where, self.dtype), c.q_a.to(where, self.dtype), 1 / (lam + c.damping)

    def _gradients(self, m: TrackedModule, a: Tensor, delta: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Per-example gradients G (B', d_out, d_in), a bounded number of examples at a time."""
        step = max(1, EXAMPLES_BYTES // (self.dtype.itemsize * m.n_parameters))
        for start in range(0, a.shape[0], step):
            part = slice(start, start + step)
            yield part, delta[part].to(self.dtype).transpose(1, 2) @ a[part].to(self.dtype)

    def _chunks(self, n_queries: int) -> Iterator[list[TrackedModule]]:
        """Modules whose query gradients and bases fit the memory together, from the last layer down."""
        budget = int(SHARE * free_memory(self.loaded.device)) if self.memory is None else self.memory
        current: list[TrackedModule] = []
        used = 0
        for m in reversed(self.modules):
            size = self.dtype.itemsize * ((n_queries + 1) * m.n_parameters + m.d_out**2 + m.d_in**2)
            if size > budget:
                raise LimitError(
                    f"gradients of {n_queries} queries for module {m.name} take {in_gb(size)}, and {in_gb(budget)} may be used; ask fewer queries at once"
                )
            if used + size > budget:
                yield current[::-1]
                current, used = [], 0
            current.append(m)
            used += size
        if current:
            yield current[::-1]

    def _collate(self, examples: Sequence[Example], chosen: Sequence[int]) -> Batch:
        return collate([examples[i] for i in chosen], list(chosen), self.loaded.pad_id, self.loaded.device)
