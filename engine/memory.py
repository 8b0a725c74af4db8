"""Memory and arithmetic of the curvature fit, from shapes alone, before any work.

What the fit holds at once: the model; one batch's graph and captured inputs above the group's lowest module; the group's factors; then either the
workspace of an eigendecomposition or the group's corrected eigenvalues with a batch's rotated activations.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.covariance import input_key, working_dtype
from engine.errors import LimitError
from engine.groups import CANDIDATES, Group, decomposition_bytes, factor_bytes, group_bytes, in_gb, plan_groups
from engine.lambda_pass import CHUNK, TILE
from engine.loss import CHUNK_BYTES
from engine.model import LoadedModel
from engine.modules import TrackedModule
from engine.settings import FitSettings

SHARE = 0.8  # of what is left free that a default budget takes
HEAD_COPIES = 7  # of a chunk of logits: logarithm, exponential, cumulative sum, gradient, and what the head keeps
RECOMPUTE_COST = 1.4  # of a pass that runs its layers twice, against one that does not
ALLOCATOR = 50 * 10**6  # what the allocator keeps beside what is in use
WIDEST = 3  # intermediate results that a layer's activation function leaves in the graph, each as wide as its widest layer


@dataclass(frozen=True, slots=True)
class FitEstimate:
    """Bytes of one fit, and what it runs. groups: module groups, two passes over the fitting sample each.

    batch: of the largest batch's graph and statistics, for the group that needs most. decomposition: workspace of the largest factor (in main memory).
    curvature: all eigenvectors and corrected eigenvalues, on disk with a checkpoint, else in memory. recompute: layers are run again in the backward pass,
    so that only their inputs are kept.
    """

    weights: int
    batch: int
    groups: tuple[Group, ...]
    decomposition: int
    curvature: int
    recompute: bool
    work: int  # peak beside the weights

    @property
    def passes(self) -> int:
        return 2 * len(self.groups)

    @property
    def largest_group(self) -> int:
        return max(g.bytes for g in self.groups)

    @property
    def peak(self) -> int:
        return self.weights + self.work


def estimate_fit(
    loaded: LoadedModel,
    tracked: Sequence[TrackedModule],
    settings: FitSettings,
    *,
    tokens: int | None = None,
    free: int | None = None,
    candidates: int = CANDIDATES,
    modules: Sequence[TrackedModule] | None = None,
) -> FitEstimate:
    """What a fit takes. Works on a model without storage, too.

    tokens: of the largest padded batch (default --batch-tokens). free: bytes beside the model's weights (default: measured). modules: those of `tracked`
    still to be fitted (default: all). Raises LimitError with the numbers where no grouping fits.
    """
    tokens = tokens or settings.batch_tokens
    free = free_memory(loaded.device) if free is None else free
    modules = tracked if modules is None else modules
    refusal: LimitError | None = None
    best: FitEstimate | None = None
    for recompute in (True,) if loaded.kept_elsewhere else (False, True):
        try:
            found = _estimate(loaded, tracked, modules, settings, tokens, free, candidates, recompute)
        except LimitError as e:
            refusal = e
            continue
        if best is None or RECOMPUTE_COST * found.passes < best.passes:
            best = found
        if len(best.groups) == 1:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _estimate(
    loaded: LoadedModel,
    tracked: Sequence[TrackedModule],
    modules: Sequence[TrackedModule],
    settings: FitSettings,
    tokens: int,
    free: int,
    candidates: int,
    recompute: bool,
) -> FitEstimate:
    itemsize = working_dtype(loaded.dtype).itemsize
    order = {m.name: i for i, m in enumerate(tracked)}
    on_cpu = loaded.device.type == "cpu"  # a GPU without room for the workspace leaves the decomposition to the CPU

    def batch(members: Sequence[TrackedModule]) -> int:
        lowest = min(order[m.name] for m in members)
        return activation_bytes(loaded, tracked[lowest:], tokens, recompute=recompute) + transient_bytes(loaded, members, tokens)

    def work(members: Sequence[TrackedModule], held: int) -> int:
        workspace = factor_bytes(members, itemsize) + decomposition_bytes(members, itemsize) * on_cpu
        return max(held + batch(members), workspace)

    def beside(members: Sequence[TrackedModule]) -> int:
        held = group_bytes(members, candidates=candidates, itemsize=itemsize)
        return work(members, held) - held

    share = int(SHARE * free)
    if settings.fit_memory is not None:
        groups = plan_groups(modules, settings.fit_memory, candidates=candidates, itemsize=itemsize)
    else:
        groups = plan_groups(modules, share, candidates=candidates, itemsize=itemsize, beside=beside)
    peak = max(work(g.modules, g.bytes) for g in groups)
    if peak > free:
        most = max(groups, key=lambda g: work(g.modules, g.bytes))
        raise LimitError(
            f"fitting the curvature would take {in_gb(peak)} ({in_gb(most.bytes)} for a module group, {in_gb(batch(most.modules))} for a batch of {tokens:,} tokens, "
            f"{in_gb(decomposition_bytes(most.modules, itemsize) * on_cpu)} for an eigendecomposition), and {in_gb(free)} are free; "
            "lower --fit-memory or --batch-tokens",
            field="fit_memory",
        )
    few = {name for g in groups for name in g.on_candidates}
    return FitEstimate(
        weights=weight_bytes(loaded),
        batch=max(batch(g.modules) for g in groups),
        groups=tuple(groups),
        decomposition=decomposition_bytes(modules, itemsize),
        curvature=group_bytes(tracked, few, candidates=candidates, itemsize=itemsize),
        recompute=recompute,
        work=peak,
    )


def fit_budget(loaded: LoadedModel, tracked: Sequence[TrackedModule], settings: FitSettings) -> int:
    """Bytes that a fit takes at its peak beside the model's weights. Raises LimitError where it cannot fit."""
    return estimate_fit(loaded, tracked, settings).work


