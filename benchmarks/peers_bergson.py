"""bergson 2.5.1 for benchmarks/peers.py: an index of randomly projected gradients (its default where it projects: 16 x 16 numbers per module), queries
through its Attributor, whose index is in memory.

`bergson build` refuses batches of more tokens than the model's context, which is 64 here; its worker takes them, so the worker is called with its default of
2,048 tokens. Its three kinds of scores: plain dot products; the query preconditioned by the inverse of the projected gradients' second moment (one-sided);
both sides by the inverse square root and normalised (two-sided, a cosine).
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

import numpy as np
import peers_common as common
import torch
from bergson.build import build_worker
from bergson.config.config import HessianConfig, IndexConfig, PreprocessConfig
from bergson.hessians.hessian_approximations import hessian_worker
from bergson.query.attributor import Attributor
from bergson.utils.worker_utils import setup_model_and_peft
from datasets import Dataset

KINDS: dict[str, dict[str, Any]] = {"dot": {}, "one-sided": {"hessian": True}, "two-sided": {"hessian": True, "unit_norm": True}}
BATCH = 128


def config(args: argparse.Namespace, name: str) -> IndexConfig:
    return IndexConfig(run_path=str(args.out / name), model=str(args.work / "model"), projection_dim=args.projection_dim)


def data(args: argparse.Namespace) -> Dataset:
    ids = [x.tolist() for x in common.token_ids(args.work, "train")]
    return Dataset.from_dict({"input_ids": ids, "length": [len(x) for x in ids]})


def finish(made: IndexConfig) -> None:
    shutil.rmtree(made.run_path, ignore_errors=True)
    shutil.move(str(made.partial_run_path), made.run_path)


def index(args: argparse.Namespace) -> dict[str, Any]:
    rows, found = data(args), {}
    for name, work in (
        ("gradients", lambda cfg: build_worker(0, 0, 1, cfg, PreprocessConfig(), rows)),
        ("hessian", lambda cfg: hessian_worker(0, 0, 1, cfg, HessianConfig(method="autocorrelation"), rows)),
    ):
        made = config(args, name)
        shutil.rmtree(made.partial_run_path, ignore_errors=True)
        made.partial_run_path.mkdir(parents=True)
        found[name] = common.timed(lambda work=work, made=made: work(made))
        finish(made)
    stored = (args.out / "gradients" / "gradients.bin").stat().st_size
    return {
        "seconds": {kind: found["gradients"][kind] + found["hessian"][kind] for kind in ("cpu", "wall")},
        "seconds of": found,
        "bytes_per_example": stored / len(rows),
        "shared_bytes": common.folder_bytes(args.out / "hessian"),
    }


def opened(args: argparse.Namespace, kind: str) -> tuple[Attributor, torch.nn.Module, set[str] | None]:
    chosen = KINDS[kind]
    made = Attributor(args.out / "gradients", unit_norm=bool(chosen.get("unit_norm")), hessian_path=args.out / "hessian" if chosen.get("hessian") else None)
    model, targets = setup_model_and_peft(config(args, "gradients"))
    return made, model.eval(), targets


def answer(opened: tuple[Attributor, torch.nn.Module, set[str] | None], ids: list[torch.Tensor], k: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(scores (Q, k), positions (Q, k)), best first; all of them where k is None."""
    attributor, model, targets = opened
    n = attributor.N if k is None else k
    scores, positions = np.empty((len(ids), n), np.float32), np.empty((len(ids), n), np.int64)
    for chosen in common.by_length(ids, BATCH):
        batch, mask = common.padded([ids[i] for i in chosen])
        with attributor.trace(model.base_model, n, modules=targets) as result:
            common.summed_loss(model(input_ids=batch, attention_mask=mask, use_cache=False).logits, batch, mask).backward()
            model.zero_grad()
        scores[chosen], positions[chosen] = result.scores.numpy(), result.indices.numpy()
    return scores, positions


def queries(args: argparse.Namespace) -> dict[str, Any]:
    asked = common.token_ids(args.work, common.QUERIES)
    ready = opened(args, "one-sided")
    answer(ready, asked[-2:], 10)
    return {"seconds": {str(n): common.timed(lambda n=n: answer(ready, asked[:n], 10)) for n in common.COUNTS}}


def scores(args: argparse.Namespace) -> dict[str, Any]:
    asked = common.token_ids(args.work, "query")
    for kind in KINDS:
        found, positions = answer(opened(args, kind), asked, None)
        values = np.empty_like(found)
        np.put_along_axis(values, positions, found, axis=1)
        np.save(args.out / f"scores-{kind}.npy", values)
    return {}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--projection-dim", type=int, default=16)


if __name__ == "__main__":
    common.run_worker({"index": index, "queries": queries, "scores": scores}, options)
