"""Fit EK-FAC in two passes per module group: covariances, eigenbases, corrected eigenvalues. A finished group is a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.capture import Capture, Consume
from engine.covariance import CovarianceSums, input_key
from engine.curvature import SUMMARY, Curvature, ModuleCurvature, StoredModules, read_header, write_json, write_modules
from engine.eigen import eigenbasis
from engine.errors import DataError, LimitError, NumericalError
from engine.example import Batch, Example, collate, plan_batches
from engine.groups import CANDIDATES, Group, in_gb
from engine.interruptible import interruptible
from engine.lambda_pass import Basis, LambdaSums, candidate_positions
from engine.memory import FitEstimate, estimate_fit, free_memory
from engine.model import LoadedModel
from engine.modules import TrackedModule
from engine.recompute import recomputed_layers
from engine.settings import FitSettings

IDENTITY = "fit.json"
WIDE = 2048  # rows from which a decomposition takes more than seconds; below, the memory that another thread keeps would count
Progress = Callable[
    [str, int, int], None
]  # (covariance | eigenbases | eigenvalues, steps done, steps in all); a step is a batch of a pass, or one decomposition


def sample_positions(n: int, count: int, seed: int) -> list[int]:
    """min(n, count) of 0..n-1 without repetition, sorted; the same for the same arguments."""
    if count >= n:
        return list(range(n))
    return [int(i) for i in np.sort(np.random.default_rng([seed, 0xF17]).choice(n, size=count, replace=False))]


def fit_curvature(
    loaded: LoadedModel,
    tracked: Sequence[TrackedModule],
    examples: Sequence[Example],
    rows: Sequence[int],
    settings: FitSettings,
    *,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
    candidates: int = CANDIDATES,
    only: Collection[str] | None = None,
    free: int | None = None,
) -> Curvature:
    """EK-FAC of `tracked` on min(N, settings.fit_examples) examples, drawn by settings.seed, with labels sampled from the model.

    rows: each example's store-wide number, which seeds its sampled labels. checkpoint: folder for finished groups; a fit that was killed goes on from
    there, to the same bits, and the result is read from there on demand. Without it everything stays in memory. candidates: positions per module where
    the whole grid of Lambda is too large. only: names of those of `tracked` to fit in this call, as one of several that share the work: a module's
    curvature does not depend on which others are fitted with it. free: bytes beside the model's weights (default: measured). Raises LimitError (what does
    not fit, with numbers), NumericalError (module and example), DataError.
    """
    fit = _drawn(loaded, examples, rows, settings, candidates, progress)
    done: dict[str, dict[str, Any]] = {"modules": {}, "skipped": {}}
    if checkpoint is not None:
        done = _open_checkpoint(checkpoint, fit.identity(tracked))
    remaining = [m for m in tracked if m.name not in done["modules"] and m.name not in done["skipped"] and (only is None or m.name in only)]
    kept: dict[str, ModuleCurvature] = {}
    skipped: dict[str, str] = dict(done["skipped"])
    if remaining:
        estimate = estimate_fit(loaded, tracked, settings, tokens=fit.largest_batch, candidates=candidates, modules=remaining, free=free)
        if checkpoint is None:
            _require_room(estimate, loaded)
        fit.expect(estimate.groups)
        with recomputed_layers(loaded.model, estimate.recompute and not loaded.kept_elsewhere):  # which capture does by itself
            for group in estimate.groups:
                modules, without = fit.group(group)
                skipped |= without
                if checkpoint is None:
                    kept |= {m.name: m for m in modules}
                else:
                    write_modules(checkpoint / f"group-{_next_number(checkpoint):05d}.safetensors", modules, without)
    if checkpoint is None:
        return Curvature({m.name: kept[m.name] for m in tracked if m.name in kept}, skipped, settings.damping)
    stored = StoredModules.scan(checkpoint, settings.damping)
    order = [m.name for m in tracked if m.name in stored]
    write_json(checkpoint / SUMMARY, {"c": settings.damping, "skipped": skipped, "order": order})
    return Curvature(stored.ordered(order), skipped, settings.damping)


def unfitted(
    loaded: LoadedModel, tracked: Sequence[TrackedModule], examples: Sequence[Example], rows: Sequence[int], settings: FitSettings, checkpoint: Path
) -> list[TrackedModule]:
    """The modules that a fit with this checkpoint would still have to do; what another fit has left there is removed."""
    done = _open_checkpoint(checkpoint, _drawn(loaded, examples, rows, settings, CANDIDATES, None).identity(tracked))
    return [m for m in tracked if m.name not in done["modules"] and m.name not in done["skipped"]]


def add_to_checkpoint(checkpoint: Path, content: NDArray[np.uint8]) -> None:
    """Put a group's file, made by the same fit elsewhere, among the finished ones."""
    path = checkpoint / f"group-{_next_number(checkpoint):05d}.safetensors"
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content.data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _drawn(loaded: LoadedModel, examples: Sequence[Example], rows: Sequence[int], settings: FitSettings, candidates: int, progress: Progress | None) -> _Fit:
    drawn = [i for i in sample_positions(len(examples), settings.fit_examples, settings.seed) if examples[i].n_targets > 0]
    if not drawn:
        raise DataError("the curvature cannot be fitted: no example has a target token")
    return _Fit(loaded, [examples[i] for i in drawn], [int(rows[i]) for i in drawn], settings, candidates, progress)


