"""A store of a tiny GPT-2 that keeps its whole curvature, opened once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.query import QueryEngine
from indexer.index import index
from indexer.settings import IndexSettings


@pytest.fixture(scope="session")
def asked_store(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path, texts: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    rows = [{"id": f"row-{i}", "text": f"{texts[i % len(texts)]} ({i})", "kind": ("fact", "speech", "other")[i % 3], "year": 1900 + i} for i in range(90)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    settings = IndexSettings(
        model=str(tiny_model_folder), data=[str(folder / "data.jsonl")], bytes_per_example=32, chat_fallback="roles", shard_rows=50, keep_curvature=True
    )
    index(folder / "store", settings)
    return folder / "store"


@pytest.fixture(scope="session")
def asked(asked_store: Path) -> QueryEngine:
    return QueryEngine.open(asked_store)
