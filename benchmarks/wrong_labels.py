"""Do influence rankings find wrong labels? MiniLM-L6 fine-tuned on movie snippets, 5 % of whose labels are flipped, then indexed with `eogp index`.

    python benchmarks/wrong_labels.py --work DIR --sdist vaderSentiment-3.3.2.tar.gz      # writes benchmarks/results/wrong_labels.json

The stages are train, index and rank; name one to start there. An interrupted index goes on where it was.

Rankings, all read from the store: self-influence (||z||^2, kept per row); influence on 300 clean validation snippets by equation (14), most harmful first (the sum
over the snippets; the mean of their cosines, where no snippet outweighs another; the mean over the ten that a row harms most, queries scaled to unit length); the
training loss kept per row; and chance.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from snippets import LABELS, draw, write_jsonl

os.environ.setdefault("OMP_NUM_THREADS", "1")
RESULTS = Path(__file__).parent / "results" / "wrong_labels.json"
N_TRAIN, N_VALIDATION, FLIPPED = 1000, 300, 0.05
EPOCHS, LEARNING_RATE = 2, 1e-4
FIT_EXAMPLES, BYTES, PROJECTION_BYTES = 400, 256, 10**8
WORST = 10  # validation snippets
SHARES = (0.05, 0.1, 0.2, 0.3)


def data(sdist: Path, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, `flipped` marking the wrong ones; clean validation rows)."""
    train, validation = draw(sdist, (N_TRAIN, N_VALIDATION), seed=1)
    wrong = set(random.Random(seed).sample(range(N_TRAIN), round(FLIPPED * N_TRAIN)))
    rows = [{**r, "flipped": i in wrong, "label": LABELS[(r["label"] == "positive") != (i in wrong)]} for i, r in enumerate(train)]
    return rows, validation


def train(work: Path, sdist: Path) -> None:
    from finetune import minilm

    from indexer.finetune.run import finetune
    from indexer.finetune.settings import FinetuneSettings

    rows, validation = data(sdist)
    path, held = write_jsonl(work / "train.jsonl", rows), write_jsonl(work / "validation.jsonl", validation)
    shutil.rmtree(work / "model", ignore_errors=True)
    finetune(
        work / "model",
        FinetuneSettings(
            model=minilm(),
            data=[str(path)],
            eval_data=held,
            kind="classification",
            pooling="mean",
            epochs=EPOCHS,
            learning_rate=LEARNING_RATE,
            warmup=0.1,
            save_every=10**6,
        ),
    )


def index(work: Path) -> None:
    from indexer.index import index as build
    from indexer.settings import IndexSettings

    build(
        work / "store",
        IndexSettings(
            model=str(work / "model"), data=[str(work / "train.jsonl")], fit_examples=FIT_EXAMPLES, bytes_per_example=BYTES, projection_bytes=PROJECTION_BYTES
        ),
    )


def rank(work: Path) -> None:
    from engine.data.reading import Row, read_rows
    from engine.data.settings import DataSettings
    from engine.data.tokens import to_example
    from engine.model import load_model
    from engine.search import Searcher
    from engine.settings import ModelSettings
    from engine.sketcher import Sketcher
    from engine.store import Store

    store = Store.open(work / "store")
    loaded = load_model(ModelSettings(model=str(work / "model")))
    settings = DataSettings(data=[str(work / "validation.jsonl")], kind="classification", id_field="id")
    examples = [to_example(r, loaded, settings, training=False) for r in read_rows(settings) if isinstance(r, Row)]
    queries = Sketcher.load(store.sketch_dir, loaded).query(examples)
    searcher = Searcher(store.segments, store.layout, store.c, excluded=store.excluded)
    influence = np.asarray(searcher.score(queries.y, np.arange(store.n_rows)), np.float64)  # (validation, rows)
    by_unit = influence / np.sqrt(queries.z_norm_sq)[:, None]
    norms = np.sqrt(store.column("norm_sq").astype(np.float64))
    flipped = np.asarray(store.metadata.column("flipped").to_pylist(), bool)
    scores: dict[str, NDArray[np.float64]] = {
        "self-influence": store.column("norm_sq").astype(np.float64),
        "influence on clean validation, sum": -influence.sum(0),
        "influence on clean validation, mean cosine": -(by_unit / norms).mean(0),
        f"influence on clean validation, the {WORST} it harms most": -np.sort(by_unit, 0)[:WORST].mean(0),
        "loss": store.column("loss").astype(np.float64),
        "chance": np.random.default_rng(0).random(store.n_rows),
    }
    record = json.loads((work / "model" / "finetune.json").read_text(encoding="utf-8"))
    result = {
        "rows": store.n_rows,
        "flipped": int(flipped.sum()),
        "validation": len(examples),
        "validation_accuracy": record["metrics"]["eval_accuracy"],
        "bytes_per_example": store.layout.payload_bytes,
        "found": {name: found(flipped, score) for name, score in scores.items()},
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


def found(flipped: NDArray[np.bool_], score: NDArray[np.float64]) -> dict[str, float]:
    """Share of the flipped rows among the first x % by descending score, and the area under the ROC curve."""
    order = np.argsort(-score, kind="stable")
    hits = np.cumsum(flipped[order]) / flipped.sum()
    ranks = np.empty(len(score))
    ranks[np.argsort(score, kind="stable")] = np.arange(1, len(score) + 1)
    n = int(flipped.sum())
    auc = (ranks[flipped].sum() - n * (n + 1) / 2) / (n * (len(score) - n))
    return {**{f"{share:.0%}": round(float(hits[round(share * len(score)) - 1]), 3) for share in SHARES}, "auc": round(float(auc), 3)}


def table(result: dict[str, Any]) -> str:
    lines = ["| rows ranked by | " + " | ".join(f"in the first {s:.0%}" for s in SHARES) + " | AUC |", "|---|" + "---:|" * (len(SHARES) + 1)]
    for name, row in result["found"].items():
        lines.append(f"| {name} | " + " | ".join(f"{row[f'{s:.0%}']:.2f}" for s in SHARES) + f" | {row['auc']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", nargs="?", default="train", choices=["train", "index", "rank"])
    parser.add_argument("--work", type=Path, default=Path("wrong-labels"))
    parser.add_argument("--sdist", type=Path)
    args = parser.parse_args()
    if args.start == "train":
        train(args.work, args.sdist)
    if args.start != "rank":
        index(args.work)
    rank(args.work)


if __name__ == "__main__":
    main()
