"""What indexing will take, printed before the model does any work, and refused with the numbers where it cannot fit."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.budget import SketchPlan
from engine.capture import Capture
from engine.eigen import eigenbasis
from engine.errors import LimitError
from engine.example import collate
from engine.memory import estimate_fit, fit_budget, free_memory
from engine.model import LoadedModel
from engine.modules import ModuleReport
from indexer.prepare import Prepared
from indexer.reporter import clock, size
from indexer.samples import Samples
from indexer.settings import IndexSettings

_FLOAT, _DOUBLE = 4, 8
_PRODUCT = (512, 4096, 1024)  # shape of the matrix product that is timed
_FACTOR = 512  # rows of the factor whose decomposition is timed
KEPT_BY_DEFAULT = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Rates:
    """tokens: per second of a forward and backward pass; products: floating-point operations per second of a float32 matrix product; cubes: d^3 per second
    of the eigendecomposition of a (d, d) factor."""

    tokens: float
    products: float
    cubes: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes and seconds; projection_seconds: of them, for the PCA. disk: at its peak, while fitting; store: what stays; memory: beside the model and its activations."""

    curvature: int
    spill: int
    shared: int
    rows: int
    memory: int
    model: int
    seconds: float
    projection_seconds: float
    keeps_curvature: bool

    @property
    def store(self) -> int:
        return self.rows + self.shared + self.keeps_curvature * self.curvature

    @property
    def disk(self) -> int:
        return self.curvature * (1 + self.keeps_curvature) + self.spill + self.shared + 2 * self.rows


def estimate(
    prepared: Prepared, report: ModuleReport, plan: SketchPlan, samples: Samples, settings: IndexSettings, loaded: LoadedModel, rates: Rates
) -> Estimate:
    """From shapes, counts and measured rates."""
    groups = {m.input_group: m.d_in for m in report.tracked}
    curvature = _FLOAT * (sum(m.d_out * m.d_out + m.d_out * m.d_in for m in report.tracked) + sum(d * d for d in groups.values()))
    width = sum(plan.m.values())
    columns = _FLOAT * sum(m.d_out * min(m.d_out, plan.m[m.name]) + m.d_in * min(m.d_in, plan.m[m.name]) for m in report.tracked)
    shared = plan.projection_bytes + columns + 12 * width
    rows = prepared.n * (plan.payload_bytes + 80) + prepared.total("text_bytes") + 4 * prepared.total("tokens")
    gram = 3 * _DOUBLE * len(samples.pca) ** 2 if plan.method == "pca" else 0
    keeps = settings.keep_curvature if settings.keep_curvature is not None else curvature < KEPT_BY_DEFAULT
    tokens = prepared.total("tokens")
    per_row = tokens / max(prepared.n, 1)
    projection = plan.operations / rates.products
    applied = prepared.n * 2.0 * plan.entries / rates.products
    n_groups = len(estimate_fit(loaded, report.tracked, settings, tokens=_largest_batch(prepared, settings)).groups)
    passes = 2 * n_groups * len(samples.curvature) * per_row + len(samples.pca) * per_row + tokens
    outputs, inputs = [m.d_out for m in report.tracked], list(groups.values())
    rotations = 2.0 * sum(d * d for d in (*outputs, *inputs))  # per token; what stage 1 multiplies, too, where it uses most columns
    per_fit_token = 1.5 * rotations + 2.0 * sum(m.d_out * m.d_in for m in report.tracked)  # half of each covariance, both rotations, the squared gradient
    own = len(samples.curvature) * per_row * per_fit_token + (len(samples.pca) * per_row + tokens) * rotations
    eigenbases = sum(float(d) ** 3 for d in (*outputs, *inputs)) / rates.cubes
    return Estimate(
        curvature=curvature,
        spill=(_FLOAT * width + _DOUBLE * sum(plan.k.values())) * len(samples.pca),
        shared=shared,
        rows=rows,
        memory=max(fit_budget(loaded, report.tracked, settings), gram + 2 * plan.projection_bytes),
        model=sum(p.numel() * p.element_size() for p in loaded.model.parameters()),
        seconds=passes / rates.tokens + own / rates.products + eigenbases + projection + applied,
        projection_seconds=projection,
        keeps_curvature=keeps,
    )


