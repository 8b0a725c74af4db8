"""Our sketches of a task, from the kernels of benchmarks/frontier_kernels.py (EOGP-R: from coordinates), with the engine's own spectrum, rotation, signs and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from frontier_baselines import Row
from frontier_gradients import Gradients
from frontier_kernels import Kernels
from numpy.typing import NDArray

from engine.blocks import BlockKind, BlockLayout, blocks_of
from engine.budget import SketchPlan
from engine.fit_projection import fit_projection, project_rows
from engine.pca import flattening, random_frame, random_rotation, spectrum
from engine.refine import refine_signs
from engine.signs import ScaleKind, block_scales, decode, encode, geometric_mean_scale

DROP = 1e-3  # the kernels are sums of float32 products
Fit = Literal["train", "disjoint"]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Plan:
    """One configuration. k: bits per block, or a total for `spread` by spectrum; width: a stage-1 width that the kernels hold; directions, refine: a frame of
    k columns over directions * k principal directions, with so many passes over the signs; flatten: directions weighted by sigma^-flatten (engine.projection)."""

    kind: BlockKind
    k: int
    width: int
    rotate: bool = False
    scale: ScaleKind = "l1"
    normalise: bool = False
    spread: bool = False
    float16: bool = False
    directions: float | None = None
    refine: int = 0
    flatten: float = 0.0

    @property
    def label(self) -> str:
        parts = [f"per {self.kind}", f"k={self.k}" + (" spread" if self.spread else ""), f"m={self.width:,}"]
        parts += [f"frame of {self.directions:g} k directions, {self.refine} passes"] if self.directions else []
        parts += [f"flattened {self.flatten:g}"] if self.flatten else []
        parts += ["rotated"] * self.rotate + ["unbiased"] * (self.scale == "unbiased") + ["normalised"] * self.normalise + ["fp16" if self.float16 else "1 bit"]
        return "EOGP " + ", ".join(parts)


@dataclass
class Coordinates:
    """PCA coordinates of every text in every block at full rank: x (n, r) per block and its singular values."""

    x: list[Floats]
    singular: list[NDArray[np.float64]]


@dataclass
class Lab:
    """Sketches of one task. modules: (name, layer); sizes: coordinates per module."""

    kernels: Kernels
    modules: Sequence[tuple[str, int]]
    sizes: Mapping[str, int]
    _held: tuple[object, Coordinates] | None = field(default=None, repr=False)

    def coordinates(self, kind: BlockKind, width: int, fit: Fit, normalise: bool = False) -> Coordinates:
        """PCA fitted on the split `fit`; the last one asked for is kept."""
        key = (kind, width, fit, normalise)
        if self._held is not None and self._held[0] == key:
            return self._held[1]
        rows = self.kernels.rows(fit)
        blocks = list(blocks_of(self.modules, kind).values())
        weights = np.ones(rows.stop - rows.start)
        if normalise:
            weights = 1 / np.sqrt(np.diagonal(self.kernels.block([name for name, _ in self.modules], width))[rows])
        x, singular = [], []
        for names in blocks:
            k = self.kernels.block(names, width)
            gram = k[rows, rows] * weights[:, None] * weights
            found = spectrum(torch.from_numpy(gram), drop=DROP)
            left = weights[:, None] * found.vectors.numpy() / found.singular
            x.append((k[:, rows] @ left).astype(np.float32))
            singular.append(found.singular)
        self._held = (key, Coordinates(x, singular))
        return self._held[1]

    def scores(self, plan: Plan, fit: Fit, *, seed: int = 0) -> Row:
        """The row of one plan: scores (queries, training texts) by equation (14), bytes per example, bytes of P."""
        c = self.coordinates(plan.kind, plan.width, fit, plan.normalise)
        blocks = blocks_of(self.modules, plan.kind)
        k = spread_bits(c.singular, plan.k) if plan.spread else [plan.k if plan.directions else min(plan.k, s.size) for s in c.singular]
        layout = BlockLayout(tuple(blocks), tuple(k))
        train, query = self.kernels.rows("train"), self.kernels.rows("query")
        parts, signs, entries = [], [], 0
        for b, (x, bits, names) in enumerate(zip(c.x, k, blocks.values(), strict=True)):
            rng = np.random.default_rng([seed, b])
            d = bits if plan.directions is None else min(round(plan.directions * bits), x.shape[1])
            own = x[:, :d]
            if plan.flatten:
                own = own * flattening(c.singular[b], d, plan.flatten).astype(np.float32)
            if plan.directions is not None:
                frame = random_frame(d, bits, rng).float().numpy()
                own = np.ascontiguousarray(own @ frame)
                signs.append(refine_signs(own[train], frame.T @ frame, plan.refine))
            elif plan.rotate:
                own = own @ random_rotation(bits, rng).float().numpy()
            parts.append(own)
            entries += sum(d * min(plan.width, self.sizes[name]) for name in names) + (d * bits if plan.directions else 0)
        x = np.concatenate(parts, axis=1)
        stored, asked = x[train], x[query]
        if plan.float16:
            kept = stored.astype(np.float16).astype(np.float32)
            return Row(plan.label, "EOGP", 2 * layout.total_k, 2 * entries, scores=(asked @ kept.T).astype(np.float64))
        chosen = np.concatenate(signs, axis=1) if signs else None
        fitted = geometric_mean_scale(block_scales(stored, layout, plan.scale, chosen))  # of the stored rows here; c only centres fp16's range
        kept = decode(*encode(stored, layout, fitted, plan.scale, chosen), layout, fitted)
        return Row(plan.label, "EOGP", layout.payload_bytes, 2 * entries, one_bit=True, scores=(asked @ kept.T).astype(np.float64))


def plan_of(chosen: SketchPlan, widths: Sequence[int]) -> Plan:
    """A plan of the engine's at the nearest (by ratio) stage-1 width that the kernels hold for its blocks; the largest also stands for anything wider."""
    width = min(widths, key=lambda w: abs(float(np.log(w / np.mean(list(chosen.m.values()))))))
    return Plan(
        chosen.kind,
        min(chosen.k.values()),
        width,
        rotate=chosen.rotate and chosen.directions is None,
        scale=chosen.scale,
        normalise=chosen.normalise,
        directions=chosen.directions,
        refine=chosen.refine,
        flatten=chosen.flatten,
    )


