"""A generation's manifest: everything needed to read the store, check it, and make it again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.blocks import BlockLayout
from engine.errors import StoreError

FORMAT_VERSION = 1
CURRENT, MANIFEST, MANIFEST_HASH, DELETED = "CURRENT", "manifest.json", "manifest.sha256", "deleted.npy"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    """Size in bytes and SHA-256 of one file of the store."""

    size: int
    sha256: str


class SegmentEntry(_Part):
    """A segment's folder name under segments/ and its rows."""

    name: str
    rows: int


class SourceEntry(_Part):
    """An input: its name as given, format, and where it is a file its size and SHA-256 (else the fingerprint of the dataset)."""

    name: str
    format: str
    size: int | None = None
    sha256: str | None = None


class ModelEntry(_Part):
    """The model that the store was built with: where it was, what it does, how it ran, and how to know it again (weights: SHA-256 over every tensor)."""

    source: str = ""
    task: str = "causal-lm"
    dtype: str = "float32"
    attention: str = ""
    fingerprint: dict[str, Any] = Field(default_factory=dict)
    weights: str | None = None
    tracked_share: float | None = None
    skipped: dict[str, str] = Field(default_factory=dict)


class SketchEntry(_Part):
    """What the stored bits mean.

    layout: names and bits of the blocks; c: the factor of each block's stored scales; scale: l1 or unbiased; method: pca or srht; plan: how the
    configuration was chosen (blocks, m, rotation, kept share, reasons); bytes_per_example: codes and scales; shared_bytes: shared/sketch.
    """

    layout: dict[str, Any]
    c: list[float]
    scale: str
    method: str
    plan: dict[str, Any] = Field(default_factory=dict)
    bytes_per_example: int = 0
    shared_bytes: int = 0


class Manifest(_Part):
    """One generation.

    settings: every resolved setting, which given back as a configuration file reproduces the run; model: what it was and how to know it again; data: the inputs,
    which rows refer to by position; coverage_threshold: 5th percentile of the left-out
    rows' coverage; calibration: of the left-out rows, coverage quantiles and `recall`: [{candidates, recall}, ...]; counts: rows, tokens, truncated, bad and flagged rows;
    flagged: row numbers and why; next_row and next_segment: running numbers that are never used twice; files: path under the store -> size and hash.
    """

    format_version: int = FORMAT_VERSION
    software: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    model: ModelEntry = Field(default_factory=ModelEntry)
    data: list[SourceEntry] = Field(default_factory=list)
    sketch: SketchEntry
    coverage_threshold: float | None = None
    calibration: dict[str, Any] | None = None
    counts: dict[str, Any] = Field(default_factory=dict)
    flagged: dict[str, str] = Field(default_factory=dict)
    training_run: dict[str, Any] | None = None
    next_row: int = 0
    next_segment: int = 0
    segments: list[SegmentEntry] = Field(default_factory=list)
    deleted: int = 0
    files: dict[str, FileEntry] = Field(default_factory=dict)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout.from_json(self.sketch.layout)

    @property
    def n_rows(self) -> int:
        """Rows in all segments, deleted and flagged ones included."""
        return sum(s.rows for s in self.segments)

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode("utf-8")


def current_generation(store: Path) -> str:
    """Name of the live generation. Raises StoreError where there is none."""
    path = store / CURRENT
    if not store.is_dir():
        raise StoreError(f"{store}: no such store", code="no-store")
    try:
        name = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        hint = "its indexing was interrupted: run the same `eogp index` again" if (store / "work").is_dir() else "it is not a store, or was never finished"
        raise StoreError(f"{store}: holds no generation ({CURRENT} is missing); {hint}", code="no-store") from None
    except UnicodeDecodeError:
        name = ""
    if not name.isdigit() or not (store / "generations" / name).is_dir():
        raise StoreError(f"{path}: names no generation that exists; the file is damaged", code="damaged-store")
    return name


def read_manifest(store: Path, generation: str) -> Manifest:
    """A generation's manifest, its hash checked. Raises StoreError naming the file."""
    folder = store / "generations" / generation
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        expected = (folder / MANIFEST_HASH).read_bytes().strip()
    except FileNotFoundError as e:
        raise StoreError(f"{e.filename}: missing; the store is damaged", code="damaged-store") from None
    if hashlib.sha256(content).hexdigest().encode() != expected:
        raise StoreError(f"{path}: differs from its hash in {MANIFEST_HASH}; the store is damaged", code="damaged-store")
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as e:
        version = _version(content)
        if version != FORMAT_VERSION:
            raise StoreError(f"{path}: format version {version}; this program reads version {FORMAT_VERSION}", code="store-version") from None
        first = e.errors()[0]
        raise StoreError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}", code="damaged-store") from None
    if manifest.format_version != FORMAT_VERSION:
        raise StoreError(f"{path}: format version {manifest.format_version}; this program reads version {FORMAT_VERSION}", code="store-version")
    return manifest


def _version(content: bytes) -> Any:
    import json

    try:
        return json.loads(content).get("format_version")
    except (ValueError, AttributeError):
        return None
