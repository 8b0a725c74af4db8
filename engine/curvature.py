"""EK-FAC curvature of the tracked modules: eigenbases, corrected eigenvalues and damping; fitted elsewhere, kept and read here.

In the eigenbasis the inverse of equation (2) is a division: influence = sum_{o,i} (Q_S^T G_q Q_A)[o,i] (Q_S^T G_i Q_A)[o,i] / (Lambda[o,i] + lambda).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import StoreError

SUMMARY = "curvature.json"


@dataclass(frozen=True)
class ModuleCurvature:
    """One module's curvature, on the CPU.

    q_s (d_out, d_out), q_a (d_in, d_in) float32: eigenvectors in columns; q_a is the same tensor for modules with the same input_key.
    lambda_s (d_out,), lambda_a (d_in,): eigenvalues of the factors. lam: corrected eigenvalues, (d_out, d_in) float32, or (n,) at `positions` (n,) int64,
    sorted flat o * d_in + i, where the whole grid was too large. mean_lambda: over the whole grid, exact either way. damping = c * mean_lambda (31).
    """

    name: str
    d_out: int
    d_in: int
    q_s: Tensor
    q_a: Tensor
    lam: Tensor
    mean_lambda: float
    damping: float
    lambda_s: Tensor
    lambda_a: Tensor
    input_key: str = ""
    positions: Tensor | None = None

    def lam_at(self, positions: NDArray[np.int64]) -> Tensor:
        """(n,) corrected eigenvalues at flat positions o * d_in + i. On a candidate set every position must be a candidate, else ValueError."""
        wanted = torch.from_numpy(np.ascontiguousarray(positions))
        if self.positions is None:
            return self.lam.reshape(-1)[wanted]
        found = torch.searchsorted(self.positions, wanted).clamp_(max=self.positions.numel() - 1)
        if not torch.equal(self.positions[found], wanted):
            raise ValueError(f"module {self.name}: a selected position is not among the {self.positions.numel()} candidates")
        return self.lam[found]

    def dense_lambda(self) -> Tensor:
        """(d_out, d_in) corrected eigenvalues. Off the candidate set: lambda_S[o] lambda_A[i], scaled so that the mean over the whole grid stays exact."""
        if self.positions is None:
            return self.lam
        product = torch.outer(self.lambda_s, self.lambda_a).reshape(-1)
        product[self.positions] = 0
        rest = max(self.mean_lambda * product.numel() - float(self.lam.sum(dtype=torch.float64)), 0.0)
        total = float(product.sum(dtype=torch.float64))
        product *= rest / total if total > 0 else 0.0
        product[self.positions] = self.lam
        return product.view(self.d_out, self.d_in)


class Curvature:
    """`modules`: name -> ModuleCurvature in forward order, read from disk one at a time where it was loaded; `skipped`: name -> reason; `c`: damping factor."""

    def __init__(self, modules: Mapping[str, ModuleCurvature], skipped: Mapping[str, str], c: float) -> None:
        self.modules = modules
        self.skipped = dict(skipped)
        self.c = c

    def save(self, folder: Path) -> None:
        """Write `folder`/modules-NNNNN.safetensors, one per input group, and curvature.json. Shared eigenvectors are written once per file."""
        folder.mkdir(parents=True, exist_ok=True)
        shapes = self.modules.shapes if isinstance(self.modules, StoredModules) else {n: m.input_key for n, m in self.modules.items()}
        shared: dict[str, list[str]] = {}
        for name, key in shapes.items():
            shared.setdefault(key or name, []).append(name)
        for i, names in enumerate(shared.values()):
            write_modules(folder / f"modules-{i:05d}.safetensors", [self.modules[name] for name in names], {})
        write_json(folder / SUMMARY, {"c": self.c, "skipped": self.skipped, "order": list(shapes)})

    @classmethod
    def load(cls, folder: Path, *, c: float | None = None) -> Curvature:
        """Inverse of `save`, reading tensors when asked for them. c: another damping factor than the one fitted with. Raises StoreError."""
        try:
            summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
            c = float(summary["c"]) if c is None else c
            modules = StoredModules.scan(folder, c)
            return cls(modules.ordered(summary["order"]), summary["skipped"], c)
        except (OSError, ValueError, KeyError) as e:
            raise StoreError(f"curvature in {folder} cannot be read ({type(e).__name__}: {e}); fit it again") from None

    def with_damping(self, c: float) -> Curvature:
        """The same curvature with damping c * mean(Lambda)."""
        if isinstance(self.modules, StoredModules):
            return Curvature(StoredModules(self.modules.where, c), self.skipped, c)
        return Curvature({n: replace(m, damping=c * m.mean_lambda) for n, m in self.modules.items()}, self.skipped, c)


class StoredModules(Mapping[str, ModuleCurvature]):
    """Modules in safetensors files: `where` {name: (file, description)}; a tensor's pages are read when it is used."""

    def __init__(self, where: Mapping[str, tuple[Path, dict[str, Any]]], c: float) -> None:
        self.where = dict(where)
        self.c = c

    @classmethod
    def scan(cls, folder: Path, c: float) -> StoredModules:
        """All modules in a folder's whole files. Raises StoreError for a damaged one."""
        where: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            where |= {name: (path, described) for name, described in read_header(path)["modules"].items()}
        return cls(where, c)

    @property
    def shapes(self) -> dict[str, str]:
        """{name: input key} without reading tensors."""
        return {name: described["input_key"] for name, (_, described) in self.where.items()}

    def ordered(self, names: Sequence[str]) -> StoredModules:
        """Only `names`, in that order; KeyError for one that is missing."""
        return StoredModules({name: self.where[name] for name in names}, self.c)

    def __getitem__(self, name: str) -> ModuleCurvature:
        path, d = self.where[name]
        with safe_open(path, framework="pt") as file:
            return ModuleCurvature(
                name=name,
                d_out=d["d_out"],
                d_in=d["d_in"],
                q_s=file.get_tensor(f"{name}/q_s"),
                q_a=file.get_tensor(f"{d['input_key']}/q_a"),
                lam=file.get_tensor(f"{name}/lam"),
                mean_lambda=d["mean_lambda"],
                damping=self.c * d["mean_lambda"],
                lambda_s=file.get_tensor(f"{name}/lambda_s"),
                lambda_a=file.get_tensor(f"{d['input_key']}/lambda_a"),
                input_key=d["input_key"],
                positions=file.get_tensor(f"{name}/positions") if d["on_candidates"] else None,
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def write_modules(path: Path, modules: Sequence[ModuleCurvature], skipped: Mapping[str, str]) -> None:
    """One safetensors file, complete or absent: written under another name, synced, renamed."""
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for m in modules:
        key = m.input_key or m.name
        tensors |= {f"{m.name}/q_s": m.q_s, f"{m.name}/lam": m.lam, f"{m.name}/lambda_s": m.lambda_s, f"{key}/q_a": m.q_a, f"{key}/lambda_a": m.lambda_a}
        if m.positions is not None:
            tensors[f"{m.name}/positions"] = m.positions
        described[m.name] = {"d_out": m.d_out, "d_in": m.d_in, "mean_lambda": m.mean_lambda, "input_key": key, "on_candidates": m.positions is not None}
    partial = path.with_name(path.name + ".partial")
    header = {"described": json.dumps({"modules": described, "skipped": dict(skipped)})}  # one key, since several are written in random order
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata=header)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def read_header(path: Path) -> dict[str, Any]:
    """{"modules": {name: description}, "skipped": {name: reason}} of one file. Raises StoreError where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads(file.metadata()["described"])
        return {key: found[key] for key in ("modules", "skipped")}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as e:
        raise StoreError(f"curvature file {path} is damaged ({type(e).__name__}: {e}); delete it and fit again") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A JSON file, complete or absent."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
