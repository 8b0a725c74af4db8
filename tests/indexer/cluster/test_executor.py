"""The same store from a cluster, to the bit; and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexer.index import index
from indexer.reporter import Reporter
from indexer.settings import IndexSettings

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::ResourceWarning")  # Ray uses deprecated settings of its own

Make = Callable[..., IndexSettings]
Content = Callable[[Path], dict[str, bytes]]
SUBJECTS = ("carbon", "Peru", "France", "yen", "Tungsten", "Mongolia", "citizens", "revenue")


def write_corpus(path: Path, n: int) -> Path:
    """Rows of several lengths, bad ones in between, the first two among them."""
    lines = ["[1, 2]\n", '{"other": 1}\n']
    for i in range(n):
        lines.append(
            json.dumps({"text": f"The {SUBJECTS[i % 8]} of number {i * 37 % 101} is {SUBJECTS[i * 5 % 7]}" + " indeed" * (i % 5), "kind": "ab"[i % 2]}) + "\n"
        )
        if i % 11 == 3:
            lines.append('{"text": ""}\n' if i % 2 else "not JSON\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_the_store_is_that_of_one_process(two_nodes: Any, index_settings: Make, store_content: Content, tmp_path: Path) -> None:
    data = [str(write_corpus(tmp_path / "a.jsonl", 70)), str(write_corpus(tmp_path / "b.jsonl", 50))]
    here = index(tmp_path / "here", index_settings(data), Reporter(log_json=True))
    there = index(tmp_path / "there", index_settings(data, ray=two_nodes.address, ray_workers=2), Reporter(log_json=True))
    assert here["counts"] == there["counts"] and here["bad"] == there["bad"] and here["counts"]["rows"] == 120 and here["counts"]["bad"] == 16
    wanted, found = store_content(tmp_path / "here"), store_content(tmp_path / "there")
    assert sorted(wanted) == sorted(found)
    assert [name for name in wanted if wanted[name] != found[name]] == []
