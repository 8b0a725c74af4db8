"""Writes the tables of docs/scale.md: measured figures from results/{scale,search,store}.json, and the arithmetic that follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
PARTS = ("plans", "hours", "index", "workers", "offload")
TOKENS = 512  # per example
PAPER_BYTES = {"olmo2-1b": 28_896, "olmo2-7b": 57_792, "olmo2-13b": 72_240, "olmo2-32b": 115_584}  # Table 2, k = 2,048 per module
SKETCH, ROW = 256, 80  # bytes per example: codes and scales; the row beside its text and tokens
RATE = 150e12  # assumed sustained operations per second of one 80 GB card in 16 bit
STAGES = 1.42  # the sketching pass against a plain forward and backward pass, docs/gradients.md
SIZES = {"1 B": 1.5e9, "7 B": 7.3e9, "13 B": 13.7e9, "32 B": 32.2e9, "70 B": 70e9}
CORPORA = {"10 M": 10**7, "100 M": 10**8, "1 B": 10**9}


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)]) + "\n"


def gb(n: float) -> str:
    return f"{n / 1e12:,.1f} TB" if n >= 1e12 else f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.0f} MB"


def hours(h: float) -> str:
    return f"{h:,.0f} h" if h >= 10 else f"{h:.1f} h" if h >= 1 else f"{60 * h:.0f} min"


def sketch_hours(examples: float, parameters: float) -> float:
    """Card hours of sketching: a forward pass, and a backward pass to activations alone, at two operations per parameter and token each."""
    return examples * TOKENS * 4 * parameters * STAGES / RATE / 3600


def plans(found: dict[str, Any]) -> str:
    rows = []
    for name, p in sorted(found.items(), key=lambda item: item[1]["parameters"]):
        fit = p["fit"]
        cards = "one card" if fit["cards"] == 1 else f"{fit['cards']} cards"
        rows.append(
            [
                name,
                gb(p["weights"]),
                gb(p["factors"]),
                gb(p["lambda"]),
                f"{gb(fit['peak'])}, {cards}",
                f"{fit['groups']} group{'s' if fit['groups'] > 1 else ''}, {fit['passes']} passes, {hours(fit['hours'])}",
                gb(p["shared"]),
                f"{p['gradient_16_bit'] / 1e9:.3f} GB / {PAPER_BYTES[name]:,} B / {SKETCH} B",
            ]
        )
    return table(
        [
            "model",
            "weights, 16 bit",
            "eigenvectors",
            "Λ",
            "peak of the fit",
            "fit on 4,096 x 512 tokens",
            "shared at most",
            "per example: 16-bit gradient / paper's sketch / ours",
        ],
        rows,
    )


def time_table() -> str:
    return table(
        ["examples of 512 tokens", *(f"{m} parameters" for m in SIZES)],
        [[name, *(f"{hours(sketch_hours(n, p))}" for p in SIZES.values())] for name, n in CORPORA.items()],
    )


def index_table(search: dict[str, Any], store: dict[str, Any]) -> str:
    """Sizes and latencies of the index alone."""
    largest = search["growth"][-1]
    ns, read = largest["ns_per_row"], largest["read_ms"] * 1e6 / largest["rows"]
    o = store["open"]
    per_row = (o["anonymous_open"] - o["anonymous_before"]) / o["rows"]
    rows = []
    for name, n in CORPORA.items():
        shards = -(-int(n * ns) // 10**8)
        rows.append(
            [
                name,
                gb(SKETCH * n),
                gb(n * (SKETCH + ROW + 4 * TOKENS + 4 * TOKENS)),
                gb(per_row * n),
                f"{n * ns / 1e9:,.1f} s",
                f"{shards:,}",
                f"{n * read / 1e9:,.2f} s",
            ]
        )
    return table(
        [
            "examples",
            "codes and scales",
            "rows with text and tokens",
            "memory beside mapped files",
            "search, one machine of 2 cores",
            "shards of 2 cores for 0.1 s",
            "one read of the codes",
        ],
        rows,
    )


def workers(found: dict[str, Any]) -> str:
    return table(
        ["", ""],
        [
            ["examples, tokens", f"{found['examples']:,}, {found['tokens']:,}"],
            ["two independent processes, seconds", ", ".join(f"{s:.1f}" for s in found["processes_seconds"])],
            ["two workers on a cluster, seconds", ", ".join(f"{s:.1f}" for s in found["workers_seconds"])],
            ["throughput of the workers beside the processes (medians)", f"{found['throughput_of_processes']:.2f}"],
            ["tokens per second and worker", f"{found['tokens_per_second_per_worker']:,.0f}"],
            ["starting two workers, model included, and their first 300 examples", f"{found['start_and_300_examples_seconds']:.0f} s"],
        ],
    )


def offload(found: dict[str, Any]) -> str:
    rows = [
        [
            {"memory": "all in memory", "disk": "25 of 30 layers on disk"}[v],
            gb(found[v]["weights_planned"]),
            gb(found[v]["peak"]),
            gb(found[v]["planned"]),
            f"{found[v]['planned_over_peak']:.2f}",
            f"{found[v]['fit_seconds']:.0f} s",
        ]
        for v in ("memory", "disk")
    ]
    return table(["", "weights in memory, planned", "peak of the fit beside weights", "planned", "plan / peak", "fit of 3 layers"], rows) + (
        f"\nLargest difference of a coordinate, relative to its module's largest, over {found['modules']} modules: {found['largest_difference']:.1e}.\n"
    )


def main() -> None:
    results = Path(__file__).with_name("results")
    scale, search, store = (json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in ("scale", "search", "store"))
    made = {
        "plans": plans(scale["plans"]),
        "hours": time_table(),
        "index": index_table(search, store),
        "workers": workers(scale["workers"]) if "workers" in scale else "",
        "offload": offload(scale["offload"]) if "offload" in scale else "",
    }
    page = PAGE.read_text(encoding="utf-8")
    for part in PARTS:
        start, end = f"<!-- {part}: python -m benchmarks.scale_docs -->\n", f"<!-- /{part} -->"
        before, after = page.index(start) + len(start), page.index(end)
        page = page[:before] + made[part] + page[after:]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
