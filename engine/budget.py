"""From two budgets, bytes per example and bytes of P, to blocks, bits and stage-1 width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.blocks import SCALE_BYTES, BlockKind, BlockLayout, blocks_of
from engine.errors import SettingError
from engine.fit_projection import BITS_PER_DIRECTION, HADAMARD, Progress, fit_projection, operations
from engine.pca import Coordinates
from engine.projection import Method, Projection
from engine.quantised import PER_BYTE
from engine.settings import SketchSettings
from engine.signs import ScaleKind

PAPER_K, PAPER_M = 2048, 8192
DIRECTIONS, REFINE, FLATTEN = 0.65, 2, 0.5  # principal directions per bit, passes over the signs, power of sigma: docs/sketch-design.md
SCRATCH, LEAST_SCRATCH, LEAST_FITTED = 32, 8 * 10**9, 4096  # bytes of float32 coordinates that fitting may spill per byte of P, and in all
_FP16 = 2


class Shaped(Protocol):
    """What a plan needs to know of a tracked module."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def d_out(self) -> int: ...
    @property
    def d_in(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How many bytes P takes: per stage-1 coordinate (`row`) and per block besides (`frame`)."""

    method: Method
    directions: float | None
    quantise: bool
    n_fit: int

    def columns(self, k: int) -> int:
        """Entries of P per stage-1 coordinate, for a block of k bits."""
        return k if self.directions is None else max(min(round(self.directions * k), self.n_fit), 1)

    def row(self, k: int) -> int:
        if self.method == "srht":
            return 0
        return -(-self.columns(k) // PER_BYTE) + _FP16 if self.quantise else _FP16 * self.columns(k)

    def frame(self, k: int) -> int:
        return 0 if self.directions is None else _FP16 * self.columns(k) * k


@dataclass(frozen=True, slots=True)
class SketchPlan:
    """What will be built: blocks {block: modules}, k {block: bits}, m {module: stage-1 coordinates}, and why, in sentences for the user.

    explicit_k: the user fixed k, so that a fit of lower rank refuses instead of reducing it.
    """

    method: Method
    kind: BlockKind
    blocks: dict[str, list[str]]
    k: dict[str, int]
    m: dict[str, int]
    rotate: bool
    scale: ScaleKind
    n_fit: int
    normalise: bool = False
    directions: float | None = None
    refine: int = 0
    flatten: float = 0.0
    quantise: bool = False
    joint: bool = False
    explicit_k: bool = False
    why: list[str] = field(default_factory=list)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(tuple(self.blocks), tuple(self.k.values()))

    @property
    def payload_bytes(self) -> int:
        return self.layout.payload_bytes

    @property
    def projection_bytes(self) -> int:
        """Size of P as it will be stored; 0 for the SRHT."""
        form = StoredForm(self.method, self.directions, self.quantise, self.n_fit)
        return sum(form.frame(self.k[block]) + form.row(self.k[block]) * sum(self.m[name] for name in members) for block, members in self.blocks.items())

    @property
    def operations(self) -> float:
        """Of fitting stage 2, counted as float32 products."""
        return operations(
            self.n_fit,
            {block: sum(self.m[name] for name in members) for block, members in self.blocks.items()},
            self._columns,
            self.method,
            quantise=self.quantise,
        )

    @property
    def entries(self) -> int:
        """Of P, one product and one sum each for every example; for the SRHT what its transforms come to."""
        if self.method == "srht":
            return int(HADAMARD / 2) * sum(self.m.values())
        return sum(self._columns[block] * sum(self.m[name] for name in members) for block, members in self.blocks.items())

    @property
    def _columns(self) -> dict[str, int]:
        form = StoredForm(self.method, self.directions, self.quantise, self.n_fit)
        return {block: form.columns(k) for block, k in self.k.items()}

    def fit(
        self, z: Coordinates, *, seed: int, device: torch.device | str = "cpu", progress: Progress = lambda done, total: None, checkpoint: Path | None = None
    ) -> Projection:
        """Fit stage 2 as planned on z {module: (n, m_u) float32}; see `fit_projection`."""
        return fit_projection(
            z,
            self.blocks,
            self.k,
            rotate=self.rotate,
            scale=self.scale,
            seed=seed,
            explicit_k=self.explicit_k,
            method=self.method,
            normalise=self.normalise,
            directions=self.directions,
            refine=self.refine,
            flatten=self.flatten,
            quantise=self.quantise,
            device=device,
            progress=progress,
            checkpoint=checkpoint,
        )

    def to_json(self) -> dict[str, Any]:
        """For the manifest; blocks by name and size only."""
        return {
            "method": self.method,
            "blocks": self.kind,
            "n_blocks": len(self.blocks),
            "k": self.k,
            "rotate": self.rotate,
            "scale": self.scale,
            "normalise": self.normalise,
            "directions": self.directions,
            "refine": self.refine,
            "flatten": self.flatten,
            "quantise": self.quantise,
            "joint": self.joint,
            "payload_bytes": self.payload_bytes,
            "projection_bytes": self.projection_bytes,
            "why": self.why,
        }


def choose_budget(modules: Sequence[Shaped], settings: SketchSettings, *, n_fit: int) -> SketchPlan:
    """Pick what the settings leave open. n_fit: examples that the PCA is fitted on, the bound on a block's directions.

    Raises SettingError where a budget cannot hold even the smallest sketch, naming the smallest that can.
    """
    if not modules:
        raise SettingError("the model has no tracked module to sketch")
    if n_fit < 1:
        raise SettingError("the projection needs at least one fitting example")
    return _Choice(modules, settings, n_fit).plan()


class _Choice:
    """One pass through the decisions; `why` collects the reasons."""

    def __init__(self, modules: Sequence[Shaped], settings: SketchSettings, n_fit: int) -> None:
        self.pairs = [(u.name, u.layer) for u in modules]
        self.sizes = {u.name: u.d_out * u.d_in for u in modules}
        self.settings = settings
        self.n_fit = n_fit
        self.paper = settings.method == "paper"
        self.method: Method = "srht" if settings.method == "eogp-r" else "pca"
        self.factored = settings.method == "default" and settings.rotate is not False
        self.form = StoredForm(self.method, DIRECTIONS if self.factored else None, self.factored, n_fit)
        self.why: list[str] = []

    def plan(self) -> SketchPlan:
        s = self.settings
        kind = s.blocks or ("module" if self.paper else self._kind())
        blocks = blocks_of(self.pairs, kind)
        if self.paper:
            self.why.append(f"blocks = {kind}, k = {s.k or PAPER_K}, m = {s.m or PAPER_M}: the paper's configuration; the two budgets are not applied")
        k = dict.fromkeys(blocks, s.k or PAPER_K) if s.k is not None or self.paper else self._bits(blocks)
        if self.factored:
            self.why.append(
                f"{DIRECTIONS} principal directions per bit, signs chosen together, coordinates chosen jointly, P at two bits per entry, PCA of normalised gradients, directions weighted by sigma^-{FLATTEN}: what predicted retraining best at equal bytes"
            )
        m = self._widths(blocks, k)
        rotate = s.rotate if s.rotate is not None else not self.paper and self.method == "pca"
        scale: ScaleKind = s.scale or ("unbiased" if rotate or self.method == "srht" else "l1")
        return SketchPlan(
            self.method,
            kind,
            blocks,
            k,
            m,
            rotate,
            scale,
            self.n_fit,
            normalise=self.factored,
            directions=self.form.directions,
            refine=REFINE if self.factored else 0,
            flatten=FLATTEN if self.factored else 0.0,
            quantise=self.form.quantise,
            joint=self.factored,
            explicit_k=s.k is not None,
            why=self.why,
        )

    def _limit(self, coordinates: int) -> int:
        """Most bits of a block that the fitting set can fill."""
        if self.method == "srht":
            return coordinates
        return min(self.n_fit, coordinates) * (BITS_PER_DIRECTION if self.factored else 1)

    def _kind(self) -> BlockKind:
        """The largest blocks whose rank does not waste the bytes per example."""
        budget = self.settings.bytes_per_example
        kinds: tuple[BlockKind, ...] = ("model", "layer", "module")
        chosen: BlockKind = "model"
        for kind in kinds:
            n = len(blocks_of(self.pairs, kind))
            if n * (SCALE_BYTES + 1) > budget:
                break
            chosen = kind
            if (self.settings.k or 8 * max(budget // n - SCALE_BYTES, 0)) <= self._limit(sum(self.sizes.values())):
                break
        n = len(blocks_of(self.pairs, chosen))
        reason = "one PCA over many modules needs the fewest bytes per example for the same quality"
        if chosen != "model":
            reason += (
                f"; a single block could not use {budget} bytes, as {self.n_fit} fitting examples fill at most {self._limit(sum(self.sizes.values()))} bits"
            )
        self.why.append(f"blocks = {chosen} ({n}): {reason}")
        return chosen

    def _bits(self, blocks: Mapping[str, Sequence[str]]) -> dict[str, int]:
        """k of each block: the bytes per example spread evenly; what does not divide goes to the first blocks."""
        budget, n = self.settings.bytes_per_example, len(blocks)
        if budget < n * (SCALE_BYTES + 1):
            raise SettingError(
                f"--bytes-per-example {budget} is too small for {n} blocks, which take at least {n * (SCALE_BYTES + 1)} bytes; raise it or use larger blocks",
                field="bytes_per_example",
            )
        share, extra = divmod(budget - SCALE_BYTES * n, n)
        k = {block: min(8 * (share + (b < extra)), self._limit(sum(self.sizes[name] for name in members))) for b, (block, members) in enumerate(blocks.items())}
        low, high = min(k.values()), max(k.values())
        payload = BlockLayout(tuple(k), tuple(k.values())).payload_bytes
        self.why.append(f"k = {low}{f' to {high}' if high > low else ''} bits per block: {payload} of {budget} bytes per example")
        return k

    def _widths(self, blocks: Mapping[str, Sequence[str]], k: Mapping[str, int]) -> dict[str, int]:
        """Stage-1 coordinates per module: as set, as in the paper, or as wide as P's budget allows, the same for every module that has as many."""
        sizes, budget = self.sizes, self.settings.projection_bytes
        if self.settings.m is not None or self.paper:
            return {name: min(self.settings.m or PAPER_M, size) for name, size in sizes.items()}
        if self.method == "srht":
            return {name: min(PAPER_M, size) for name, size in sizes.items()}
        row = {name: self.form.row(k[block]) for block, members in blocks.items() for name in members}
        frames = sum(self.form.frame(k[block]) for block in blocks)
        least = frames + sum(row.values())
        if budget < least:
            raise SettingError(f"--projection-bytes {budget} is too small: one coordinate per module already takes {least} bytes", field="projection_bytes")
        width = level_width(sizes, row, budget - frames)
        scratch = max(SCRATCH * budget, LEAST_SCRATCH)
        fitted = level_width(sizes, dict.fromkeys(sizes, 4 * max(self.n_fit, LEAST_FITTED)), scratch)
        m = {name: min(width, fitted, size) for name, size in sizes.items()}
        used = frames + sum(row[name] * m[name] for name in sizes)
        if m == sizes:
            self.why.append(f"m = all coordinates: P takes {used / 1e6:.1f} of {budget / 1e6:.0f} MB")
            return m
        self.why.append(
            f"m = {max(m.values())} coordinates per module, {sum(m.values())} of {sum(sizes.values())}: P takes {used / 1e6:.1f} of {budget / 1e6:.0f} MB"
            + (f"; wider would spill more than {scratch / 1e9:.0f} GB while the PCA is fitted" if fitted < width else "")
        )
        return m


def level_width(sizes: Mapping[str, int], cost: Mapping[str, int], budget: int) -> int:
    """The largest width w, at least 1, such that sum of cost * min(size, w) stays within the budget; no module needs more than its size."""
    width, left, open_cost = 1, budget, sum(cost.values())
    for name in sorted(sizes, key=lambda u: sizes[u]):  # modules smaller than the common width keep all and leave the rest to the others
        width = max(left // open_cost, 1)
        if sizes[name] >= width:
            break
        left -= sizes[name] * cost[name]
        open_cost -= cost[name]
    return width
