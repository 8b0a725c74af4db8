"""Counterfactual removal (QLD): retrain without each method's top 5 % of a query's examples; how far does the query's loss rise?

    python benchmarks/outcomes_removal.py --work DIR           # after benchmarks/frontier.py has made the scores; resumable, query by query

For 20 queries and each method: the training texts that the method ranks highest are left out and the base is fine-tuned anew with the same seed. The control leaves
out as many random texts (5 draws, every query measured on each). Rankings and losses are kept in benchmarks/results/removals.npz.
"""

from __future__ import annotations

import argparse
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import outcomes
import torch
from numpy.typing import NDArray
from transformers import GPT2LMHeadModel

N_QUERIES = 20
SHARE = 0.05
CONTROLS = 5


def control_sets(n: int, count: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(9)
    return np.stack([rng.permutation(n)[:count] for _ in range(CONTROLS)])


def load(path: Path, key: str) -> dict[str, NDArray]:
    if not path.exists():
        return {}
    with np.load(path) as stored:
        if str(stored["key"]) != key:
            raise SystemExit(f"{path} belongs to another task; move it away to measure anew")
        return {name: stored[name] for name in stored.files if name != "key"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="pickle {method: scores (queries, texts)}; methods already measured keep their rankings")
    parser.add_argument("--path", type=Path, default=outcomes.RESULTS / "removals.npz")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = outcomes.Task()
    texts, tokenizer = outcomes.read_texts(task)
    key = outcomes.key_of(task, texts, tokenizer)
    base = GPT2LMHeadModel.from_pretrained(args.work / "base").state_dict()
    train_ids, query_ids = outcomes.encode(tokenizer, texts.train), outcomes.encode(tokenizer, texts.query)
    count = round(SHARE * task.n_train)
    values = load(args.path, key)
    for name, scores in pickle.loads(args.rows.read_bytes()).items():
        if f"sets/{name}" not in values:
            values[f"sets/{name}"] = np.argsort(-scores[:N_QUERIES], axis=1, kind="stable")[:, :count].astype(np.int16)
            values[f"losses/{name}"] = np.full(N_QUERIES, np.nan, np.float32)
    values.setdefault("sets/random", control_sets(task.n_train, count).astype(np.int16))
    values.setdefault("losses/random", np.full((CONTROLS, task.n_query), np.nan, np.float32))
    methods = [name.removeprefix("sets/") for name in values if name.startswith("sets/") and name != "sets/random"]
    jobs = [("random", r) for r in range(CONTROLS)] + [(name, q) for q in range(N_QUERIES) for name in methods]
    start, done = time.perf_counter(), 0
    for name, i in jobs:
        if not np.isnan(values[f"losses/{name}"][i]).any():
            continue
        kept = np.setdiff1d(np.arange(task.n_train), values[f"sets/{name}"][i].astype(np.int64))
        found = outcomes.query_losses(outcomes.fine_tune(task, base, [train_ids[j] for j in kept], 0), query_ids)
        values[f"losses/{name}"][i] = found if name == "random" else found[i]
        part = args.path.with_suffix(".part.npz")
        np.savez_compressed(part, key=np.array(key), **values)  # type: ignore[arg-type]  # numpy's stub takes `allow_pickle` for one of the arrays
        part.replace(args.path)
        done += 1
        print(f"{name} {i}: {(time.perf_counter() - start) / done:.0f} s each", flush=True)


def figures(path: Path, draws: int = 1000) -> dict[str, Any]:
    """{method: [mean rise over the control in nats per query, low, high]} over the queries that every method has been measured on."""
    with np.load(path) as stored:
        control = stored["losses/random"]
        control = control[~np.isnan(control).any(1)]
        methods = {n.removeprefix("losses/"): stored[n] for n in stored.files if n.startswith("losses/") and n != "losses/random"}
    whole = np.flatnonzero(~np.isnan(np.stack(list(methods.values()))).any(0))
    if not whole.size:
        return {"queries": 0, "controls": len(control)}
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(whole), (draws, len(whole)))
    rises = {name: (losses[whole] - control[:, whole].mean(0)).astype(np.float64) for name, losses in methods.items()}
    rises["random (one draw against the others)"] = (control[0, whole] - control[1:, whole].mean(0)).astype(np.float64)

    def cell(x: NDArray[np.float64]) -> list[float]:
        return [float(x.mean()), *(float(v) for v in np.percentile(x[chosen].mean(1), [2.5, 97.5]))]

    found: dict[str, object] = {name: cell(x) for name, x in rises.items()}
    found["differences"] = {f"{a} - {b}": cell(rises[a] - rises[b]) for a in methods for b in methods if a != b}
    return {"queries": len(whole), "controls": len(control), "rise": found}


if __name__ == "__main__":
    main()
