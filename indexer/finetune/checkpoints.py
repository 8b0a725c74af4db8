"""Checkpoints that are whole or do not count, and the record that a resumed run must match."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import LimitError, SettingError

WHOLE = "whole.json"
RECORD = "run.json"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name, -1 for another folder."""
    found = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(found[1]) if found else -1


def checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints, oldest first: folders whose marker lists every file with the size it has."""
    return sorted((p for p in root.glob("checkpoint-*") if step_of(p) >= 0 and is_whole(p)), key=step_of)


def is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / WHOLE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def seal(folder: Path) -> None:
    """Flush every file to disk, then write the marker."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != WHOLE:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            sizes[str(path.relative_to(folder))] = path.stat().st_size
    write_json(folder / WHOLE, sizes)


def rotate(root: Path, keep: int, best: str | None) -> None:
    """Delete all but the newest `keep` whole checkpoints and the best one; broken ones go too."""
    whole = checkpoints(root)
    kept = {p.name for p in whole[-keep:]} | ({Path(best).name} if best else set())
    for path in root.glob("checkpoint-*"):
        if step_of(path) >= 0 and path.name not in kept:
            shutil.rmtree(path)


def check_space(root: Path, needed: int) -> None:
    """Raises LimitError when the disk cannot take `needed` bytes more."""
    free = shutil.disk_usage(root).free
    if free < needed:
        raise LimitError(
            f"{root}: a checkpoint needs about {needed / 1e6:,.0f} MB and the disk has {free / 1e6:,.0f} MB free; make room, or choose another folder"
        )


def write_json(path: Path, value: Any) -> None:
    """Write, flush to disk, rename: a reader sees the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def check_record(root: Path, record: Mapping[str, Any]) -> None:
    """Compare a run's record with the one it would resume. Raises SettingError naming the first difference."""
    path = root / RECORD
    if not path.exists():
        raise SettingError(f"{root.parent}: nothing to resume: no run was started there", field="resume")
    before = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(record))
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise SettingError(
                f"cannot resume {root.parent}: {name} was {before.get(name)!r} and is now {now.get(name)!r}; give it as before, or train into another folder",
                field=name,
            )
