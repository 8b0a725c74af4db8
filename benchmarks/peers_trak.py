"""TRAK (traker 0.3.2) for benchmarks/peers.py, one checkpoint: gradients of the model output with respect to the weights that every method here attributes
to, projected by a Gaussian matrix and whitened by their Gram matrix. Its output function is its language-model one: the summed log-odds of the target tokens.
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

import numpy as np
import peers_common as common
import torch
from trak import TRAKer
from trak.modelout_functions import AbstractModelOutput

BATCH = 256


class LogOdds(AbstractModelOutput):  # type: ignore[misc]  # traker is not installed where types are checked
    """Sum over target tokens of log p / (1 - p); the weight of an example is its mean 1 - p."""

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def get_output(model: Any, weights: Any, buffers: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, (weights, buffers), (ids[None],))[0, :-1]
        log_p = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        odds = log_p - torch.log1p(-torch.exp(log_p).clamp(max=1 - 1e-6))
        return (odds * mask[1:]).sum()

    def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> torch.Tensor:
        ids, mask = batch
        with torch.no_grad():
            logits = torch.func.functional_call(model, (weights, buffers), (ids,))[:, :-1]
            p = torch.softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        kept = mask[:, 1:]
        return (((1 - p) * kept).sum(1) / kept.sum(1)).unsqueeze(-1)


class Plain(torch.nn.Module):
    """Logits from ids alone: texts are padded on the right, and attention looks to the left."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        x = model.transformer.wte(ids) + model.transformer.wpe.weight[: ids.shape[1]]
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)[None, None]
        for block in model.transformer.h:
            x = block(x, attention_mask=mask)
            x = x[0] if isinstance(x, tuple) else x
        return model.lm_head(model.transformer.ln_f(x))


def opened(args: argparse.Namespace) -> tuple[TRAKer, Plain]:
    model = Plain(common.load_model(args.work, linear=True))
    weights = [f"{name}.weight" for name in common.tracked(model.model)]
    made = TRAKer(
        model=model,
        task=LogOdds(),
        train_set_size=len(common.texts(args.work, "train")),
        save_dir=str(args.out / "trak"),
        device="cpu",
        proj_dim=args.projection_dim,
        use_half_precision=False,
        grad_wrt=[f"model.{name}" for name in weights],
    )
    return made, model


def batches(ids: list[torch.Tensor], size: int = BATCH) -> Any:
    for chosen in common.by_length(ids, size):
        yield chosen, [*common.padded([ids[i] for i in chosen])]


def index(args: argparse.Namespace) -> dict[str, Any]:
    shutil.rmtree(args.out / "trak", ignore_errors=True)
    ids = common.token_ids(args.work, "train")
    made, model = opened(args)

    def work() -> None:
        made.load_checkpoint(model.state_dict(), model_id=0)
        for chosen, batch in batches(ids):
            made.featurize(batch=batch, inds=np.array(chosen))
        made.finalize_features()

    seconds = common.timed(work)
    return {"seconds": seconds, "bytes_per_example": args.projection_dim * 4, "shared_bytes": 0}


def score(made: TRAKer, model: Plain, ids: list[torch.Tensor], name: str) -> np.ndarray:
    made.start_scoring_checkpoint(exp_name=name, checkpoint=model.state_dict(), model_id=0, num_targets=len(ids))
    for chosen, batch in batches(ids):
        made.score(batch=batch, inds=np.array(chosen))
    return np.asarray(made.finalize_scores(exp_name=name)).T


def queries(args: argparse.Namespace) -> dict[str, Any]:
    asked = common.token_ids(args.work, common.QUERIES)
    made, model = opened(args)
    return {"seconds": {str(n): common.timed(lambda n=n: score(made, model, asked[:n], f"timing-{n}")) for n in common.COUNTS}}


def scores(args: argparse.Namespace) -> dict[str, Any]:
    made, model = opened(args)
    np.save(args.out / "scores.npy", score(made, model, common.token_ids(args.work, "query"), "scores"))
    return {}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--projection-dim", type=int, default=2048)


if __name__ == "__main__":
    common.run_worker({"index": index, "queries": queries, "scores": scores}, options)