def activation_bytes(loaded: LoadedModel, above: Sequence[TrackedModule], tokens: int, *, recompute: bool = False) -> int:
    """One batch's graph and captured inputs: inputs and outputs of the tracked modules `above` (and with) the lowest, what activation functions and
    normalisation leave; with `recompute` only inputs and one layer's graph."""
    size = loaded.dtype.itemsize
    inputs = {input_key(m): m.d_in for m in above}
    layers: dict[int, list[int]] = {}
    for m in above:
        layers.setdefault(m.layer, []).append(m.d_out)
    hidden = min(inputs.values(), default=0)
    norms = 2 * 4 * hidden  # upcast to float32
    graphs = [size * (sum(outs) + WIDEST * max(outs)) + norms for outs in layers.values()]
    per_token = size * sum(inputs.values()) + (max(graphs, default=0) + size * hidden * len(layers) if recompute else sum(graphs))
    chunk = max(min(CHUNK_BYTES, 4 * loaded.vocab_size * tokens), 4 * loaded.vocab_size)
    return tokens * per_token + HEAD_COPIES * chunk + ALLOCATOR


def transient_bytes(loaded: LoadedModel, modules: Sequence[TrackedModule], tokens: int) -> int:
    """One module's activations and output gradients in the precision of sums, as they are and rotated; a tile of gradients."""
    itemsize = working_dtype(loaded.dtype).itemsize
    widest = max((m.d_in + m.d_out for m in modules), default=0)
    tile = TILE if loaded.device.type == "cpu" else 2 * CHUNK
    return itemsize * (2 * tokens * widest + tile)


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of the model's parameters; of one without storage, as they would be in the precision that it is laid out for; of one whose weights are kept
    elsewhere, those that are not, and the most that one layer, or the embedding or head, brings in while it runs."""

    def size(p: torch.nn.Parameter) -> int:
        return p.numel() * (loaded.dtype.itemsize if p.is_meta and p.is_floating_point() else p.element_size())

    if not loaded.kept_elsewhere:
        return sum({id(p): size(p) for p in loaded.model.parameters()}.values())
    resident = sum({id(p): size(p) for p in loaded.model.parameters() if not p.is_meta}.values())
    layers = [m for m in loaded.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    passing = [sum(size(p) for p in layer.parameters() if p.is_meta) for layer in layers]
    passing += [size(p) for p in loaded.model.parameters() if p.is_meta and id(p) not in inside]
    return resident + max(passing, default=0)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: on a GPU, or in main memory under this process's control-group limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    if info.is_file():
        free = next(int(line.split()[1]) * 1024 for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
