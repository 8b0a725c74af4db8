"""Writes the figures of docs/indexing.md from results/store.json (benchmarks/store.py) and results/indexing.json (benchmarks/indexing.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "indexing.md"
START, END = "<!-- figures: python -m benchmarks.indexing_docs -->\n", "<!-- /figures -->"


def figures(store: dict[str, Any], job: dict[str, Any]) -> str:
    """Two tables."""
    o, c = store["open"], store["open_compacted"]
    rows = [
        (
            "open, in a fresh process",
            o,
            f"{(o['anonymous_open'] - o['anonymous_before']) / 1e6:,.0f} MB besides mapped files; the process with its libraries holds {o['anonymous_open'] / 1e6:,.0f} MB",
        ),
        ("append of 1,000 (all but the model)", store["append"], "read, tokenise, check ids against all rows, write, commit"),
        (f"delete by filter ({store['deleted']:,} rows)", store["delete"], "a new generation with tombstones"),
        (
            "compact",
            store["compact"],
            f"{store['removed']:,} rows removed, {store['segments']} segment; same ids and scores for {store['answers']} results: {_yes(store['same_answers'])}",
        ),
        ("open after compaction", c, ""),
        ("verify", store["verify"], f"{store['store_bytes'] / 1e6:,.0f} MB hashed"),
    ]
    lines = [
        f"Machine: 2-core AMD EPYC VM, 24 GB, shared with other jobs during the run, so that wall-clock time exceeds processor time. `benchmarks/store.py`: {store['rows']:,} synthetic rows of 256 bytes with text and metadata, no model.",
        "",
        "| | wall clock | processor | |",
        "|---|---|---|---|",
        *(f"| {name} | {t['seconds']:.2f} s | {t['cpu_seconds']:.2f} s | {note} |" for name, t, note in rows),
        "",
        f"`benchmarks/indexing.py`: {job['rows']:,} texts ({job['tokens']:,} tokens), a GPT-2 of 2 layers, 128 wide, fits on 128 and 256 rows.",
        "",
        "| | |",
        "|---|---|",
        f"| share of the sketching stage that the model is at work | {job['busy_share']:.1%} |",
        f"| memory after 500 examples | {job['memory_at_500'] / 1e6:,.0f} MB |",
        f"| memory after {job['rows']:,} examples | {job['memory_at_end'] / 1e6:,.0f} MB ({job['memory_growth']:+.1%}) |",
        f"| sketching | {job['examples_per_second']:,.0f} examples/s |",
    ]
    return "\n".join(lines) + "\n"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def main() -> None:
    results = Path(__file__).with_name("results")
    read = [json.loads((results / name).read_text(encoding="utf-8")) for name in ("store.json", "indexing.json")]
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.index(START) + len(START), page.index(END)
    PAGE.write_text(page[:before] + figures(*read) + page[after:], encoding="utf-8")


if __name__ == "__main__":
    main()
