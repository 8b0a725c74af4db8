"""What every worker of benchmarks/peers.py shares. Runs in the peers' environment as well: only numpy, torch and transformers.

A worker is `python peers_NAME.py STAGE --work DIR --out ROW [options]`; stages run in processes of their own, so that each has its own peak of memory:
index, queries (seconds for 1 to 1,000 queries), scores (the task's queries against every training text). Each writes ROW/STAGE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

COUNTS = (1, 10, 100, 1000)
QUERIES = "disjoint"  # sentences of the same speeches that no method has seen: 2,048, enough for a thousand queries


def texts(work: Path, split: str) -> list[str]:
    return [json.loads(line)["text"] for line in (work / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def token_ids(work: Path, split: str) -> list[torch.Tensor]:
    """(T,) int64 each, as the model under study was trained on them: no special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    return [torch.tensor(ids[: tokenizer.model_max_length]) for ids in tokenizer(texts(work, split))["input_ids"]]


def load_model(work: Path, *, linear: bool) -> nn.Module:
    """The model under study in float32, evaluation mode. linear: nn.Linear in the place of transformers' Conv1D, same weights."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(work / "model", attn_implementation="eager").eval()
    if linear:
        swap_conv1d(model)
    return model


def swap_conv1d(model: nn.Module) -> None:
    """Replace transformers' Conv1D by nn.Linear with the same weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                made = nn.Linear(child.nx, child.nf)
                made.weight.data, made.bias.data = child.weight.data.T.contiguous(), child.bias.data
                setattr(parent, name, made)


def tracked(model: nn.Module) -> list[str]:
    """The modules that every method here attributes to: the linear layers of attention and MLP, not the vocabulary head."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and name != "lm_head"]


def padded(ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input ids (B, T), mask (B, T)), padded on the right with token 0."""
    width = max(len(x) for x in ids)
    batch, mask = torch.zeros(len(ids), width, dtype=torch.int64), torch.zeros(len(ids), width, dtype=torch.int64)
    for row, x in enumerate(ids):
        batch[row, : len(x)], mask[row, : len(x)] = x, 1
    return batch, mask


def by_length(ids: Sequence[torch.Tensor], size: int) -> Iterator[list[int]]:
    """Positions in batches of `size`, neighbours in length together: little padding."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the batch's target tokens: every token but the first of each text."""
    kept = mask[:, 1:].bool()
    return nn.functional.cross_entropy(logits[:, :-1][kept], labels[:, 1:][kept], reduction="sum")


class Clock:
    """Processor seconds of this process (one thread: what else the machine does is not counted) and wall seconds."""

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def read(self) -> dict[str, float]:
        return {"cpu": time.process_time() - self.cpu, "wall": time.perf_counter() - self.wall}


def timed(work: Callable[[], Any]) -> dict[str, float]:
    clock = Clock()
    work()
    return clock.read()


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def run_worker(stages: dict[str, Callable[[argparse.Namespace], dict[str, Any]]], options: Callable[[argparse.ArgumentParser], None] | None = None) -> None:
    """Command line of a worker: run one stage and write what it returns, with the process's peak of resident memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=list(stages))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", help="name of the result, where a stage runs several times")
    if options is not None:
        options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    found = stages[args.stage](args)
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    part = args.out / f"{args.name or args.stage}.part"
    part.write_text(json.dumps(found, indent=1))
    part.replace(part.with_suffix(".json"))
