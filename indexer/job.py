"""An interrupted run's working folder, STORE/work: what the run is, and what it has finished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from engine.errors import StoreError
from engine.store.files import write_file
from engine.store.manifest import current_generation
from indexer.versions import versions

WORK, IDENTITY = "work", "job.json"


class Job:
    """Opened once per run. identity: what the result depends on, JSON-able; the versions of the libraries are added. A run with another identity is not a
    continuation."""

    def __init__(self, store: Path, identity: dict[str, Any], *, restart: bool) -> None:
        self.folder = store / WORK
        self.identity = json.loads(json.dumps({**identity, "versions": versions()}, default=str))
        path = self.folder / IDENTITY
        self.resumed = False
        if path.is_file() and not restart:
            self._require_same(json.loads(path.read_text(encoding="utf-8")))
            self.resumed = True
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_file(path, json.dumps(self.identity, indent=1))

    def _require_same(self, before: dict[str, Any]) -> None:
        difference = first_difference(before, self.identity)
        if difference:
            raise StoreError(
                f"{self.folder.parent}: an interrupted run ({before.get('command', 'index')}) differs from this one in {difference}; "
                "run its command again, or discard it with --restart",
                code="other-run",
            )

    @property
    def prepared(self) -> Path:
        return self.folder / "prepared"

    @property
    def curvature(self) -> Path:
        return self.folder / "curvature"

    @property
    def coordinates(self) -> Path:
        return self.folder / "coordinates"

    @property
    def sketch(self) -> Path:
        return self.folder / "sketch"

    def finish(self) -> None:
        """Remove the working folder; its identity goes last, so that a kill in between leaves a run that can be told finished."""
        for path in self.folder.iterdir():
            if path.name != IDENTITY:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        shutil.rmtree(self.folder)


def interrupted(store: Path) -> dict[str, Any] | None:
    """Identity of an interrupted run, or None."""
    path = store / WORK / IDENTITY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def unfinished_append(path: Path) -> StoreError | None:
    """An error for commands that would invalidate an interrupted append."""
    before = interrupted(path)
    if before is None or (before.get("command") == "append" and before.get("generation") != current_generation(path)):
        return None
    command = before.get("command", "index")
    return StoreError(f"{path}: an interrupted `eogp {command}` is not finished; run its command again first, or discard it with --restart", code="other-run")


def first_difference(a: Any, b: Any, where: str = "") -> str | None:
    """Where two JSON values differ first, in words, or None."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            found = first_difference(a.get(key), b.get(key), f"{where}.{key}" if where else str(key))
            if found:
                return found
        return None
    if a == b:
        return None
    short = [repr(v) if len(repr(v)) <= 60 else "other content" for v in (a, b)]
    return f"{where} ({short[0]} then, {short[1]} now)" if short != ["other content"] * 2 else where
