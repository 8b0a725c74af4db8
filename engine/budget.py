"""From two budgets, bytes per example and bytes of P, to blocks, bits and stage-1 width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.blocks import SCALE_BYTES, BlockKind, BlockLayout, blocks_of
from engine.errors import SettingError
from engine.fit_projection import fit_projection
from engine.pca import Coordinates
from engine.projection import Method, Projection
from engine.settings import SketchSettings
from engine.signs import ScaleKind

PAPER_K, PAPER_M = 2048, 8192
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
    normalise: bool = False
    directions: float | None = None
    refine: int = 0
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
        """Size of P in fp16; 0 for the SRHT."""
        return 0 if self.method == "srht" else _FP16 * sum(self.k[block] * self.m[name] for block, members in self.blocks.items() for name in members)

    def fit(self, z: Coordinates, *, seed: int, device: torch.device | str = "cpu") -> Projection:
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
            quantise=self.quantise,
            device=device,
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
            "quantise": self.quantise,
            "joint": self.joint,
            "payload_bytes": self.payload_bytes,
            "projection_bytes": self.projection_bytes,
            "why": self.why,
        }


def choose_budget(modules: Sequence[Shaped], settings: SketchSettings, *, n_fit: int) -> SketchPlan:
    """Pick what the settings leave open. n_fit: examples that the PCA is fitted on, the bound on a block's bits.

    Raises SettingError where a budget cannot hold even the smallest sketch, naming the smallest that can.
    """
    if not modules:
        raise SettingError("the model has no tracked module to sketch")
    if n_fit < 1:
        raise SettingError("the projection needs at least one fitting example")
    why: list[str] = []
    paper = settings.method == "paper"
    method: Method = "srht" if settings.method == "eogp-r" else "pca"
    kind = settings.blocks or ("module" if paper else _choose_blocks(modules, settings, n_fit, method, why))
    blocks = blocks_of([(u.name, u.layer) for u in modules], kind)
    if paper and settings.blocks is None:
        why.append(f"blocks = module, k = {settings.k or PAPER_K}, m = {settings.m or PAPER_M}: the paper's configuration; the two budgets are not applied")
    sizes = {u.name: u.d_out * u.d_in for u in modules}
    k = _bits(blocks, sizes, settings, n_fit, method, paper, why)
    m = _widths(blocks, sizes, k, settings, method, paper, why)
    rotate = settings.rotate if settings.rotate is not None else not paper and method == "pca"
    scale: ScaleKind = settings.scale or ("l1" if paper or not (rotate or method == "srht") else "unbiased")
    return SketchPlan(method, kind, blocks, k, m, rotate, scale, explicit_k=settings.k is not None, why=why)


def _choose_blocks(modules: Sequence[Shaped], settings: SketchSettings, n_fit: int, method: Method, why: list[str]) -> BlockKind:
    """The largest blocks whose rank does not waste the bytes per example."""
    kinds: tuple[BlockKind, ...] = ("model", "layer", "module")
    pairs = [(u.name, u.layer) for u in modules]
    fitting: BlockKind = "model"
    for kind in kinds:
        blocks = blocks_of(pairs, kind)
        if len(blocks) * (SCALE_BYTES + 1) > settings.bytes_per_example:
            break
        fitting = kind
        bits = settings.k or _even_bits(len(blocks), settings.bytes_per_example)
        if method == "srht" or bits <= n_fit:
            break
    n = len(blocks_of(pairs, fitting))
    why.append(
        f"blocks = {fitting} ({n}): one PCA over many modules needs the fewest bytes per example for the same quality"
        + (
            ""
            if fitting == "model"
            else f"; a single block could not use {settings.bytes_per_example} bytes, as {n_fit} fitting examples span at most {n_fit} bits each"
        )
    )
    return fitting


def _even_bits(n_blocks: int, budget: int) -> int:
    return 8 * max(budget // n_blocks - SCALE_BYTES, 0)


def _bits(
    blocks: Mapping[str, Sequence[str]], sizes: Mapping[str, int], settings: SketchSettings, n_fit: int, method: Method, paper: bool, why: list[str]
) -> dict[str, int]:
    """k of each block: as set, as in the paper, or the bytes per example spread evenly; whole bytes go to the first blocks."""
    if settings.k is not None or paper:
        return dict.fromkeys(blocks, settings.k or PAPER_K)
    least = len(blocks) * (SCALE_BYTES + 1)
    if settings.bytes_per_example < least:
        raise SettingError(
            f"--bytes-per-example {settings.bytes_per_example} is too small for {len(blocks)} blocks, which take at least {least} bytes; raise it or use larger blocks",
            field="bytes_per_example",
        )
    code_bytes = settings.bytes_per_example - SCALE_BYTES * len(blocks)
    share, extra = divmod(code_bytes, len(blocks))
    k: dict[str, int] = {}
    for b, (block, members) in enumerate(blocks.items()):
        limit = sum(sizes[name] for name in members)
        k[block] = min(8 * (share + (b < extra)), limit if method == "srht" else min(n_fit, limit))
    payload = BlockLayout(tuple(k), tuple(k.values())).payload_bytes
    why.append(
        f"k = {min(k.values())}"
        + (f" to {max(k.values())}" if len(set(k.values())) > 1 else "")
        + f" bits per block: {payload} of {settings.bytes_per_example} bytes per example"
    )
    return k


def _widths(
    blocks: Mapping[str, Sequence[str]], sizes: Mapping[str, int], k: Mapping[str, int], settings: SketchSettings, method: Method, paper: bool, why: list[str]
) -> dict[str, int]:
    """Stage-1 coordinates per module: as set, as in the paper, or as wide as P's budget allows, the same for every module that has as many."""
    if settings.m is not None or paper:
        return {name: min(settings.m or PAPER_M, size) for name, size in sizes.items()}
    if method == "srht":
        return {name: min(PAPER_M, size) for name, size in sizes.items()}
    bits = {name: k[block] for block, members in blocks.items() for name in members}
    entries = settings.projection_bytes // _FP16
    if entries < sum(bits.values()):
        raise SettingError(
            f"--projection-bytes {settings.projection_bytes} is too small: one coordinate per module already takes {_FP16 * sum(bits.values())} bytes",
            field="projection_bytes",
        )
    width, left, open_bits = 0, entries, sum(bits.values())
    for name in sorted(sizes, key=lambda u: sizes[u]):  # modules smaller than the common width keep all and leave the rest to the others
        width = max(left // open_bits, 1)
        if sizes[name] >= width:
            break
        left -= sizes[name] * bits[name]
        open_bits -= bits[name]
    m = {name: min(width, size) for name, size in sizes.items()}
    whole = all(m[name] == size for name, size in sizes.items())
    used = _FP16 * sum(bits[name] * m[name] for name in sizes)
    why.append(
        f"m = {'all coordinates' if whole else f'{width} coordinates per module'}: P takes {used / 1e6:.1f} of {settings.projection_bytes / 1e6:.0f} MB"
        + ("" if whole else f" and stage 1 keeps {sum(m.values())} of {sum(sizes.values())} coordinates")
    )
    return m