def spread_bits(singular: Sequence[NDArray[np.float64]], total: int) -> list[int]:
    """Bits per block when `total` goes to the directions with the largest singular values of all blocks together, in whole bytes; at least 8 each."""
    every = np.sort(np.concatenate(singular))[::-1]
    level = every[min(total, every.size) - 1]
    return [int(min(max(8 * round(float((s >= level).sum()) / 8), 8), s.size)) for s in singular]


def srht_rows(g: Gradients, c: float, width: int = 8192) -> dict[str, Row]:
    """EOGP-R: a subsampled randomised Hadamard transform per module, or of the whole model, of the top `width` coordinates; no P to store."""
    ks = {"module": (32, 128, 512, 2048), "model": (112, 496, 1008, 2032, 8176)}
    names = [name for name, _ in g.modules]
    z: dict[str, dict[str, Floats]] = {}
    for name in names:
        top = np.sort(np.argsort(-g.lam[name], kind="stable")[:width])
        z[name] = {split: g.coordinates(split, name, c, top) for split in ("train", "query")}
    found = {}
    kinds: tuple[BlockKind, ...] = ("module", "model")
    for kind in kinds:
        for k in ks[kind]:
            projection = fit_projection({n: z[n]["train"] for n in names}, blocks_of(g.modules, kind), k, method="srht", scale="unbiased")
            x = {split: project_rows(projection, {n: z[n][split] for n in names}) for split in ("train", "query")}
            layout = projection.layout
            kept = decode(*encode(x["train"], layout, projection.c, projection.scale), layout, projection.c)
            label = f"EOGP-R per {kind}, k={k}, m={width:,}"
            found[f"{label}, 1 bit"] = Row(f"{label}, 1 bit", "EOGP-R", layout.payload_bytes, 0, one_bit=True, scores=(x["query"] @ kept.T).astype(np.float64))
            full = x["train"].astype(np.float16).astype(np.float32)
            found[f"{label}, fp16"] = Row(f"{label}, fp16", "EOGP-R", 2 * layout.total_k, 0, scores=(x["query"] @ full.T).astype(np.float64))
    return found
