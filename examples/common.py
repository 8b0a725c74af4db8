"""Shared by the examples: the demo's data and steps, and JSONL files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "demo"))

from steps import console, eogp, read_jsonl

from engine.query import QueryEngine, QueryInput, QuerySpec

__all__ = ["SMALL_MODEL", "QueryEngine", "QueryInput", "QuerySpec", "console", "eogp", "read_jsonl", "run", "write_jsonl"]

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


def run(main: Callable[[Path, bool], None], description: str | None) -> None:
    """Command line of an example: OUT, and --short for a run that only shows that it works."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for data, model and store; what is there already is used again")
    parser.add_argument("--short", action="store_true", help="few rows and one epoch: does it run? Its figures mean nothing")
    args = parser.parse_args()
    main(args.out, args.short)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