@dataclass
class _Fit:
    """The fitting sample and how to walk it."""

    loaded: LoadedModel
    examples: list[Example]
    rows: list[int]
    settings: FitSettings
    candidates: int
    progress: Progress | None

    def __post_init__(self) -> None:
        self.plan = plan_batches([len(e) for e in self.examples], self.settings.batch_tokens)
        self.done, self.total = 0, 0

    @property
    def largest_batch(self) -> int:
        """Padded tokens."""
        return max(len(p) * len(self.examples[p[0]]) for p in self.plan)

    def expect(self, groups: Sequence[Group]) -> None:
        """Two passes per group lie ahead, and a decomposition per factor."""
        factors = sum(len(g.modules) + len({input_key(m) for m in g.modules}) for g in groups)
        self.total = 2 * len(groups) * len(self.plan) + factors

    def identity(self, tracked: Sequence[TrackedModule]) -> str:
        """Hash of all that the result depends on, the grouping and the damping factor aside."""
        h = hashlib.sha256()
        shape = [(m.name, m.d_out, m.d_in, m.input_group) for m in tracked]
        choice = [self.settings.seed, self.settings.batch_tokens, self.candidates, str(self.loaded.dtype), self.loaded.attention]
        h.update(json.dumps([shape, choice, self.loaded.fingerprint, self.rows], sort_keys=True, default=str).encode())
        for e in self.examples:
            for part in (e.input_ids, e.target_mask):
                h.update(np.ascontiguousarray(part).tobytes() + b"|")
        return h.hexdigest()

    def batches(self, phase: str) -> Iterator[Batch]:
        for plan in self.plan:
            yield collate([self.examples[i] for i in plan], [self.rows[i] for i in plan], self.loaded.pad_id, self.loaded.device)
            self.step(phase)

    def step(self, phase: str) -> None:
        self.done += 1
        self.report(phase)

    def report(self, phase: str) -> None:
        if self.progress is not None:
            self.progress(phase, self.done, self.total)

    def decompose(self, matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
        solve = partial(eigenbasis, matrix, what)
        found = solve() if len(matrix) < WIDE else interruptible(solve, lambda: self.report("eigenbases"))
        self.step("eigenbases")
        return found

    def group(self, group: Group) -> tuple[list[ModuleCurvature], dict[str, str]]:
        """One group's curvature, and {name: reason} for modules without any."""
        capture = Capture(self.loaded, group.modules)
        sums = CovarianceSums(group.modules, self.loaded.dtype)
        for batch in self.batches("covariance"):
            sums.start(batch)
            self._pass(capture, batch, sums.consume, sums.finite)
        sums.finish()
        inputs = {key: self.decompose(matrix, f"the activation covariance of {key.rsplit(':', 1)[0]}") for key, matrix in _drain(sums.inputs)}
        outputs = {name: self.decompose(matrix, f"the output-gradient covariance of {name}") for name, matrix in _drain(sums.outputs)}
        bases = {}
        for m in group.modules:
            (lambda_a, q_a), (lambda_s, q_s) = inputs[input_key(m)], outputs[m.name]
            positions = candidate_positions(lambda_s, lambda_a, self.candidates) if m.name in group.on_candidates else None
            bases[m.name] = Basis(q_s, q_a, positions)
        squares = LambdaSums(group.modules, bases, self.loaded.dtype)
        for batch in self.batches("eigenvalues"):
            squares.start(len(batch.ids))
            self._pass(capture, batch, squares.consume, squares.finite)
        means = squares.finish()
        found: list[ModuleCurvature] = []
        skipped: dict[str, str] = {}
        on_cpu: dict[str, tuple[Tensor, Tensor]] = {}
        for m in group.modules:
            if not means[m.name] > 0:
                skipped[m.name] = f"its gradient is zero on all {len(self.examples)} fitting examples"
                continue
            key = input_key(m)
            if key not in on_cpu:
                on_cpu[key] = (inputs[key][0].cpu(), inputs[key][1].cpu())
            lambda_a, q_a = on_cpu[key]
            positions = bases[m.name].positions
            found.append(
                ModuleCurvature(
                    name=m.name,
                    d_out=m.d_out,
                    d_in=m.d_in,
                    q_s=outputs[m.name][1].cpu(),
                    q_a=q_a,
                    lam=squares.squares[m.name].cpu(),
                    mean_lambda=means[m.name],
                    damping=self.settings.damping * means[m.name],
                    lambda_s=outputs[m.name][0].cpu(),
                    lambda_a=lambda_a,
                    input_key=key,
                    positions=None if positions is None else positions.cpu(),
                )
            )
        return found, skipped

    def _pass(self, capture: Capture, batch: Batch, consume: Consume, finite: Callable[[], bool]) -> None:
        """One batch; when the sums stop being finite it is run again to name the module and the example."""
        seed = self.settings.seed
        capture.run(batch, consume, labels="sampled", seed=seed)
        if not finite():
            capture.run(batch, lambda *_: None, labels="sampled", seed=seed, check=True)
            raise NumericalError(f"activations or gradients of the batch with example {batch.ids[0]!r} are finite, and their squares overflow")


def _require_room(estimate: FitEstimate, loaded: LoadedModel) -> None:
    """Without a checkpoint folder, finished groups stay in main memory. Raises LimitError where they cannot."""
    on_cpu = loaded.device.type == "cpu"
    needed = estimate.curvature * (len(estimate.groups) > 1 or not on_cpu) + estimate.work * on_cpu
    free = free_memory(torch.device("cpu"))
    if needed > free:
        raise LimitError(
            f"the whole curvature would take {in_gb(needed)} of memory, and {in_gb(free)} are free; give the fit a checkpoint folder", field="fit_memory"
        )


def _drain(matrices: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Items of a dictionary, forgotten as they are used."""
    for key in list(matrices):
        yield key, matrices.pop(key)


def _open_checkpoint(folder: Path, identity: str) -> dict[str, dict[str, Any]]:
    """What is finished there; a folder of another fit is emptied of it first."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / IDENTITY
    known = json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else None
    if known != {"identity": identity}:
        for path in [*folder.glob("*.safetensors"), folder / SUMMARY]:
            path.unlink(missing_ok=True)
        write_json(mark, {"identity": identity})
    done: dict[str, dict[str, Any]] = {"modules": {}, "skipped": {}}
    for path in sorted(folder.glob("*.safetensors")):
        for key, found in read_header(path).items():
            done[key] |= found
    return done


def _next_number(folder: Path) -> int:
    return 1 + max((int(p.stem.rsplit("-", 1)[1]) for p in folder.glob("group-*.safetensors")), default=-1)
