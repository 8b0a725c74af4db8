"""Shared by the examples: the demo's data and steps, and JSONL files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "demo"))

from steps import console, eogp, read_jsonl

from engine.query import QueryEngine, QueryInput, QuerySpec

__all__ = ["SMALL_MODEL", "QueryEngine", "QueryInput", "QuerySpec", "console", "eogp", "read_jsonl", "write_jsonl"]

SMALL_MODEL = (
    "--new",
    "gpt2",
    "--layers",
    "3",
    "--width",
    "96",
    "--heads",
    "4",
    "--vocabulary",
    "2000",
    "--context",
    "96",
    "--learning-rate",
    "2e-3",
    "--batch-size",
    "32",
)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
