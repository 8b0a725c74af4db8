"""A tiny corpus and a store made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from indexer.index import index
from indexer.reporter import Reporter
from indexer.settings import IndexSettings

SUBJECTS = ("carbon", "Peru", "France", "yen", "Tungsten", "Mongolia", "citizens", "revenue")


def corpus(n: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"text": f"The {SUBJECTS[i % 8]} of number {i * 37 % 101} is {SUBJECTS[i * 5 % 7]}" + " indeed" * (i % 5), "kind": "ab"[i % 2], "number": i}
        for i in range(first, first + n)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def index_settings(tiny_model_folder: Path) -> Callable[..., IndexSettings]:
    """Settings of a small job: 16-row shards, a sketch of 12 bytes."""

    def make(data: Path | str | list[str], **changes: Any) -> IndexSettings:
        names = data if isinstance(data, list) else [str(data)]
        small = {
            "shard_rows": 16,
            "pca_examples": 48,
            "fit_examples": 32,
            "bytes_per_example": 12,
            "m": 32,
            "batch_tokens": 256,
            "log_json": True,
            "threads": 1,
        }
        return IndexSettings(**{"model": str(tiny_model_folder), "data": names, **small, **changes})

    return make


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, index_settings: Callable[..., IndexSettings]) -> Path:
    """A store of 80 rows; read it, do not change it."""
    folder = tmp_path_factory.mktemp("built")
    data = write_jsonl(folder / "data.jsonl", corpus(80))
    index(folder / "store", index_settings(data), Reporter(log_json=True))
    return folder / "store"


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_forked() -> Iterator[Run]:
    """run_forked(command, store, settings, signal=None, after=None, when=None): a job in a process of its own, which can be killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(Path(__file__).parents[2])}
    script = Path(__file__).with_name("spawner.py")
    spawner = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert spawner.stdin is not None and spawner.stdout is not None
    commands, results = spawner.stdin, spawner.stdout

    def run(command: str, store: Path, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
        log = store.with_name(store.name + ".log")
        commands.write(json.dumps({"command": command, "store": str(store), "settings": settings, "log": str(log), **options}, default=str) + "\n")
        commands.flush()
        return {**json.loads(results.readline()), "log": log.read_text(encoding="utf-8") if log.exists() else ""}

    yield run
    commands.close()
    results.close()
    assert spawner.wait(timeout=30) == 0


def content(store: Path) -> dict[str, bytes]:
    """Every file of a store, but for the lock and the report's timings."""
    files = sorted(p for p in store.rglob("*") if p.is_file() and p.name not in ("LOCK", "report.json"))
    return {p.relative_to(store).as_posix(): p.read_bytes() for p in files}


@pytest.fixture(scope="session")
def store_content() -> Callable[[Path], dict[str, bytes]]:
    return content
