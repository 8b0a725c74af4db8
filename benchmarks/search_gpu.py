"""Search on a GPU: the kernel's share of the memory bandwidth, queries per second, and Hamming candidates from FAISS's GPU index. Runs unattended in under 5 minutes; without a GPU it says so and ends.

    python benchmarks/search_gpu.py [--rows 10000000]

One block of 2,048 bits per row, top 100 of both signs. Bandwidth is that of a copy on the same card in the same run. Writes benchmarks/results/search_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.blocks import BlockLayout
from engine.search import ArraySegment, Searcher, SearchRequest
from engine.search.scoring import score_rows

BITS, TOP = 2048, 100
RESULTS = Path(__file__).parent / "results" / "search_gpu.json"


def seconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """The best of `repeats`, the device idle before and after."""
    function()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found)


def kernel_figures(codes: np.ndarray, scales: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """The kernel alone, sixteen queries at a time, beside a copy of the codes."""
    from engine.search import gpu_kernel

    device_codes, device_scales = torch.from_numpy(codes).cuda(), torch.from_numpy(scales).cuda()
    padded = torch.zeros(8 * gpu_kernel.padded_bytes(BITS // 8), 16, device="cuda", dtype=torch.float64)
    padded[:BITS] = torch.from_numpy(y[:16].T / np.abs(y).max()).double()
    high, low = gpu_kernel.split(padded)
    out, total = torch.zeros(len(codes), 16, device="cuda"), padded.sum(0).float()
    kernel = seconds(lambda: gpu_kernel.add_block(device_codes, device_scales, 0, 0, BITS // 8, high, low, total, 1.0, out))
    target = torch.empty_like(device_codes)
    copied = seconds(lambda: target.copy_(device_codes))
    moved = device_codes.nbytes + device_scales.nbytes + 2 * out.nbytes
    return {
        "copy_gb_per_s": 2 * device_codes.nbytes / copied / 1e9,
        "kernel_ms": 1000 * kernel,
        "kernel_gb_per_s": moved / kernel / 1e9,
        "share_of_bandwidth": moved / kernel / (2 * device_codes.nbytes / copied),
    }


def candidate_figures(searcher: Searcher, y: np.ndarray, r: int = 2048) -> dict[str, Any]:
    """Candidates found on the GPU and re-scored beside the exhaustive search: milliseconds of 16 queries, and how many of the best 10 are found."""
    if searcher._on_gpu is None:
        return {"candidates": "not measured: FAISS has no GPU build here, or the codes do not fit on the card twice"}
    exact, near = (searcher.search(SearchRequest(y[:16], 10, direction="proponents", candidates=c)).proponents for c in (None, r))
    assert exact is not None and near is not None
    return {
        "candidates": r,
        "candidates_16_ms": 1000 * seconds(lambda: searcher.search(SearchRequest(y[:16], 10, direction="proponents", candidates=r)), 3),
        "exhaustive_16_ms": 1000 * seconds(lambda: searcher.search(SearchRequest(y[:16], 10, direction="proponents")), 3),
        "candidate_recall_at_10": float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.positions, near.positions, strict=True)])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    n = parser.parse_args().rows
    if not torch.cuda.is_available():
        print("no CUDA GPU: nothing was measured")
        return
    rng = np.random.default_rng(0)
    layout, c = BlockLayout(("model",), (BITS,)), np.ones(1, np.float32)
    codes = rng.integers(0, 2**63, (n, BITS // 64), dtype=np.int64).view(np.uint8)
    scales = np.exp(0.3 * rng.standard_normal((n, 1), dtype=np.float32)).astype(np.float16)
    y = rng.standard_normal((64, BITS), dtype=np.float32)
    searcher = Searcher([ArraySegment(0, codes, scales)], layout, c, engine="gpu", device=torch.device("cuda"))
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "rows": n}
    few = np.arange(n) < 100_000
    result = searcher.search(SearchRequest(y[:2], TOP, allowed=few))
    true = score_rows(codes[:100_000], scales[:100_000], layout, c, y[:2], "influence")
    assert result.proponents is not None
    found["identical_to_float64"] = all(result.proponents.positions[q].tolist() == np.argsort(-true[q])[:TOP].tolist() for q in range(2))

    found |= kernel_figures(codes, scales, y)
    for queries in (1, 16, 64):
        took = seconds(lambda q=queries: searcher.search(SearchRequest(y[:q], TOP)), 3)
        found[f"search_{queries}_ms"], found[f"queries_per_s_{queries}"] = 1000 * took, queries / took
    found |= candidate_figures(searcher, y)
    print(json.dumps(found, indent=1))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
