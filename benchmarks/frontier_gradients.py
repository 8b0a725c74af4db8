"""Whitened gradients of a task's texts on disk, for benchmarks/frontier.py: everything that a compressed method could keep follows from them.

Per split (train, query, disjoint) and module: W = (Q_S^T G Q_A) / sqrt(Lambda + floor) in fp16, near unit variance whatever the module's scale, so that fp16's
range holds it. Half-whitened coordinates at any damping, plain gradients, LoGra's and random projections are products of W; only methods on raw weight
coordinates (GraSS) need the small random sample of G's entries that is kept beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.capture import Capture
from engine.curvature import Curvature
from engine.example import Example, collate, plan_batches
from engine.fit_curvature import fit_curvature
from engine.model import LoadedModel, load_model
from engine.modules import TrackedModule, track
from engine.settings import FitSettings, ModelSettings

FLOOR = 1e-5  # of mean(Lambda), below any damping studied here
MASKED = 4096  # raw weight coordinates per module kept for GraSS
Floats = NDArray[np.float32]


def examples_of(loaded: LoadedModel, path: Path) -> list[Example]:
    """Causal-LM examples of a JSONL file of texts: every token but the first is a target."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = np.array(loaded.tokenizer(row["text"])["input_ids"][: loaded.max_length], np.int64)
        mask = np.ones(len(ids), np.bool_)
        mask[0] = False
        found.append(Example(str(row["id"]), ids, ids, mask, row["text"]))
    return found


@dataclass
class Gradients:
    """What `extract` wrote to `folder`: W per split and module, the curvature, and the texts."""

    folder: Path

    @cached_property
    def curvature(self) -> Curvature:
        return Curvature.load(self.folder / "curvature")

    @cached_property
    def modules(self) -> list[tuple[str, int]]:
        """(name, layer) in forward order."""
        return [(name, layer) for name, layer in json.loads((self.folder / "done.json").read_text())["modules"]]

    @cached_property
    def lam(self) -> dict[str, Floats]:
        """{module: (d_out * d_in,) corrected eigenvalues}."""
        return {name: self.curvature.modules[name].dense_lambda().reshape(-1).numpy() for name, _ in self.modules}

    @cached_property
    def mean(self) -> dict[str, float]:
        return {name: self.curvature.modules[name].mean_lambda for name, _ in self.modules}

    def shape(self, name: str) -> tuple[int, int]:
        return self.curvature.modules[name].d_out, self.curvature.modules[name].d_in

    def stored(self, split: str, name: str) -> NDArray[np.float16]:
        """W (n, d_out * d_in), memory-mapped."""
        return np.load(self.folder / split / f"{name}.npy", mmap_mode="r")

    def masked(self, split: str, name: str) -> Floats:
        """(n, MASKED) entries of G itself at seeded random positions."""
        return np.load(self.folder / split / f"{name}.masked.npy")

    def factor(self, name: str, c: float | None) -> Floats:
        """What W is multiplied by: half-whitening at damping c * mean(Lambda), or None for the plain gradient in the eigenbasis."""
        lam, mean = self.lam[name].astype(np.float64), self.mean[name]
        root = np.sqrt(lam + FLOOR * mean)
        return (root if c is None else root / np.sqrt(lam + c * mean)).astype(np.float32)

    def coordinates(self, split: str, name: str, c: float | None, positions: NDArray[np.int64] | None = None) -> Floats:
        """(n, m) float32 coordinates at flat positions (all where None)."""
        w, factor = self.stored(split, name), self.factor(name, c)
        if positions is None:
            return w.astype(np.float32) * factor
        rows = [w[i : i + 64][:, positions].astype(np.float32) for i in range(0, w.shape[0], 64)]
        return np.concatenate(rows) * factor[positions]


def mask_positions(size: int, number: int) -> NDArray[np.int64]:
    """The raw coordinates of module `number` that GraSS may sample from."""
    return np.sort(np.random.default_rng([7, number]).choice(size, min(MASKED, size), replace=False))


def sweep(loaded: LoadedModel, tracked: Sequence[TrackedModule], curvature: Curvature, examples: Sequence[Example]) -> Iterator[tuple]:
    """(module number, name, rows, E (B, d_out, d_in) in the eigenbasis, G at the masked positions (B, MASKED)) for every batch and module."""
    held: list[tuple] = []
    bases = {m.name: (curvature.modules[m.name].q_s, curvature.modules[m.name].q_a, mask_positions(m.n_parameters, i), i) for i, m in enumerate(tracked)}
    for chosen in plan_batches([len(e) for e in examples], 2048):

        def consume(m: TrackedModule, a: torch.Tensor, delta: torch.Tensor, chosen: list[int] = chosen) -> None:
            q_s, q_a, masked, number = bases[m.name]
            e = (delta @ q_s).transpose(1, 2) @ (a @ q_a)
            g = (delta.transpose(1, 2) @ a).flatten(1)[:, torch.from_numpy(masked)]
            held.append((number, m.name, chosen, e, g))

        Capture(loaded, tracked).run(collate([examples[i] for i in chosen], chosen, loaded.pad_id), consume)
        yield from held
        held.clear()


def extract(model: Path | None, splits: dict[str, Path], folder: Path, *, settings: ModelSettings | None = None, fit_on: str = "train") -> Gradients:
    """Fit EK-FAC on `fit_on` and write every split's gradients; nothing to do where `folder` is whole. Refuses values beyond fp16."""
    mark = folder / "done.json"
    if mark.exists():
        return Gradients(folder)
    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_model(settings or ModelSettings(model=str(model), device="cpu"))
    tracked = track(loaded).tracked
    examples = {split: examples_of(loaded, path) for split, path in splits.items()}
    curvature = fit_curvature(loaded, tracked, examples[fit_on], range(len(examples[fit_on])), FitSettings())
    curvature.save(folder / "curvature")
    tracked = [m for m in tracked if m.name in curvature.modules]
    roots = {m.name: torch.sqrt(curvature.modules[m.name].dense_lambda() + FLOOR * curvature.modules[m.name].mean_lambda) for m in tracked}
    for split, own in examples.items():
        (folder / split).mkdir(exist_ok=True)
        out = {
            m.name: np.lib.format.open_memmap(folder / split / f"{m.name}.npy", mode="w+", dtype=np.float16, shape=(len(own), m.n_parameters)) for m in tracked
        }
        masks = {m.name: np.zeros((len(own), min(MASKED, m.n_parameters)), np.float32) for m in tracked}
        for _, name, rows, e, g in sweep(loaded, tracked, curvature, own):
            w = (e / roots[name]).flatten(1)
            if not bool((w.abs() < 65504).all()):
                raise SystemExit(f"{split} {name}: a whitened gradient does not fit fp16")
            out[name][rows] = w.half().numpy()
            masks[name][rows] = g.numpy()
        for name, values in masks.items():
            out[name].flush()
            np.save(folder / split / f"{name}.masked.npy", values)
        (folder / split / "texts.json").write_text(json.dumps([e.text for e in own]))
    mark.write_text(json.dumps({"modules": [(m.name, m.layer) for m in tracked], "tracked_parameters": sum(m.n_parameters for m in tracked)}))
    return Gradients(folder)
