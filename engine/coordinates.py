"""Stage 1: the selected coordinates of each example's half-whitened gradient in the eigenbasis.

t = (Q_S^T G Q_A) / sqrt(Lambda + lambda), restricted to the selected positions o * d_in + i. Only the columns of Q_A and Q_S that the selection
uses are multiplied, and the order of multiplications follows the shapes (engine.rotated).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.capture import Capture, Captured
from engine.errors import ModelError, StoreError
from engine.example import Batch
from engine.loss import Labels, LossStats
from engine.model import LoadedModel
from engine.modules import TrackedModule, track
from engine.placement import device_of
from engine.readahead import ReadAhead, tensor_ranges
from engine.rotated import Sides, by_position, rotate, selected

Selection = dict[str, NDArray[np.int64]]
ConsumeCoordinates = Callable[[str, Tensor], None]
_TENSORS, _TABLE = "coordinates.safetensors", "coordinates.json"


@dataclass
class ModuleMap:
    """Stage 1 of one module.

    q_s (d_out, r_s), q_a (d_in, r_a): the used columns of the eigenbases (q_a is shared in an input group, so it may hold more columns than this module
    uses). rows (m,), columns (m,) int64: each coordinate's column in q_s and q_a. positions (m,) int64: o * d_in + i. lam (m,) float32: corrected
    eigenvalues there. damping: lambda_u.
    """

    tracked: TrackedModule
    q_s: Tensor
    q_a: Tensor
    rows: Tensor
    columns: Tensor
    positions: NDArray[np.int64]
    lam: Tensor
    damping: float
    group: str

    def __post_init__(self) -> None:
        self.inverse_root = (self.lam.double() + self.damping).rsqrt().to(self.lam.dtype)
        self.flat = self.rows * self.q_a.shape[1] + self.columns


class CoordinateMap:
    """batch -> {module: (B, m_u)} stage-1 coordinates, streamed module by module in the order of the backward pass."""

    def __init__(self, loaded: LoadedModel, maps: Mapping[str, ModuleMap], ahead: ReadAhead | None = None) -> None:
        self.loaded = loaded
        self.maps = dict(maps)
        self.capture = Capture(loaded, [m.tracked for m in self.maps.values()])
        self.ahead = ahead
        names = list(self.maps)
        self.following: dict[str, str | None] = dict(zip(names, [None, *names[:-1]], strict=True))  # in the order of the backward pass

    @classmethod
    def from_curvature(cls, loaded: LoadedModel, curvature: Any, selection: Selection) -> CoordinateMap:
        """Keep what `selection` needs of a fitted Curvature; modules without a selected position are left out."""
        parts = {}
        for name, positions in selection.items():
            if len(positions):
                c = curvature.modules[name]
                lam = c.lam_at(positions) if hasattr(c, "lam_at") else torch.as_tensor(c.lam).reshape(-1)[torch.from_numpy(positions)]
                parts[name] = (np.asarray(positions, np.int64), torch.as_tensor(lam), float(c.damping))
        tracked = {t.name: t for t in track(loaded).tracked}
        columns = _used_columns(tracked, {name: p[0] for name, p in parts.items()})
        maps = {}
        bases: dict[str, Tensor] = {}
        for name, (positions, lam, damping) in parts.items():
            t, c = tracked[name], curvature.modules[name]
            group, used = columns[name]
            device, dtype = _compute(loaded, t)
            if group not in bases:
                bases[group] = torch.as_tensor(c.q_a)[:, torch.from_numpy(used)].to(device, dtype).contiguous()
            used_rows = np.unique(positions // t.d_in)
            q_s = torch.as_tensor(c.q_s)[:, torch.from_numpy(used_rows)].to(device, dtype).contiguous()
            maps[name] = _map(t, positions, used_rows, used, q_s, bases[group], lam.to(device, dtype), damping, group)
        return cls(loaded, {t.name: maps[t.name] for t in tracked.values() if t.name in maps})

    @property
    def modules(self) -> list[TrackedModule]:
        return [m.tracked for m in self.maps.values()]

    @property
    def widths(self) -> dict[str, int]:
        """m_u of each module."""
        return {name: len(m.positions) for name, m in self.maps.items()}

    def stream(self, batch: Batch, consume: ConsumeCoordinates, *, per_position: bool = False, labels: Labels = "true", seed: int = 0) -> LossStats:
        """Call consume(name, z) once per module: z (B, m_u) float32 (float64 for a float64 model), or (B, T, m_u) per position, which sums to it over T."""
        rotated: dict[str, tuple[Tensor, Tensor]] = {}
        left = Counter(m.group for m in self.maps.values())
        sharers = dict(left)

        def project(c: Captured) -> None:
            m = self.maps[c.module.name]
            if self.ahead is not None:
                self.ahead.will_need(self.following[c.module.name])
            q_s, q_a = m.q_s.to(m.flat.device), m.q_a.to(m.flat.device)

            def rotated_a() -> Tensor:
                held = rotated.get(m.group)
                if held is None or held[0].data_ptr() != c.a.data_ptr():
                    held = rotated[m.group] = (c.a, rotate(c.a, q_a, c.module.bias))
                return held[1]

            sides = Sides(c.a, c.delta.to(q_s.dtype), q_a, q_s, c.module.bias, rotated_a, sharers[m.group])
            if per_position:
                z = _by_place(by_position(sides, m.rows, m.columns) * m.inverse_root, c.positions, batch.input_ids.shape[1])
            else:
                z = selected(sides, m.flat).mul_(m.inverse_root)
            left[m.group] -= 1
            if not left[m.group]:
                rotated.pop(m.group, None)
            consume(c.module.name, z)

        return self.capture.stream(batch, project, labels=labels, seed=seed)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """All modules at once: {module: (B, m_u)}."""
        found: dict[str, Tensor] = {}
        self.stream(batch, found.__setitem__)
        return {name: found[name] for name in self.maps}

    def save(self, folder: Path) -> None:
        """coordinates.safetensors (used columns, positions, eigenvalues) and coordinates.json (shapes, groups, damping)."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        table: dict[str, Any] = {}
        for name, m in self.maps.items():
            tensors[f"{name}/q_s"] = m.q_s.contiguous()
            tensors[f"{name}/positions"] = torch.from_numpy(np.ascontiguousarray(m.positions))
            tensors[f"{name}/lam"] = m.lam
            tensors.setdefault(f"{m.group}//q_a", m.q_a.contiguous())
            t = m.tracked
            table[name] = {"group": m.group, "d_out": t.d_out, "d_in": t.d_in, "bias": t.bias, "layer": t.layer, "damping": m.damping}
        used = {m.group: columns for m, columns in ((m, self._columns(m)) for m in self.maps.values())}
        for group, columns in used.items():
            tensors[f"{group}//columns"] = columns
        save_file({key: value.cpu() for key, value in tensors.items()}, folder / _TENSORS)
        (folder / _TABLE).write_text(json.dumps({"format": 1, "modules": table}, indent=1), encoding="utf-8")

    def _columns(self, m: ModuleMap) -> Tensor:
        """Columns of Q_A that the group's q_a holds."""
        found = torch.full((m.q_a.shape[1],), -1, dtype=torch.int64)
        for other in self.maps.values():
            if other.group == m.group:
                found[other.columns.cpu()] = torch.from_numpy(other.positions % other.tracked.d_in)
        return found

    @classmethod
    def load(cls, folder: Path, loaded: LoadedModel) -> CoordinateMap:
        """Inverse of `save`. The bases of a model that is kept elsewhere stay in the mapped file, each on its device only while it is used.

        Raises StoreError for missing files, ModelError where the model has other modules than those stored.
        """
        try:
            table = json.loads((folder / _TABLE).read_text(encoding="utf-8"))["modules"]
            tensors = load_file(folder / _TENSORS)
        except (OSError, ValueError, KeyError) as e:
            raise StoreError(f"cannot read the stage-1 coordinates in {folder}: {e}") from None
        tracked = {t.name: t for t in track(loaded).tracked}
        maps = {}
        bases: dict[str, Tensor] = {}
        for name, row in table.items():
            t = tracked.get(name)
            if t is None or (t.d_out, t.d_in, t.bias) != (row["d_out"], row["d_in"], row["bias"]):
                raise ModelError(f"the store was built with a module {name} of {row['d_out']} x {row['d_in']}, which the loaded model does not have")
            device, dtype = _compute(loaded, t)
            group, home = row["group"], torch.device("cpu") if loaded.kept_elsewhere else device
            if group not in bases:
                bases[group] = tensors[f"{group}//q_a"].to(home, dtype)
            positions = tensors[f"{name}/positions"].numpy()
            used_rows = np.unique(positions // t.d_in)
            q_s, lam = tensors[f"{name}/q_s"].to(home, dtype), tensors[f"{name}/lam"].to(device, dtype)
            maps[name] = _map(t, positions, used_rows, tensors[f"{group}//columns"].numpy(), q_s, bases[group], lam, row["damping"], group)
        if not loaded.kept_elsewhere:
            return cls(loaded, maps)
        parts = {name: (f"{name}/q_s", f"{row['group']}//q_a") for name, row in table.items()}
        return cls(loaded, maps, ReadAhead(folder / _TENSORS, tensor_ranges(folder / _TENSORS, parts)))


def _compute(loaded: LoadedModel, t: TrackedModule) -> tuple[torch.device, torch.dtype]:
    """Where a module's projection lives and its precision: float32, or float64 for a float64 model."""
    return device_of(t.module), torch.float64 if loaded.dtype == torch.float64 else torch.float32


def _used_columns(tracked: Mapping[str, TrackedModule], positions: Selection) -> dict[str, tuple[str, NDArray[np.int64]]]:
    """For each module its group and the union of the columns of Q_A that the group's modules use."""
    unknown = sorted(set(positions) - set(tracked))
    if unknown:
        raise ModelError(f"module {unknown[0]} was selected, and the loaded model does not track it")
    union: dict[str, NDArray[np.int64]] = {}
    for name, p in positions.items():
        group = tracked[name].input_group
        columns = np.unique(p % tracked[name].d_in)
        union[group] = np.union1d(union[group], columns) if group in union else columns
    return {name: (tracked[name].input_group, union[tracked[name].input_group]) for name in positions}


def _map(
    t: TrackedModule,
    positions: NDArray[np.int64],
    used_rows: NDArray[np.int64],
    used_columns: NDArray[np.int64],
    q_s: Tensor,
    q_a: Tensor,
    lam: Tensor,
    damping: float,
    group: str,
) -> ModuleMap:
    rows = torch.from_numpy(np.searchsorted(used_rows, positions // t.d_in)).to(lam.device)
    columns = torch.from_numpy(np.searchsorted(used_columns, positions % t.d_in)).to(lam.device)
    return ModuleMap(t, q_s, q_a, rows, columns, positions, lam, damping, group)


def _by_place(z: Tensor, positions: Tensor | None, length: int) -> Tensor:
    """(B, T', m) -> (B, T, m) over the text's T places: the calls of a module that is used twice are added, one vector per example counts for place 0."""
    if positions is None and z.shape[1] == length:
        return z
    if positions is None and z.shape[1] % length == 0:
        return z.view(len(z), -1, length, z.shape[2]).sum(1)
    if positions is None:
        positions = torch.zeros(z.shape[:2], dtype=torch.int64, device=z.device)
    return z.new_zeros((len(z), length, z.shape[2])).scatter_add_(1, positions[..., None].expand_as(z), z)
