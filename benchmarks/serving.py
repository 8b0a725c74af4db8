"""The server under load, on loopback: overhead, throughput, correctness with 64 clients, overload and recovery.

    python -m benchmarks.serving [--store STORE] [--work FOLDER] [--seconds 60] [--quick]

Without a store, makes a GPT-2 of about 1 million parameters and 2,000 rows in the work folder once. Starts `eogp serve` on it as a process of its own, and writes
benchmarks/results/service.json. Server and clients share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.service_load import Connection, Outcome, closed_loop, disagreement, open_loop, scores

RESULTS = Path(__file__).parent / "results" / "service.json"
WORDS = re.findall(r"\w+", "the capital of is in a and people river state union element gold iron year city north south law trade peace war nation congress")


def make(work: Path, rows: int) -> tuple[Path, Path]:
    """(model, store), made once."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from indexer.index import index
    from indexer.settings import IndexSettings

    model, store = work / "model", work / "store"
    if not (store / "CURRENT").exists():
        rng = np.random.default_rng(0)
        texts = [" ".join(rng.choice(WORDS, int(rng.integers(4, 30)))) + f" {i}." for i in range(rows)]
        (work / "data.jsonl").write_text("".join(json.dumps({"id": f"row-{i}", "text": t}) + "\n" for i, t in enumerate(texts)))
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        bpe.train_from_iterator(
            texts,
            trainers.BpeTrainer(vocab_size=512, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
        )
        PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>").save_pretrained(model)
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)).save_pretrained(model)
        index(store, IndexSettings(model=str(model), data=[str(work / "data.jsonl")], bytes_per_example=64, fit_examples=256, pca_examples=600, m=1024))
    return model, store


def start(store: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """A server process and its address."""
    command = [sys.executable, "-c", "from engine.cli import main; main()", "serve", str(store), "--port", "0", "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, "http://" + line.split("http://")[1].split()[0]


def queries(n: int = 64) -> list[dict[str, Any]]:
    """Mixed lengths: 4 to 60 words."""
    rng = np.random.default_rng(1)
    return [{"text": " ".join(rng.choice(WORDS, int(k)))} for k in rng.choice([4, 8, 16, 30, 60], n, p=[0.3, 0.3, 0.2, 0.15, 0.05])]


def bodies_of(asked: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps({"queries": [q], "top_k": 10}).encode() for q in asked]


async def overhead(url: str, engine: Any, asked: list[dict[str, Any]], rounds: int = 150) -> dict[str, float]:
    """The same query answered by the engine alone and over HTTP, in turns; medians in milliseconds."""
    from engine.query import QueryInput, QuerySpec

    bodies = bodies_of(asked)
    connection = Connection(url)
    alone: list[float] = []
    served: list[float] = []
    for i in range(rounds):
        q = asked[i % len(asked)]
        at = time.perf_counter()
        engine.answer([QuerySpec((QueryInput(**q),))])
        alone.append(time.perf_counter() - at)
        at = time.perf_counter()
        status, _ = await connection.ask(bodies[i % len(asked)])
        served.append(time.perf_counter() - at)
        assert status == 200
    await connection.close()
    difference = [s - a for s, a in zip(served[10:], alone[10:], strict=True)]
    return {
        "engine_ms": statistics.median(alone[10:]) * 1000,
        "service_ms": statistics.median(served[10:]) * 1000,
        "overhead_ms": statistics.median(difference) * 1000,
    }


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; unlike latency, it hardly depends on who else uses the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def processor_time(url: str, pid: int, engine: Any, asked: list[dict[str, Any]], requests: int) -> dict[str, float]:
    """Processor milliseconds per request: the engine alone, the server with 1 client, and with 16 (which it answers in batches)."""
    from engine.query import QueryInput, QuerySpec

    bodies = bodies_of(asked)
    before = time.process_time()
    for i in range(requests):
        engine.answer([QuerySpec((QueryInput(**asked[i % len(asked)]),), top_k=10)])
    found = {"engine": (time.process_time() - before) * 1000 / requests}
    for clients in (1, 16):
        before = cpu_seconds(pid)
        outcome = await closed_loop(url, bodies, clients, requests=requests)
        found[f"clients_{clients}"] = (cpu_seconds(pid) - before) * 1000 / sum(outcome.statuses.values())
    return {name: round(value, 2) for name, value in found.items()}


async def recovery(url: str, body: bytes) -> float:
    """Seconds until a request is answered with 200 again."""
    at = time.perf_counter()
    connection = Connection(url)
    while True:
        status, _ = await connection.ask(body)
        if status == 200:
            await connection.close()
            return time.perf_counter() - at
        await asyncio.sleep(0.05)


def shown(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests_per_second": round(outcome.rate, 1),
        "p50_ms": round(outcome.percentile(50), 1),
        "p99_ms": round(outcome.percentile(99), 1),
        "statuses": {str(k): v for k, v in sorted(outcome.statuses.items())},
        "wrong": len(outcome.wrong),
    }


async def measure(url: str, pid: int, store: Path, seconds: float, quick: bool) -> dict[str, Any]:
    """All figures of one run."""
    from engine.query import QueryEngine, QueryInput, QuerySpec

    engine = QueryEngine.open(store)
    asked = queries()
    bodies = bodies_of(asked)
    if quick:
        await closed_loop(url, bodies, 4, requests=30)  # warm-up
        return {"processor_ms_per_request": await processor_time(url, pid, engine, asked, 128)}
    alone = []
    for q in asked:
        found = engine.answer([QuerySpec((QueryInput(**q),), top_k=10)])[0].answers[0]
        alone.append([{h.id: h.score for h in hits or ()} for hits in (found.proponents, found.opponents)])
    await closed_loop(url, bodies, 4, requests=100)  # warm-up
    result: dict[str, Any] = {"overhead": await overhead(url, engine, asked)}
    result["processor_ms_per_request"] = await processor_time(url, pid, engine, asked, 256)
    one = await closed_loop(url, bodies, 1, seconds=seconds / 4)
    sixteen = await closed_loop(url, bodies, 16, seconds=seconds / 4)
    result["clients_1"], result["clients_16"] = shown(one), shown(sixteen)
    result["speedup_16"] = round(sixteen.rate / one.rate, 2)
    many = await closed_loop(url, bodies, 64, seconds=seconds, check=lambda i, a: disagreement(scores(a), alone[i]))
    result["clients_64"] = shown(many)
    over = await open_loop(url, bodies, 10 * sixteen.rate, seconds / 6)
    result["overload_10x"] = shown(over)
    result["recovery_s"] = round(await recovery(url, bodies[0]), 3)
    return result


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--store", type=Path, help="a store of a causal language model, for instance the demo's")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "eogp-service-benchmark")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="only processor time per request, which a busy machine hardly disturbs")
    parser.add_argument("--rows", type=int, default=2000)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    store = options.store or make(options.work, options.rows)[1]
    load = os.getloadavg()[0]
    process, url = start(store)
    try:
        result = asyncio.run(measure(url, process.pid, store, options.seconds, options.quick))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    result["machine"] = {"cores": os.cpu_count(), "processor": platform.machine(), "load_before": round(load, 1)}
    if not options.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
