"""This project beside its peers: one run, the same model, data and machine.

    python -m venv peers && peers/bin/pip install -c constraints.txt bergson==2.5.1 kronfluence==1.0.1 einconv traker==0.3.2 scipy
    peers/bin/pip uninstall --yes torchvision torchaudio          # they belong to another torch
    python benchmarks/peers.py --work DIR --peers-python peers/bin/python

Task: benchmarks/outcomes.py, a GPT-2-shaped model fine-tuned on 2,048 real sentences; LDS from its 120 cached retrainings, fidelity to uncompressed EK-FAC.
Every measurement is a process of its own with one thread and is kept in DIR/peers as JSON: a second run only measures what is missing. Times are processor
seconds of that process. Writes benchmarks/results/peers.json and peers.md, and the tables between the peers marks of README.md and docs/peers.md.
LogIX has no row: its package refuses Python 3.11 and newer.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import outcomes
import peers_common as common
from numpy.typing import NDArray

from indexer.evaluate import metrics

HERE = Path(__file__).parent
THROUGH: list[str] = []  # what every worker is started through, for instance nice
KRONFLUENCE_BATCHES = {
    1: ((128, 32), (128, 128)),
    10: ((128, 32), (128, 128)),
    100: ((128, 32), (128, 128)),
    1000: ((128, 128), (1000, 64)),
}  # queries, examples
REFERENCE = "exact"
PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "peers.md")


@dataclass(frozen=True)
class Peer:
    """A row: the worker script, its options, and the names of the score files that it leaves (label: file)."""

    key: str
    label: str
    worker: str
    theirs: bool = True
    options: tuple[str, ...] = ()
    prefix: str = ""
    scores: dict[str, str] = field(default_factory=lambda: {"": "scores"})


PEERS = (
    Peer(REFERENCE, "eogp, uncompressed EK-FAC (the reference)", "peers_ours.py", False, prefix="exact-"),
    Peer("ours-256", "**eogp**, default", "peers_ours.py", False, ("--bytes", "256")),
    Peer("ours-256-small", "**eogp**, 256 B, `--projection-bytes 40MB`", "peers_ours.py", False, ("--bytes", "256", "--projection-bytes", "40MB")),
    Peer("ours-64", "**eogp**, 64 B, `--projection-bytes 10MB`", "peers_ours.py", False, ("--bytes", "64", "--projection-bytes", "10MB")),
    Peer("kronfluence", "kronfluence 1.0.1, EK-FAC", "peers_kronfluence.py"),
    Peer(
        "bergson",
        "bergson 2.5.1, projection 16",
        "peers_bergson.py",
        scores={", dot product": "scores-dot", ", one-sided": "scores-one-sided", ", two-sided": "scores-two-sided"},
    ),
    Peer("trak", "TRAK (traker 0.3.2), 512 numbers, 1 checkpoint", "peers_trak.py", options=("--projection-dim", "512")),
)


def worker(peer: Peer, stage: str, work: Path, python: Path, *more: str, name: str | None = None) -> dict[str, Any]:
    """What a stage found, from its JSON or by running it now."""
    out = work / "peers" / peer.key
    name = name or stage
    found = out / f"{peer.prefix}{name}.json"
    if not found.exists():
        command = [
            *THROUGH,
            str(python if peer.theirs else sys.executable),
            str(HERE / peer.worker),
            peer.prefix + stage,
            "--work",
            str(work),
            "--out",
            str(out),
        ]
        command += ["--name", peer.prefix + name, *peer.options, *more]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "" if peer.theirs else str(HERE.parent)}
        print(f"{peer.key}: {name}", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        log = out / f"{name}.log"
        with log.open("wb") as file:
            if subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, check=False).returncode:
                raise SystemExit(f"{peer.key} failed in {stage}:\n{log.read_text()[-2000:]}")
    value: dict[str, Any] = json.loads(found.read_text())
    return value


def query_seconds(peer: Peer, work: Path, python: Path) -> tuple[dict[str, dict[str, float]], int, dict[str, Any]]:
    """(seconds per number of queries, peak of memory, what else is worth saying); kronfluence at the best of its batch sizes."""
    if peer.key != "kronfluence":
        found = worker(peer, "queries", work, python)
        return found["seconds"], found["peak_bytes"], {}
    seconds, batches, peak = {}, {}, 0
    for count in common.COUNTS:
        tried = [
            worker(peer, "queries", work, python, "--count", str(count), "--query-batch", str(q), "--train-batch", str(t), name=f"queries-{count}-{q}-{t}")
            for q, t in KRONFLUENCE_BATCHES[count]
        ]
        best = min(tried, key=lambda found: found["seconds"]["cpu"])
        seconds[str(count)], batches[str(count)], peak = best["seconds"], best["batches"], best["peak_bytes"]
    return seconds, peak, {"batches": batches}


class Evidence:
    """LDS and fidelity of score matrices (Q, N)."""

    def __init__(self, reference: NDArray[np.floating]) -> None:
        with np.load(outcomes.RESULTS / "outcomes.npz") as stored:
            first, second = -stored["first"].astype(np.float64), -stored["second"].astype(np.float64)
        first[: len(second)] = (first[: len(second)] + second) / 2
        self.measured, self.masks, self.reference = first, outcomes.subset_masks(outcomes.Task()), reference
        self.draws = metrics.resamples(len(first), 300, 0)

    def figures(self, scores: NDArray[np.floating]) -> dict[str, Any]:
        (sample,) = metrics.bootstrap_lds([scores], self.masks, self.measured, self.draws)
        low, high = np.percentile(sample, [2.5, 97.5])
        return {
            "lds": [float(metrics.mean(metrics.lds(scores, self.masks, self.measured))), float(low), float(high)],
            "ndcg": float(metrics.ndcg(scores, self.reference).mean()),
            "spearman": float(metrics.mean(metrics.spearman(scores, self.reference))),
        }


def measure(work: Path, python: Path, chosen: list[Peer]) -> list[dict[str, Any]]:
    """One row per peer; a peer with several kinds of scores has their figures in one row."""
    rows = []
    for peer in chosen:
        row: dict[str, Any] = {"key": peer.key, "label": peer.label, "index": worker(peer, "index", work, python)}
        row["queries"], row["query_peak"], more = query_seconds(peer, work, python)
        worker(peer, "scores", work, python)
        rows.append(row | more)
    return rows


def complete(peer: Peer, work: Path) -> bool:
    """Whether every measurement of the row is kept."""
    out = work / "peers" / peer.key
    counted = [f"queries-{n}-{q}-{t}" for n, tried in KRONFLUENCE_BATCHES.items() for q, t in tried] if peer.key == "kronfluence" else ["queries"]
    return all((out / f"{peer.prefix}{name}.json").exists() for name in ("index", "scores", *counted))


def quality(work: Path, rows: list[dict[str, Any]]) -> None:
    evidence = Evidence(np.load(work / "peers" / REFERENCE / "scores.npy"))
    for row in rows:
        peer = next(p for p in PEERS if p.key == row["key"])
        row["quality"] = {name: evidence.figures(np.load(work / "peers" / peer.key / f"{file}.npy")) for name, file in peer.scores.items()}


def overtakes(ours: dict[str, Any], theirs: dict[str, Any]) -> int | None:
    """The number of queries from which our index and queries together take fewer seconds than theirs, by a line through 1 and 1,000 queries."""

    def line(row: dict[str, Any]) -> tuple[float, float]:
        one, most = row["queries"]["1"]["cpu"], row["queries"][str(common.COUNTS[-1])]["cpu"]
        slope = (most - one) / (common.COUNTS[-1] - 1)
        return row["index"]["seconds"]["cpu"] + one - slope, slope

    (fixed, each), (their_fixed, their_each) = line(ours), line(theirs)
    if fixed <= their_fixed and each <= their_each:
        return 1
    if each >= their_each:
        return None
    return max(1, int(np.ceil((fixed - their_fixed) / (their_each - each))))


def goals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_key = {r["key"]: r for r in rows}
    most = str(common.COUNTS[-1])
    found: dict[str, Any] = {}
    kron, bergson = by_key.get("kronfluence"), by_key.get("bergson")
    for row in rows:
        if not row["key"].startswith("ours"):
            continue
        found[row["key"]] = {}
        if kron:
            found[row["key"]]["times faster than kronfluence, 1,000 queries"] = kron["queries"][most]["cpu"] / row["queries"][most]["cpu"]
            found[row["key"]]["overtakes kronfluence, index included, from queries"] = overtakes(row, kron)
        if bergson:
            found[row["key"]]["share of bergson's bytes per example"] = row["index"]["bytes_per_example"] / bergson["index"]["bytes_per_example"]
            found[row["key"]]["LDS minus bergson's best"] = row["quality"][""]["lds"][0] - max(q["lds"][0] for q in bergson["quality"].values())
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    counts = " | ".join(f"{n:,} quer{'y' if n == 1 else 'ies'}, s" for n in common.COUNTS)
    lines = [
        f"| | index, s | bytes/example | shared MB | {counts} | peak GB | Spearman | NDCG@20 | LDS |",
        "|---|" + "---:|" * (7 + len(common.COUNTS)),
    ]
    for row in rows:
        peak = max(row["index"]["peak_bytes"], row["query_peak"]) / 1e9
        for i, (name, q) in enumerate(row["quality"].items()):
            cost = [f"{row['index']['seconds']['cpu']:.0f}", f"{row['index']['bytes_per_example']:,.0f}", f"{row['index']['shared_bytes'] / 1e6:.0f}"]
            cost += [f"{row['queries'][str(n)]['cpu']:.3g}" for n in common.COUNTS] + [f"{peak:.1f}"]
            figures = [f"{q['spearman']:.2f}", f"{q['ndcg']:.2f}", f"{q['lds'][0]:.3f} [{q['lds'][1]:.3f}, {q['lds'][2]:.3f}]"]
            lines.append("| " + " | ".join([row["label"] + name, *(cost if i == 0 else ['"'] * len(cost)), *figures]) + " |")
    return lines


def sentences(rows: list[dict[str, Any]], found: dict[str, Any]) -> list[str]:
    """The goals, one line each, with the figures that decide them."""
    by_key = {r["key"]: r for r in rows}
    query_batch, train_batch = by_key["kronfluence"]["batches"]["1000"]
    lines = [
        f"1,000 queries against kronfluence at its best batch sizes ({query_batch:,} queries and {train_batch} examples at a time; goal: 10 times faster):",
        "",
    ]
    for key, goal in found.items():
        times, when = goal["times faster than kronfluence, 1,000 queries"], goal["overtakes kronfluence, index included, from queries"]
        ahead = "never ahead with the index counted" if when is None else f"ahead from {when:,} {'query' if when == 1 else 'queries'} on with the index counted"
        lines.append(f"- {by_key[key]['label']}: {times:.1f} times faster ({'reached' if times >= 10 else 'not reached'}); {ahead}.")
    lines += ["", "Bytes per example against bergson at projection 16 (goal: at most 1/64 at equal or better LDS than its best kind of score):", ""]
    for key, goal in found.items():
        share, gain = goal["share of bergson's bytes per example"], goal["LDS minus bergson's best"]
        lines.append(f"- {by_key[key]['label']}: 1/{1 / share:.0f}, LDS {gain:+.3f} ({'reached' if share <= 1 / 64 and gain >= 0 else 'not reached'}).")
    return lines


def insert(path: Path, lines: list[str]) -> None:
    """Put the lines between the page's peers marks."""
    head, rest = path.read_text(encoding="utf-8").split("<!-- peers -->")
    _, tail = rest.split("<!-- /peers -->")
    path.write_text("\n".join([head + "<!-- peers -->", "", *lines, "", "<!-- /peers -->" + tail]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the task, the stores and the JSON of every measurement")
    parser.add_argument("--peers-python", type=Path, required=True, help="interpreter of the environment that holds the peers")
    parser.add_argument("--only", nargs="*", choices=[p.key for p in PEERS], help="measure these rows and stop before the tables")
    parser.add_argument("--made-only", action="store_true", help="tables of the rows that are measured in DIR, without measuring the rest")
    parser.add_argument("--through", default="", help="a command that every measurement is started through, for instance 'nice -n 5'")
    args = parser.parse_args()
    THROUGH.extend(shlex.split(args.through))
    if not (args.work / "model" / "model.safetensors").exists():
        task = outcomes.Task()
        outcomes.build_models(task, args.work, *outcomes.read_texts(task))
    if args.only:
        measure(args.work, args.peers_python, [p for p in PEERS if p.key in args.only])
        return
    rows = measure(args.work, args.peers_python, [p for p in PEERS if not args.made_only or complete(p, args.work)])
    quality(args.work, rows)
    found: dict[str, Any] = {"rows": rows, "goals": goals(rows)}
    (outcomes.RESULTS / "peers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    lines = [*table(rows), "", *sentences(rows, found["goals"])]
    (outcomes.RESULTS / "peers.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for page in PAGES:
        insert(page, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
