"""What a query costs, phase by phase, on a store with its model: `python -m benchmarks.query --store demo/store --model demo/model`.

All in one run: the model's forward and backward pass, stage 1 on top of it, stage 2 with P's two-bit codes expanded by torch and by the compiled table, and
requests that search one after the other or together. Processor time, the best of some repeats: a busy machine disturbs it less. Writes benchmarks/results/query.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine import quantised
from engine.example import Example, collate
from engine.query import QueryEngine, QueryInput, QuerySpec
from engine.settings import ModelSettings

PROMPT, COMPLETION = "The capital of Peru is", " Lima"
SIZES = (1, 16)
PLAIN_CHUNK = 1 << 20  # entries that torch expands at a time
RESULTS = Path(__file__).parent / "results" / "query.json"


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Processor time of all threads, the best of `repeats`, after one to warm up."""
    work()
    found = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return round(1000 * min(found), 2)


def stage2(engine: QueryEngine, z: dict[str, torch.Tensor], repeats: int) -> dict[str, float]:
    """P applied to the same coordinates in two ways."""
    projection = engine.sketcher.projection
    found = {"stage 2, compiled": milliseconds(lambda: projection.project(z), repeats)}
    kept = quantised._COMPILED, quantised._CONVERT
    quantised._COMPILED, quantised._CONVERT = 1 << 62, PLAIN_CHUNK
    try:
        found["stage 2, torch"] = milliseconds(lambda: projection.project(z), repeats)
    finally:
        quantised._COMPILED, quantised._CONVERT = kept
    return found


def measure(engine: QueryEngine, n: int, repeats: int) -> dict[str, float]:
    """Phases of n equal requests in one batch."""
    spec = QuerySpec((QueryInput(prompt=PROMPT, completion=COMPLETION),))
    batch = [engine.prepare(spec) for _ in range(n)]
    examples = [x for p in batch for x in p.inputs if isinstance(x, Example)]
    tensors = collate(examples, range(n), engine.loaded.pad_id, engine.loaded.device)
    coordinates = engine.sketcher.coordinates
    z: dict[str, torch.Tensor] = {}
    coordinates.stream(tensors, lambda name, values: z.__setitem__(name, values.clone()))
    sketched = engine.sketch(batch)
    searched = engine.search(batch, sketched)
    return {
        "forward and backward": milliseconds(lambda: coordinates.capture.run(tensors, lambda *_: None), repeats),
        "with stage 1": milliseconds(lambda: coordinates.stream(tensors, lambda *_: None), repeats),
        **stage2(engine, z, repeats),
        "search, together": milliseconds(lambda: engine.search(batch, sketched), repeats),
        "search, one by one": milliseconds(lambda: [engine.search([p], [s]) for p, s in zip(batch, sketched, strict=True)], repeats),
        "rows and answer": milliseconds(lambda: [engine.finish(*each) for each in zip(batch, sketched, searched, strict=True)], repeats),
        "whole": milliseconds(lambda: engine.answer([spec] * n), repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    engine = QueryEngine.open(arguments.store, ModelSettings(model=arguments.model))
    matrices = engine.sketcher.projection.matrices.values()
    found: dict[str, Any] = {
        "rows": engine.store.n_rows,
        "entries of P": sum(p.shape[0] * p.shape[1] for p in matrices),
        "bytes of P": engine.sketcher.projection.projection_bytes,
        "threads": torch.get_num_threads(),
        "processor milliseconds": {str(n): measure(engine, n, arguments.repeats) for n in SIZES},
    }
    print(json.dumps(found, indent=1))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
