"""`eogp verify`: every file of the live generation against its hash, and the model against the one that the store was built with."""

from __future__ import annotations

from pathlib import Path

from engine.errors import StoreError
from engine.settings import ModelSettings
from engine.store import Store
from engine.store.manifest import current_generation, read_manifest
from engine.store.verify import faults
from indexer.reporter import Reporter


def verify(path: Path, settings: ModelSettings | None = None, reporter: Reporter | None = None) -> list[tuple[str, str]]:
    """[(file, what is wrong)], empty where all is well; with a model its whole weights are hashed too. Raises StoreError where no manifest can be read."""
    reporter = reporter or Reporter()
    generation = current_generation(path)
    manifest = read_manifest(path, generation)
    found = _newer_generation(path, generation)
    with reporter.stage("verify", total=sum(f.size for f in manifest.files.values()), unit="bytes") as stage:
        found += faults(path, manifest, stage.advance)
    if found:
        return found
    store = Store.open(path)  # headers and counts against the manifest
    if settings is not None and settings.model:
        from engine.model import fingerprint_mismatch, load_model  # seconds of imports that a check of the files does without
        from indexer.weights import weights_hash

        loaded = load_model(store.model_settings(settings), check_dtype=False)
        difference = fingerprint_mismatch(manifest.model.fingerprint, loaded.fingerprint)
        if difference is None and manifest.model.weights not in (None, weights_hash(loaded)):
            difference = "the weights' hash differs, outside the values that the fingerprint samples"
        if difference:
            found.append((settings.model, f"is not the model that the store was built with: {difference}"))
    return found


def _newer_generation(path: Path, live: str) -> list[tuple[str, str]]:
    newest = max(p.name for p in (path / "generations").iterdir() if p.name.isdigit())
    return [] if newest == live else [("CURRENT", f"names generation {live}, and {newest} is there; the file is damaged, or a commit was interrupted")]


def require_whole(path: Path, settings: ModelSettings | None = None, reporter: Reporter | None = None) -> None:
    """Raises StoreError listing what is damaged."""
    found = verify(path, settings, reporter)
    if found:
        raise StoreError(f"{path}: " + "; ".join(f"{name} {fault}" for name, fault in found), code="damaged-store")