def measure_rates(loaded: LoadedModel, report: ModuleReport, prepared: Prepared, settings: IndexSettings) -> Rates:
    """From one batch, one matrix product and one decomposition, each after one to warm up."""
    n = min(prepared.n, 32)
    positions = np.linspace(0, prepared.n - 1, n).astype(np.int64)
    examples = prepared.examples(np.unique(positions))
    kept = examples[: max(1, settings.batch_tokens // max(len(e) for e in examples))]
    batch = collate(kept, list(range(len(kept))), loaded.pad_id, loaded.device)
    capture = Capture(loaded, report.tracked)
    generator = torch.Generator(loaded.device).manual_seed(0)
    sample = torch.randn((_FACTOR, _FACTOR), generator=generator, device=loaded.device)
    factor = sample @ sample.T
    m, n, k = _PRODUCT
    left, right = (torch.ones(shape, dtype=torch.float32, device=loaded.device) for shape in ((m, n), (n, k)))
    return Rates(
        sum(len(e) for e in kept) / _second_time(lambda: capture.run(batch, lambda *_: None), loaded.device),
        2.0 * m * n * k / _second_time(lambda: left @ right, loaded.device),
        _FACTOR**3 / _second_time(lambda: eigenbasis(factor, "a sample factor"), loaded.device),
    )


def _largest_batch(prepared: Prepared, settings: IndexSettings) -> int:
    """Padded tokens, at most."""
    return min(settings.batch_tokens, prepared.total("tokens"))


def _second_time(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the work takes when it is done for the second time."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    return seconds


def describe(prepared: Prepared, report: ModuleReport, plan: SketchPlan, samples: Samples, loaded: LoadedModel, found: Estimate, bad: int) -> list[str]:
    """The plan, line by line."""
    cut = prepared.total("truncated")
    return [
        f"data       {prepared.n:,} examples, {prepared.total('tokens'):,} tokens, {prepared.total('targets'):,} of them targets; {cut:,} truncated, {bad:,} bad rows left out",
        f"model      {loaded.source} ({loaded.task}, {str(loaded.dtype).removeprefix('torch.')} on {loaded.device}); tracked "
        f"{len(report.tracked)} modules, {report.tracked_parameters:,} of {report.total_parameters:,} parameters ({report.share:.1%})",
        f"fits       curvature on {len(samples.curvature):,} examples, projection on {len(samples.pca):,}; {len(samples.held_out)} left out for calibration",
        f"sketch     {plan.payload_bytes:,} bytes per example in {len(plan.blocks)} block{'s' if len(plan.blocks) > 1 else ''} of "
        f"{_span(plan.k.values())} bits; stage 1 keeps {_span(plan.m.values())} coordinates per module",
        *(f"           {reason}" for reason in plan.why),
        f"memory     {size(found.model)} model, about {size(found.memory)} for fitting; {size(free_memory(loaded.device))} free on {loaded.device}",
        f"disk       {size(found.store)} when done ({size(found.rows)} rows and sketches, {size(found.shared)} shared"
        f"{f', {size(found.curvature)} curvature kept' if found.keeps_curvature else ''}), {size(found.disk)} at its peak",
        f"time       about {clock(found.seconds)}, {clock(found.projection_seconds)} of it for fitting the projection; from one measured batch, matrix product and decomposition",
    ]


def _span(values: Iterable[int]) -> str:
    numbers = sorted(values)
    return f"{numbers[0]:,}" if numbers[0] == numbers[-1] else f"{numbers[0]:,} to {numbers[-1]:,}"


def require_memory(found: Estimate, loaded: LoadedModel) -> None:
    """Raises LimitError where fitting does not fit beside the model."""
    free = free_memory(loaded.device)
    if found.memory > free:
        raise LimitError(
            f"fitting needs about {size(found.memory)} of memory on {loaded.device}, and {size(free)} are free; lower --fit-memory, --pca-examples or --projection-bytes",
            field="fit_memory",
        )


def require_disk(store: Path, found: Estimate) -> None:
    """Raises LimitError where the peak does not fit."""
    free = shutil.disk_usage(store).free
    if found.disk > free:
        raise LimitError(
            f"{store}: indexing needs about {size(found.disk)} of disk at its peak ({size(found.spill)} of it for the coordinates of the projection's fit, lower --pca-examples or --m), "
            f"and {size(free)} are free",
            field="store",
        )
