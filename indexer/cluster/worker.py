"""What runs on a node: one copy of the model, asked for module groups, stage-1 coordinates and sketches. It keeps nothing that the driver could not send again."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from engine.coordinates import CoordinateMap
from engine.errors import ModelError, SettingError
from engine.example import Example, collate
from engine.fit_curvature import fit_curvature
from engine.memory import free_memory
from engine.model import fingerprint_mismatch, load_model
from engine.modules import track
from engine.settings import FitSettings
from engine.signs import Sketch
from engine.sketcher import Sketcher
from engine.store.rows import examples_of
from indexer.versions import versions

Files = dict[str, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Sent:
    """Something that the driver put into the object store: `ref`, under a name that says when a worker has it already. Workers fetch it once."""

    name: str
    ref: Any


def read_files(folder: Path) -> Files:
    """All files of a folder as arrays of bytes, by name."""
    return {p.name: np.fromfile(p, np.uint8) for p in sorted(folder.iterdir()) if p.is_file()}


class Worker:
    """One model on one GPU or a few CPU threads. share: of the node's free memory that this worker may fit in."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._folder = tempfile.TemporaryDirectory(prefix="eogp-worker-")
        self.folder = Path(self._folder.name)
        self.held: dict[str, tuple[str, Any]] = {}

    def start(self, sent: Sent) -> str:
        """Load the model and hold it against the driver's; the node's address. Raises ModelError or SettingError naming the node."""
        settings, expected, fingerprint = ray.get(sent.ref)
        node = ray.util.get_node_ip_address()
        found = versions()
        for name, wanted in expected.items():
            if found[name] != wanted:
                raise SettingError(f"node {node} has {name} {found[name]}, and {wanted} is here; results would differ in their last bits", field="ray")
        try:
            self.loaded = load_model(settings, check_dtype=False)
        except ModelError as e:
            raise ModelError(f"node {node}: {e.message}", field="model") from None
        difference = fingerprint_mismatch(fingerprint, self.loaded.fingerprint)
        if difference:
            raise ModelError(f"node {node}: {settings.model} is not the model that it is here: {difference}", field="model")
        self.tracked = track(self.loaded).tracked
        return str(node)

    def fit(self, names: Sequence[str], sample: Sent, settings: FitSettings) -> list[NDArray[np.uint8]]:
        """Curvature of some modules on all fitting examples: the files that a fit without a cluster leaves as its checkpoint."""
        examples, rows = self._fetched("sample", sample, lambda found: found)
        folder = self.folder / "curvature"
        shutil.rmtree(folder, ignore_errors=True)
        free = int(self.share * free_memory(self.loaded.device))
        fit_curvature(self.loaded, self.tracked, examples, rows, settings, checkpoint=folder, only=set(names), free=free)
        return [np.fromfile(p, np.uint8) for p in sorted(folder.glob("group-*.safetensors"))]

    def coordinates(self, sent: Sent, examples: Sequence[Example], rows: Sequence[int]) -> NDArray[np.float32]:
        """(B, sum of m_u): one batch's stage-1 coordinates, modules side by side in the map's order."""
        at: CoordinateMap = self._fetched("coordinates", sent, lambda files: CoordinateMap.load(self._unpacked("coordinates", files), self.loaded))
        found = at(collate(examples, rows, self.loaded.pad_id, self.loaded.device))
        return np.concatenate([z.float().cpu().numpy() for z in found.values()], axis=1)

    def sketch(self, sent: Sent, table: pa.Table, batch_tokens: int) -> tuple[Sketch, float]:
        """The sketches of one prepared shard, and the seconds that the model was at work."""

        def load(files: Files) -> Sketcher:
            return Sketcher.load(self._unpacked("sketcher", files), self.loaded, batch_tokens=batch_tokens)

        sketcher: Sketcher = self._fetched("sketcher", sent, load)
        examples, rows = examples_of(table), [int(r) for r in table.column("row").to_pylist()]
        started = time.perf_counter()
        return sketcher.sketch(examples, rows), time.perf_counter() - started

    def _fetched(self, kind: str, sent: Sent, make: Callable[[Any], Any]) -> Any:
        """What `make` makes of a sent object; the last one of each kind is kept."""
        if kind not in self.held or self.held[kind][0] != sent.name:
            self.held.pop(kind, None)
            self.held[kind] = (sent.name, make(ray.get(sent.ref)))
        return self.held[kind][1]

    def _unpacked(self, kind: str, files: Files) -> Path:
        folder = self.folder / kind
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in files.items():
            content.tofile(folder / name)
        return folder
