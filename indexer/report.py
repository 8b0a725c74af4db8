"""The final report of a run: what was read, skipped, flagged and written, and how long it took."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.signs import FLAG_NO_TARGET, FLAG_NONFINITE, FLAG_ZERO
from engine.store import Manifest
from engine.store.files import write_file
from engine.store.manifest import read_manifest
from engine.store.rows import fixed_width
from engine.store.segment import ROWS, read_table
from indexer.reporter import Reporter, clock, size

if TYPE_CHECKING:
    from indexer.prepare import Prepared

REASONS = {FLAG_NO_TARGET: "no target token", FLAG_ZERO: "zero gradient", FLAG_NONFINITE: "non-finite gradient"}
LISTED = 1000
_NUMBER = re.compile(r"\d[\d,.]*")


def count_flags(segments: Sequence[Path]) -> tuple[dict[str, Any], dict[str, str]]:
    """Counts of flagged rows of some segments by reason, and {running number: reason} of the first 1,000."""
    counts: Counter[str] = Counter()
    named: dict[str, str] = {}
    for folder in segments:
        table = read_table(folder / ROWS)
        flags, rows = fixed_width(table.column("flags")), fixed_width(table.column("row"))
        for i in np.flatnonzero(flags).tolist():
            reason = reason_of(int(flags[i]))
            counts[reason] += 1
            if len(named) < LISTED:
                named[str(int(rows[i]))] = reason
    return {"flagged": dict(counts)}, named


def reason_of(flag: int) -> str:
    """A row's flags in words."""
    return ", ".join(text for bit, text in REASONS.items() if flag & bit) or "usable"


def summarise_bad(prepared: Prepared) -> dict[str, int]:
    """Bad rows by reason, numbers in the reasons set aside; most frequent first."""
    return dict(Counter(_NUMBER.sub("N", b["reason"]) for b in prepared.bad_rows()).most_common())


def write_report(store: Path, generation: str, prepared: Prepared, reporter: Reporter, extra: dict[str, Any]) -> dict[str, Any]:
    """Write reports/GENERATION/report.json and bad_rows.jsonl (file, line, reason; never a row's text), and say the report."""
    manifest = read_manifest(store, generation)
    folder = store / "reports" / generation
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "bad_rows.jsonl", "".join(json.dumps(b, ensure_ascii=False) + "\n" for b in prepared.bad_rows()))
    report = {
        "generation": generation,
        "counts": manifest.counts,
        "added": prepared.n,
        "bad": summarise_bad(prepared),
        "first_bad_rows": [b for b, _ in zip(prepared.bad_rows(), range(20), strict=False)],
        "seconds": dict(reporter.seconds),
        "bytes_per_example": manifest.sketch.bytes_per_example,
        "shared_bytes": manifest.sketch.shared_bytes,
        "store_bytes": sum(f.size for f in manifest.files.values()),
        **extra,
    }
    write_file(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False))
    reporter.event("report", **report)
    if not reporter.log_json:
        reporter.say("\n".join(report_lines(store, manifest, report)))
    return report


def report_lines(store: Path, manifest: Manifest, report: dict[str, Any]) -> list[str]:
    """The report for people."""
    flagged = sum(manifest.counts.get("flagged", {}).values())
    lines = [
        f"{store}: generation {report['generation']}, {manifest.n_rows:,} rows, {size(report['store_bytes'])} "
        f"({report['bytes_per_example']:,} bytes per example, {size(report['shared_bytes'])} shared)",
        f"added {report['added']:,} examples; {sum(report['bad'].values()):,} bad rows left out, {manifest.counts.get('truncated', 0):,} truncated, {flagged:,} flagged",
    ]
    lines += [f"  {count:,} x {reason}" for reason, count in list(report["bad"].items())[:10]]
    lines += [f"  {b['file']}:{b['line']}: {b['reason']}" for b in report["first_bad_rows"][:5]]
    if report["bad"]:
        lines.append(f"  all of them: {store}/reports/{report['generation']}/bad_rows.jsonl")
    lines.append("time: " + ", ".join(f"{name} {clock(seconds)}" for name, seconds in report["seconds"].items()))
    return lines
