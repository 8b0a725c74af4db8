"""`eogp inspect store`: what a store holds, in a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from engine.store import Store
from indexer.job import interrupted
from indexer.reporter import size


def inspect_store(path: Path) -> dict[str, Any]:
    """Everything that the page shows, JSON-able."""
    store = Store.open(path)
    manifest = store.manifest
    shared = {name: sum(e.size for n, e in manifest.files.items() if n.startswith(f"shared/{name}/")) for name in ("sketch", "full")}
    segments = sum(e.size for n, e in manifest.files.items() if n.startswith("segments/"))
    usable = ~store.excluded
    return {
        "store": str(path),
        "generation": store.generation,
        "format_version": manifest.format_version,
        "rows": store.n_rows,
        "usable": int(usable.sum()),
        "deleted": manifest.deleted,
        "flagged": manifest.counts.get("flagged", {}),
        "segments": len(store.segments),
        "counts": manifest.counts,
        "bytes_per_example": manifest.sketch.bytes_per_example,
        "bytes": {"segments": segments, "shared_sketch": shared["sketch"], "curvature": shared["full"]},
        "sketch": {
            "method": manifest.sketch.method,
            "scale": manifest.sketch.scale,
            "blocks": len(store.layout.k),
            "bits": store.layout.total_k,
            "kept_share": manifest.sketch.plan.get("kept_share"),
            "why": manifest.sketch.plan.get("why", []),
        },
        "model": {k: v for k, v in manifest.model.model_dump(mode="json").items() if k not in ("fingerprint", "skipped")},
        "data": [d.model_dump(mode="json") for d in manifest.data],
        "coverage_threshold": manifest.coverage_threshold,
        "candidate_recall": store.recall,
        "rescore": store.full_dir is not None,
        "metadata": {name: str(kind) for name, kind in zip(store.metadata.column_names, store.metadata.schema.types, strict=True)},
        "mean_loss_per_token": _mean_loss(store, usable),
        "interrupted": (interrupted(path) or {}).get("command"),
        "software": manifest.software,
        "settings": manifest.settings,
    }


def _mean_loss(store: Store, usable: np.ndarray) -> float | None:
    tokens = int(store.column("n_tokens")[usable].sum()) if usable.any() else 0
    return float(store.column("loss")[usable].sum(dtype=np.float64) / tokens) if tokens else None


def lines(found: dict[str, Any]) -> list[str]:
    """The page."""
    b = found["bytes"]
    flagged = ", ".join(f"{n:,} {why}" for why, n in found["flagged"].items()) or "none"
    rows = [
        f"store       {found['store']}, generation {found['generation']}, format {found['format_version']}",
        f"rows        {found['rows']:,} in {found['segments']:,} segments: {found['usable']:,} usable, {found['deleted']:,} deleted, flagged: {flagged}",
        f"bytes       {found['bytes_per_example']:,} per example; {size(b['segments'])} rows and sketches, {size(b['shared_sketch'])} shared, {size(b['curvature'])} curvature",
        f"sketch      {found['sketch']['method']}, {found['sketch']['blocks']} blocks, {found['sketch']['bits']:,} bits, scale {found['sketch']['scale']}",
        f"model       {found['model']['source']} ({found['model']['task']}, {found['model']['dtype']}, {found['model']['attention']})",
        *(f"data        {d['name']}" + (f" ({size(d['size'])})" if d["size"] is not None else "") for d in found["data"]),
        f"metadata    {', '.join(f'{k}: {v}' for k, v in found['metadata'].items()) or 'none'}",
    ]
    if found["mean_loss_per_token"] is not None:
        rows.append(f"loss        {found['mean_loss_per_token']:.3f} nats per target token")
    if found["coverage_threshold"] is not None:
        rows.append(f"coverage    queries below {found['coverage_threshold']:.3f} get a warning")
    if found["candidate_recall"]:
        rows.append("candidates  recall@10 " + ", ".join(f"{p['recall']:.2f} at {p['candidates']:,}" for p in found["candidate_recall"]))
    rows.append(f"rescore     {'by gradients, the curvature is kept' if found['rescore'] else 'not possible, the curvature was not kept'}")
    if found["interrupted"]:
        rows.append(f"unfinished  an interrupted `eogp {found['interrupted']}`: run its command again")
    return rows


def settings_yaml(path: Path) -> str:
    """The settings that reproduce the run, as a configuration file for `eogp index --config`."""
    return str(yaml.safe_dump(Store.open(path).manifest.settings, sort_keys=True, allow_unicode=True))
