"""Search on CPU: the scan beside one plain read of the codes, and beside the other ways to do it.

    python benchmarks/search.py [--rows 1000000] [--threads 2] [--repeats 5] [--only one,blocks,growth,others,filters]

Every figure is the best of `repeats` in one run; ratios are within the run. Codes and queries are random: a scan does not depend on what the bits say.
Writes benchmarks/results/search.json and prints tables.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from engine.blocks import BlockLayout
from engine.search import ArraySegment, Searcher, SearchRequest, compile_filter
from engine.search.candidates import query_bits
from engine.search.scoring import score_rows
from engine.search.vector_ops import jit

BITS, TOP, BATCH = 2048, 100, 16
RESULTS = Path(__file__).parent / "results" / "search.json"


@jit
def _read(words: Any) -> Any:
    total = np.uint64(0)
    for i in range(words.shape[0]):
        total += words[i]
    return total


def best_of(repeats: int, *functions: Callable[[], Any]) -> list[float]:
    """Milliseconds of each function, the best of `repeats`, taking turns so that what else the machine does hits all alike."""
    for f in functions:
        f()
    times = [[] for _ in functions]
    for _ in range(repeats):
        for f, own in zip(functions, times, strict=True):
            started = time.perf_counter()
            f()
            own.append(1000 * (time.perf_counter() - started))
    return [min(own) for own in times]


def make(n: int, n_blocks: int, seed: int = 0) -> tuple[list[ArraySegment], BlockLayout, np.ndarray]:
    rng = np.random.default_rng(seed)
    layout = BlockLayout(tuple(f"block.{b}" for b in range(n_blocks)), (BITS,) * n_blocks)
    codes = rng.integers(0, 2**63, (n, layout.code_bytes // 8), dtype=np.int64).view(np.uint8)  # 63 random bits of 64
    scales = np.exp(0.3 * rng.standard_normal((n, n_blocks), dtype=np.float32)).astype(np.float16)
    return [ArraySegment(0, codes, scales)], layout, rng.standard_normal((BATCH, layout.total_k), dtype=np.float32)


def plain_read(codes: np.ndarray, threads: int) -> Callable[[], Any]:
    words = codes.reshape(-1).view(np.uint64)
    parts = np.array_split(words, threads)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(_read, parts))


def scan_figures(n: int, n_blocks: int, threads: int, repeats: int) -> dict[str, Any]:
    """One read, one query, a batch, a filter; top 100 of both signs."""
    segments, layout, y = make(n, n_blocks)
    searcher = Searcher(segments, layout, np.ones(n_blocks, np.float32), threads=threads, engine="scan")
    searcher.warm_up()
    allowed = np.random.default_rng(1).random(n) < 0.1
    read, single, cosine, batch, filtered = best_of(
        repeats,
        plain_read(segments[0].codes, threads),
        lambda: searcher.search(SearchRequest(y[:1], TOP)),
        lambda: searcher.search(SearchRequest(y[:1], TOP, "cosine")),
        lambda: searcher.search(SearchRequest(y, TOP)),
        lambda: searcher.search(SearchRequest(y[:1], TOP, allowed=allowed)),
    )
    return {
        "rows": n,
        "blocks": n_blocks,
        "code_mb": segments[0].codes.nbytes / 1e6,
        "read_ms": read,
        "single_ms": single,
        "single_cosine_ms": cosine,
        "single_over_read": single / read,
        "batch_per_query_ms": batch / BATCH,
        "batch_over_single": batch / BATCH / single,
        "filter_10_percent_ms": filtered,
        "filter_extra_ms": filtered - single,
        "identical_to_float64": check(segments, layout, y, searcher),
    }


def check(segments: list[ArraySegment], layout: BlockLayout, y: np.ndarray, searcher: Searcher) -> bool:
    """The first rows' top 100 by the scan against float64 scores of the same rows, for two queries of the batch and both scores."""
    n = min(segments[0].n, 200_000_000 // layout.total_k)
    allowed = np.arange(segments[0].n) < n
    for score in ("influence", "cosine"):
        found = searcher.search(SearchRequest(y[:2], TOP, score, allowed=allowed))  # type: ignore[arg-type]  # the loop runs over Score values, typed str
        true = score_rows(segments[0].codes[:n], segments[0].scales[:n], layout, np.ones(layout.n_blocks, np.float32), y[:2], score)  # type: ignore[arg-type]  # the loop runs over Score values, typed str
        for q in range(2):
            order = np.argsort(true[q], kind="stable")
            if found.opponents.positions[q].tolist() != order[:TOP].tolist() or found.proponents.positions[q].tolist() != order[::-1][:TOP].tolist():  # type: ignore[union-attr]  # both directions were asked for
                return False
    return True


def others(n: int, threads: int, repeats: int) -> list[dict[str, Any]]:
    """Other ways to rank one query over one block, each with what it keeps in memory per row, scaled to n rows where it was run on fewer."""
    faiss: Any = import_module("faiss")
    faiss.omp_set_num_threads(threads)
    torch.set_num_threads(threads)
    segments, layout, y = make(n, 1)
    codes, scales = segments[0].codes, segments[0].scales
    searcher = Searcher(segments, layout, np.ones(1, np.float32), threads=threads, engine="scan")
    searcher.warm_up()
    flat = faiss.IndexBinaryFlat(BITS)
    flat.add(codes)
    shards = faiss.IndexBinaryShards(BITS, True, True)
    parts = [faiss.IndexBinaryFlat(BITS) for _ in range(threads)]
    for part, share in zip(parts, np.array_split(codes, threads), strict=True):
        part.add(np.ascontiguousarray(share))
        shards.add_shard(part)
    bits = np.concatenate([query_bits(y[:1], layout, complement=c) for c in (False, True)])
    near = Searcher([ArraySegment(0, codes, scales, flat)], layout, np.ones(1, np.float32), threads=threads)
    rabitq = faiss.IndexRaBitQ(BITS, faiss.METRIC_INNER_PRODUCT)
    rabitq.is_trained, rabitq.qb = True, 8
    faiss.copy_array_to_vector(np.zeros(BITS, np.float32), rabitq.center)
    filled = np.zeros((n, rabitq.code_size), np.uint8)
    filled[:, : BITS // 8] = codes
    filled[:, BITS // 8 : BITS // 8 + 8] = np.stack([np.zeros(n, np.float32), scales[:, 0].astype(np.float32) * np.float32(BITS**0.5)], axis=1).view(np.uint8)
    rabitq.add_sa_codes(np.ascontiguousarray(filled))
    del filled
    both = np.concatenate([y[:1], -y[:1]])
    some = min(n, 50_000)
    dense = torch.randn(some, 4096).half()
    query = torch.randn(4096, 1).half()
    table = torch.from_numpy(_tables(y[0])).reshape(-1, 1)
    offsets = torch.arange(BITS // 8) * 256
    few = min(n, 20_000)
    ways: list[tuple[str, Callable[[], Any], float, float, str]] = [
        ("scan (this project)", lambda: searcher.search(SearchRequest(y[:1], TOP)), 1, BITS / 8 + 2, "exact by (14)"),
        ("FAISS Hamming, binary flat", lambda: shards.search(bits, TOP), 1, BITS / 8, "not by (14)"),
        ("FAISS Hamming, 10,000 candidates, then (14)", lambda: near.search(SearchRequest(y[:1], TOP, candidates=10_000)), 1, BITS / 8 + 2, "approximate"),
        ("FAISS RaBitQ filled with our bits, qb=8", lambda: rabitq.search(both, TOP), 1, rabitq.code_size, "approximate; a second copy of the codes"),
        ("byte tables, torch embedding_bag", lambda: _by_tables(codes[:few], table, offsets), n / few, BITS / 8 + 2, f"exact; {few:,} rows, scaled"),
        ("unpack and matmul, torch float32", lambda: _by_matmul(codes[:some], y[0]), n / some, BITS / 8 + 2, f"exact; {some:,} rows, scaled"),
        ("fp16 matmul, LoGra size (8 KB per row)", lambda: (dense @ query).topk(TOP, 0), n / some, 8192, f"{some:,} rows, scaled"),
        (
            "numpy, float64",
            lambda: score_rows(codes[:few], scales[:few], layout, np.ones(1, np.float32), y[:1], "influence"),
            n / few,
            BITS / 8 + 2,
            f"exact; {few:,} rows, scaled",
        ),
    ]
    times = best_of(repeats, *[way[1] for way in ways])
    return [
        {"way": name, "ms": ms * factor, "mb": bytes_per_row * n / 1e6, "over_scan": ms * factor / times[0], "note": note}
        for (name, _, factor, bytes_per_row, note), ms in zip(ways, times, strict=True)
    ]


def _tables(y: np.ndarray) -> np.ndarray:
    """(bytes, 256): what each value of each byte adds to <y, b>."""
    signs = 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") - 1
    return (y.reshape(-1, 8) @ signs.T).astype(np.float32)


def _by_tables(codes: np.ndarray, table: torch.Tensor, offsets: torch.Tensor) -> Any:
    scores = torch.nn.functional.embedding_bag(torch.from_numpy(codes).long() + offsets, table, mode="sum")
    return scores.topk(TOP, 0)


def _by_matmul(codes: np.ndarray, y: np.ndarray) -> Any:
    query = torch.from_numpy(y)
    scores = [torch.from_numpy(np.unpackbits(codes[i : i + 8192], axis=1, bitorder="little")).float() @ query for i in range(0, len(codes), 8192)]
    return torch.cat(scores).topk(TOP)


def filter_figures(n: int, repeats: int) -> dict[str, float]:
    """Compiling a filter that keeps a tenth of n rows, on a text column and on a number."""
    rng = np.random.default_rng(0)
    kinds = pa.array([f"kind-{i}" for i in range(10)])
    table = pa.table({"kind": kinds.take(pa.array(rng.integers(0, 10, n))), "year": rng.integers(0, 100, n)})
    ids = pa.array(np.arange(n)).cast(pa.string())
    conditions = {
        "text_equals": {"field": "kind", "eq": "kind-3"},
        "number_in_range": {"field": "year", "gte": 20, "lt": 30},
        "id_in": {"field": "id", "in": [str(i) for i in range(1000)]},
    }
    times = best_of(repeats, *[lambda c=c: compile_filter(c, table, ids) for c in conditions.values()])
    return {f"{name}_ms": ms for name, ms in zip(conditions, times, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="one,blocks,growth,others,filters")
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    threads, repeats, only = arguments.threads, arguments.repeats, arguments.only.split(",")
    found["machine"] = {"cpus": os.cpu_count(), "threads": threads}
    if "one" in only:
        found["one_block"] = {**scan_figures(arguments.rows, 1, threads, repeats), "load_before": os.getloadavg()[0]}
        print(json.dumps(found["one_block"], indent=1), flush=True)
    if "blocks" in only:
        found["blocks_48"] = {**scan_figures(arguments.rows // 10, 48, threads, repeats), "load_before": os.getloadavg()[0]}
        print(json.dumps(found["blocks_48"], indent=1), flush=True)
    if "growth" in only:
        sizes = [arguments.rows // 100, arguments.rows // 10, arguments.rows, 4 * arguments.rows]
        found["growth"] = [growth(n, threads, repeats) for n in sizes]
        print(json.dumps(found["growth"], indent=1), flush=True)
    if "others" in only:
        found["others"] = others(arguments.rows, threads, max(2, repeats // 2))
        for row in found["others"]:
            print(f"{row['way']:45s} {row['ms']:10.1f} ms {row['over_scan']:8.1f} x {row['mb']:9.0f} MB  {row['note']}", flush=True)
    if "filters" in only:
        found["filters"] = filter_figures(arguments.rows, repeats)
        print(json.dumps(found["filters"], indent=1), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def growth(n: int, threads: int, repeats: int) -> dict[str, float]:
    segments, layout, y = make(n, 1)
    searcher = Searcher(segments, layout, np.ones(1, np.float32), threads=threads, engine="scan")
    searcher.warm_up()
    single, read = best_of(repeats, lambda: searcher.search(SearchRequest(y[:1], TOP)), plain_read(segments[0].codes, threads))
    return {"rows": n, "single_ms": single, "ns_per_row": 1e6 * single / n, "read_ms": read}


if __name__ == "__main__":
    main()
