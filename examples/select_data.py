"""Select training data for a target: influence of a pool's rows on a few target sentences, then training on the best of them.

The target is chemistry; the pool is everything but the target's own sentences. The model fine-tuned on the selected rows is compared with one
fine-tuned on as many random rows, by its loss on target sentences that were not used for selecting.

    python examples/select_data.py OUT
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from common import SMALL_MODEL, QueryEngine, QueryInput, QuerySpec, console, eogp, run, write_jsonl
from facts import fact_rows, speech_paragraphs

from engine.data.reading import Row
from engine.data.settings import DataSettings
from engine.data.tokens import to_example
from engine.example import collate
from engine.loss import forward_backward
from engine.model import load_model
from engine.settings import ModelSettings

N_SELECTED, N_BASE = 200, 600


def mean_loss(model: Path, texts: list[str]) -> float:
    """Mean loss per token of the texts, in nats."""
    loaded = load_model(ModelSettings(model=str(model)))
    total, tokens = 0.0, 0
    for i, text in enumerate(texts):
        example = to_example(Row("target", i + 1, {"text": text}), loaded, DataSettings(kind="text"), training=False)
        stats = forward_backward(loaded, collate([example], [0], loaded.pad_id, loaded.device), "true", 0, lambda: None)
        total, tokens = total + float(stats.loss.sum()), tokens + int(stats.n_targets.sum())
    return total / tokens


def main(out: Path, short: bool) -> None:
    draw = random.Random(0)
    speeches = list(speech_paragraphs(1200))
    facts = list(fact_rows())
    symbols = [r for r in facts if r["kind"] == "symbol"]
    draw.shuffle(symbols)
    target, test = [r["text"] for r in symbols[:24]], [r["text"] for r in symbols[24:74]]
    known = {*target, *test}
    pool = [{"id": f"pool-{i}", **r} for i, r in enumerate([*speeches[N_BASE:], *(r for r in facts if r["text"] not in known)])]
    pool = draw.sample(pool, 300) if short else pool
    base_rows = write_jsonl(out / "base.jsonl", [*speeches[:N_BASE], *draw.sample(pool, 300)])
    pool_file = write_jsonl(out / "pool.jsonl", pool)

    if not (out / "base" / "config.json").exists():
        eogp("finetune", out / "base", "--data", base_rows, *SMALL_MODEL, "--epochs", "1" if short else "4")
    eogp("index", out / "store", "--model", out / "base", "--data", pool_file, "--bytes-per-example", "128", "--projection-bytes", "60MB")
    engine = QueryEngine.open(out / "store")
    spec = QuerySpec(tuple(QueryInput(text=t) for t in target), top_k=N_SELECTED, aggregate="sum", direction="proponents", score="cosine")
    [answer] = engine.answer([spec])
    chosen = {hit.id for hit in answer.answers[0].proponents or []}
    by_id = {r["id"]: r for r in pool}
    kinds = sorted({r["kind"] for r in pool})
    for name, part in {"pool": pool, "selected": [by_id[i] for i in chosen]}.items():
        counts = ", ".join(f"{sum(r['kind'] == k for r in part)} {k}" for k in kinds)
        console.print(f"  {name:9s} {len(part)} rows: {counts}", highlight=False)

    losses = {"before": mean_loss(out / "base", test)}
    for name, ids in {"selected": sorted(chosen), "random": [r["id"] for r in draw.sample(pool, len(chosen))]}.items():
        rows = write_jsonl(out / f"{name}.jsonl", [by_id[i] for i in ids])
        if not (out / name / "config.json").exists():
            eogp(
                "finetune",
                out / name,
                "--data",
                rows,
                "--model",
                out / "base",
                "--epochs",
                "1" if short else "3",
                "--learning-rate",
                "5e-4",
                "--batch-size",
                "16",
            )
        losses[name] = mean_loss(out / name, test)
    for name, loss in losses.items():
        console.print(f"  {name:9s} mean loss on {len(test)} target sentences not used for selecting: {loss:.3f} nats per token", highlight=False)
    gain = {name: losses["before"] - losses[name] for name in ("selected", "random")}
    console.print(f"training on {len(chosen)} selected rows lowers it by {gain['selected']:.3f}, on as many random rows by {gain['random']:.3f}")
    if not np.isfinite(list(losses.values())).all():
        raise SystemExit("a loss is not finite")


if __name__ == "__main__":
    run(main, __doc__)
