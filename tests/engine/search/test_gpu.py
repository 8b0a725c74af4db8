"""The GPU's scoring against the float64 oracle: plain torch here, the Triton kernel in its interpreter where triton can be imported, a real GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.search import Searcher, SearchRequest
from engine.search.gpu import GpuScanner
from engine.search.topk import best

SHAPES = [((64,), (40,)), ((13,), (17, 1, 30)), ((9, 64, 130, 8), (25, 31))]


def assert_exact(s: Any, device: str, kernel: bool) -> None:
    scanner = GpuScanner(s.segments, s.layout, s.c, device, kernel=kernel)
    allowed = np.random.default_rng(0).random(s.n) < 0.6
    for score in ("influence", "cosine"):
        scores = s.oracle(score)
        for mask in (None, allowed, np.zeros(s.n, np.bool_)):
            rows = np.arange(s.n) if mask is None else np.flatnonzero(mask)
            for top in (1, 7, s.n):
                found = scanner.best(s.segments, s.y, top, score, [1, -1], mask)  # type: ignore[arg-type]  # a Score, inferred as str
                for d, largest in enumerate((True, False)):
                    for q in range(len(s.y)):
                        positions, _ = best(found[d][q][1], found[d][q][0], top, largest=largest)
                        expected, _ = best(scores[q][rows], rows, top, largest=largest)
                        assert positions.tolist() == expected.tolist()


@pytest.mark.parametrize(("k", "sizes"), SHAPES)
def test_plain_torch(sketches: Any, k: Any, sizes: Any) -> None:
    assert_exact(sketches(k, sizes, 18, seed=1), "cpu", kernel=False)


def test_a_searcher_on_a_device(sketches: Any) -> None:
    s = sketches((64,), (30, 25), 3, seed=4)
    request = SearchRequest(s.y, 5, candidates=None)
    plain, device = (Searcher(s.segments, s.layout, s.c, engine=e, device=torch.device("cpu")).search(request) for e in ("plain", "gpu"))  # type: ignore[arg-type]  # names of engines, inferred as str
    assert plain.proponents is not None and device.proponents is not None
    assert plain.proponents.positions.tolist() == device.proponents.positions.tolist()
    assert Searcher(s.segments, s.layout, s.c, device=torch.device("cpu")).engine == "plain"


def test_equal_scores_do_not_end_the_search_too_early(sketches: Any) -> None:
    s = sketches((64,), (400,), 2, seed=2)
    s.segments[0].codes[:] = s.segments[0].codes[0]
    s.segments[0].scales[:] = 1
    assert_exact(s, "cpu", kernel=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("kernel", [False, True])
def test_on_a_gpu(sketches: Any, kernel: bool) -> None:
    for k, sizes in [*SHAPES, ((2048,), (3000,))]:
        assert_exact(sketches(k, sizes, 3, seed=3), "cuda", kernel)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it comes with CUDA builds of torch)")
def test_the_kernel_in_its_interpreter() -> None:
    """In a process of its own: TRITON_INTERPRET is read when the kernel is defined."""
    run = [sys.executable, str(Path(__file__).with_name("interpret_kernel.py"))]
    done = subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "exact"
