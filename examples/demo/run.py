"""`make demo`: which training sentences made a small model say this?

Builds the data, trains a small GPT-2 on it, indexes it at 256 bytes per example, starts the server, asks three questions over HTTP, and measures
over 100 held-out phrasings how often a training sentence of the same fact comes first, next to BM25 and random order.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import bm25s
import facts
import httpx
from steps import ask, console, eogp, read_jsonl, server, show

BYTES_PER_EXAMPLE = 256
PROJECTION_BYTES = "40MB"  # well below the default of 1 GB: the model is small, and fitting takes seconds instead of minutes
QUESTIONS = (
    ("The capital of Mongolia is", " Ulaanbaatar"),
    ("The chemical symbol of Tungsten is", " W"),
    ("In Japan people pay in", " JPY"),
)
MODEL_FLAGS = ("--new", "gpt2", "--layers", "4", "--width", "128", "--heads", "4", "--vocabulary", "3000", "--context", "128")
TRAIN_FLAGS = ("--epochs", "12", "--learning-rate", "2e-3", "--batch-size", "32", "--seed", "0")


def recall(ranked: list[list[str]], truth: list[str]) -> tuple[float, float]:
    """Share of queries with a row of the same fact at rank 1, and in the top 10. ranked: facts of the rows found, best first."""
    first = sum(found[:1] == [fact] for found, fact in zip(ranked, truth, strict=True))
    ten = sum(fact in found[:10] for found, fact in zip(ranked, truth, strict=True))
    return first / len(truth), ten / len(truth)


def by_server(client: httpx.Client, questions: list[dict[str, Any]], score: str, batch: int = 10) -> list[list[str]]:
    ranked = []
    for start in range(0, len(questions), batch):
        queries = [{"prompt": q["prompt"], "completion": q["completion"]} for q in questions[start : start + batch]]
        for answer in ask(client, {"queries": queries, "top_k": 10, "score": score, "direction": "proponents"}):
            ranked.append([hit["metadata"].get("fact", "") for hit in answer["proponents"]])
    return ranked


def by_bm25(rows: list[dict[str, Any]], questions: list[dict[str, Any]]) -> list[list[str]]:
    def words(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    index = bm25s.BM25()
    index.index([words(row["text"]) for row in rows], show_progress=False)
    found, _ = index.retrieve([words(q["prompt"] + q["completion"]) for q in questions], k=10, show_progress=False)
    return [[rows[i].get("fact", "") for i in best] for best in found.tolist()]


def by_chance(rows: list[dict[str, Any]], questions: list[dict[str, Any]]) -> list[list[str]]:
    draw = random.Random(0)
    return [[rows[i].get("fact", "") for i in draw.sample(range(len(rows)), 10)] for _ in questions]


def main(folder: Path) -> None:
    began = time.monotonic()
    n_rows, _ = facts.write(folder / "data")
    train, held_out = folder / "data" / "train.jsonl", folder / "data" / "held-out.jsonl"
    console.print(f"{n_rows} training examples in {train}")
    if not (folder / "model" / "config.json").exists():
        eogp("finetune", folder / "model", "--data", train, *MODEL_FLAGS, *TRAIN_FLAGS)
    eogp(
        "index",
        folder / "store",
        "--model",
        folder / "model",
        "--data",
        train,
        "--bytes-per-example",
        str(BYTES_PER_EXAMPLE),
        "--projection-bytes",
        PROJECTION_BYTES,
    )

    rows, questions = read_jsonl(train), read_jsonl(held_out)
    truth = [q["fact"] for q in questions]
    lines: list[str] = []
    with server(folder / "store", folder / "model", folder / "server.log") as client:
        for prompt, completion in QUESTIONS:
            [answer] = ask(client, {"queries": [{"prompt": prompt, "completion": completion}], "top_k": 3, "direction": "both"})
            lines += show(f"{prompt}{completion}", answer, rows=3)
        measured = {
            f"influence, {BYTES_PER_EXAMPLE} bytes": recall(by_server(client, questions, "influence"), truth),
            f"cosine, {BYTES_PER_EXAMPLE} bytes": recall(by_server(client, questions, "cosine"), truth),
        }
    measured["BM25"] = recall(by_bm25(rows, questions), truth)
    measured["random"] = recall(by_chance(rows, questions), truth)

    console.print(f"\n{len(questions)} held-out phrasings of facts: share with a training sentence of the same fact")
    lines += [f"| {len(questions)} held-out phrasings | same fact at rank 1 | in the top 10 |", "|---|---:|---:|"]
    for name, (first, ten) in measured.items():
        console.print(f"  {name:24s} at rank 1: {first:.2f}   in the top 10: {ten:.2f}", highlight=False)
        lines.append(f"| {name} | {first:.2f} | {ten:.2f} |")
    console.print("BM25 is near 1 since these sentences share their rare words; influence asks another question: what did training on it do?")
    seconds = time.monotonic() - began
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    report = {"rows": n_rows, "seconds": round(seconds), "recall": {k: {"rank_1": a, "top_10": b} for k, (a, b) in measured.items()}}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"{seconds:.0f} s. `make serve` leaves the server running on this store: open its page in a browser.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
