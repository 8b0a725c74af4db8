"""kronfluence 1.0.1 for benchmarks/peers.py: EK-FAC factors as its index, pairwise scores as its queries. Nothing is kept per example: every batch of queries
goes through all training gradients again."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import peers_common as common
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from kronfluence.utils.dataset import DataLoaderKwargs


class Summed(Task):  # type: ignore[misc]  # kronfluence is not installed where types are checked
    """Token-summed cross-entropy as loss and as measurement, labels sampled for the Fisher."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        labels = batch["input_ids"]
        if sample:
            with torch.no_grad():
                drawn = torch.multinomial(torch.softmax(logits[:, :-1].flatten(0, 1), -1), 1).view(labels.shape[0], -1)
            labels = torch.cat([labels[:, :1], drawn], 1)
        return common.summed_loss(logits, labels, batch["attention_mask"])

    def compute_measurement(self, batch: Any, model: Any) -> torch.Tensor:
        return self.compute_train_loss(batch, model)

    def get_influence_tracked_modules(self) -> list[str]:
        return self.names

    def get_attention_mask(self, batch: Any) -> torch.Tensor:
        return batch["attention_mask"]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids, mask = common.padded(rows)
    return {"input_ids": ids, "attention_mask": mask}


def analyzer(args: argparse.Namespace) -> Analyzer:
    model = common.load_model(args.work, linear=True)
    task = Summed(common.tracked(model))
    made = Analyzer("peer", prepare_model(model, task), task, cpu=True, disable_tqdm=True, output_dir=str(args.out / "results"))
    made.set_dataloader_kwargs(DataLoaderKwargs(collate_fn=collate))
    return made


def ordered(ids: list[torch.Tensor]) -> list[int]:
    """Neighbours in length together, as kronfluence batches rows in the order given."""
    return sorted(range(len(ids)), key=lambda i: len(ids[i]))


def index(args: argparse.Namespace) -> dict[str, Any]:
    ids = common.token_ids(args.work, "train")
    rows = [ids[i] for i in ordered(ids)]
    made = analyzer(args)
    clock = common.Clock()
    made.fit_all_factors(
        factors_name="ekfac",
        dataset=rows,
        per_device_batch_size=args.train_batch,
        factor_args=FactorArguments(strategy="ekfac"),
        overwrite_output_dir=True,
    )
    seconds = clock.read()
    return {"seconds": seconds, "bytes_per_example": 0, "shared_bytes": common.folder_bytes(args.out / "results" / "peer" / "factors_ekfac")}


def score(made: Analyzer, queries: list[torch.Tensor], rows: list[torch.Tensor], query_batch: int, train_batch: int) -> np.ndarray:
    """(Q, N), damping 0.1 * mean(Lambda), kronfluence's own heuristic."""
    name = f"scores-{time.monotonic_ns()}"
    made.compute_pairwise_scores(
        scores_name=name,
        factors_name="ekfac",
        query_dataset=queries,
        train_dataset=rows,
        per_device_query_batch_size=min(query_batch, len(queries)),
        per_device_train_batch_size=train_batch,
        score_args=ScoreArguments(damping_factor=None),
        overwrite_output_dir=True,
    )
    return np.asarray(made.load_pairwise_scores(scores_name=name)["all_modules"])


def queries(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds for one setting of the batch sizes and one number of queries."""
    ids = common.token_ids(args.work, "train")
    rows = [ids[i] for i in ordered(ids)]
    asked = common.token_ids(args.work, common.QUERIES)[: args.count]
    made = analyzer(args)
    return {
        "count": args.count,
        "batches": [args.query_batch, args.train_batch],
        "seconds": common.timed(lambda: score(made, asked, rows, args.query_batch, args.train_batch)),
    }


def scores(args: argparse.Namespace) -> dict[str, Any]:
    ids, asked = common.token_ids(args.work, "train"), common.token_ids(args.work, "query")
    order = ordered(ids)
    found = score(analyzer(args), asked, [ids[i] for i in order], 128, args.train_batch)
    values = np.empty_like(found)
    values[:, order] = found
    np.save(args.out / "scores.npy", values)
    return {}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train-batch", type=int, default=64)
    parser.add_argument("--query-batch", type=int, default=128)
    parser.add_argument("--count", type=int, default=1)


if __name__ == "__main__":
    common.run_worker({"index": index, "queries": queries, "scores": scores}, options)
