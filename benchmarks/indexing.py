"""`eogp index` measured: the share of the sketching stage that the model is at work, and memory after 500 and 3,000 examples.

    python -m benchmarks.indexing [--rows 3000] [--width 128] [--layers 2] [--json FILE]

A model from a fresh configuration is enough: what is measured is the job around it. The smaller the model, the harder the test.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from benchmarks.synthetic_store import WORDS
from indexer.index import index
from indexer.process import resident
from indexer.reporter import Reporter, Stage
from indexer.settings import IndexSettings


class Memory(Reporter):
    """Notes the memory in use whenever the sketching stage has come a step further."""

    def __init__(self) -> None:
        super().__init__(log_json=True)
        self.seen: list[tuple[int, int]] = []

    def event(self, kind: str, **fields: Any) -> None:
        """Quiet."""

    def show(self, stage: Stage) -> None:
        if stage.name == "sketch":
            now = resident()
            self.seen.append((stage.done, now["anonymous"] + now["mapped"]))

    def at(self, examples: int) -> int:
        """Bytes resident when so many examples were sketched."""
        return next(size for done, size in self.seen if done >= examples)


def make_model(folder: Path, width: int, layers: int) -> None:
    """A GPT-2 of that shape with a tokenizer of bytes."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=128, n_embd=width, n_layer=layers, n_head=4, bos_token_id=256, eos_token_id=256)
    GPT2LMHeadModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", model_max_length=128).save_pretrained(folder)


def make_data(path: Path, rows: int) -> None:
    """Texts of 40 to 120 bytes."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            text = " ".join(WORDS[w] for w in rng.integers(0, len(WORDS), rng.integers(6, 16)))
            file.write(json.dumps({"text": text, "number": i, "kind": "ab"[i % 2]}) + "\n")


def measure(work: Path, rows: int, width: int, layers: int) -> dict[str, Any]:
    """Index `rows` examples; busy share, memory, and time by stage."""
    make_model(work / "model", width, layers)
    make_data(work / "data.jsonl", rows)
    settings = IndexSettings(
        model=str(work / "model"),
        data=[str(work / "data.jsonl")],
        fit_examples=128,
        pca_examples=256,
        bytes_per_example=34,
        m=1024,
        shard_rows=250,
        log_json=True,
    )
    memory = Memory()
    report = index(work / "store", settings, memory)
    early, late = memory.at(500), memory.at(rows)
    tokens = report["counts"]["tokens"]
    return {
        "rows": rows,
        "tokens": tokens,
        "busy_share": report["busy_share"],
        "memory_at_500": early,
        "memory_at_end": late,
        "memory_growth": late / early - 1,
        "seconds": report["seconds"],
        "examples_per_second": rows / report["seconds"]["sketch"],
        "bytes_per_example": report["bytes_per_example"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="eogp-indexing-"))
    try:
        found = measure(work, given.rows, given.width, given.layers)
    finally:
        shutil.rmtree(work)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
