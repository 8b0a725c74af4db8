"""Candidates from a GPU: when they serve and what they return, with FAISS's CPU index in the GPU's place; and on a real GPU where there is one."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest
import torch

from engine.search import ArraySegment, Searcher, SearchRequest
from engine.search.candidates import hamming_candidates, query_bits
from engine.search.gpu_candidates import MOST, GpuCandidates, on_gpu

has_gpu = torch.cuda.is_available() and hasattr(faiss, "GpuIndexBinaryFlat")


class StandIn:
    """The CPU's index behind the GPU's interface: at most 2,048 neighbours, no selector."""

    def __init__(self, codes: Any) -> None:
        self.index = faiss.IndexBinaryFlat(8 * codes.shape[1])
        self.index.add(np.ascontiguousarray(codes))
        self.asked: list[int] = []

    def search(self, bits: Any, k: int) -> Any:
        assert 1 <= k <= min(MOST, self.index.ntotal)
        self.asked.append(k)
        return self.index.search(bits, k)


@pytest.mark.parametrize("complement", [False, True])
@pytest.mark.parametrize("r", [1, 7, 60, 500])
def test_the_same_candidates_as_on_the_cpu(sketches: Any, r: int, complement: bool) -> None:
    s = sketches((64, 40), (70, 1, 30), 3, seed=2)
    gpu = GpuCandidates(s.segments, StandIn)
    rng = np.random.default_rng(0)
    for allowed in (None, rng.random(s.n) < 0.7, np.arange(s.n) >= 71, np.zeros(s.n, np.bool_)):
        assert gpu.serves(r, allowed)
        expected = hamming_candidates(s.segments, s.layout, s.y, r, allowed, complement=complement)
        found = hamming_candidates(s.segments, s.layout, s.y, r, allowed, complement=complement, gpu=gpu)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_beyond_its_limits_the_cpu_answers(sketches: Any) -> None:
    s = sketches((64,), (3000,), 2, seed=1)
    gpu = GpuCandidates(s.segments, StandIn)
    some = np.arange(s.n) >= 100
    assert gpu.serves(2048, None) and not gpu.serves(2049, None)
    assert gpu.serves(1948, some) and not gpu.serves(1949, some)
    small = ArraySegment(0, s.segments[0].codes[:2000], s.segments[0].scales[:2000])
    assert GpuCandidates([small], StandIn).serves(10**6, None)
    for r, allowed in ((2049, None), (1949, some)):
        found = hamming_candidates(s.segments, s.layout, s.y, r, allowed, complement=False, gpu=gpu)
        assert [len(p) for p in found] == [r, r]
    assert gpu._indexes == []  # nothing was copied for them


def test_codes_are_copied_once_and_only_when_needed(sketches: Any) -> None:
    s = sketches((64,), (50, 40), 2, seed=1)
    made: list[StandIn] = []

    def make(codes: Any) -> StandIn:
        made.append(StandIn(codes))
        return made[-1]

    gpu = GpuCandidates(s.segments, make)
    for _ in range(3):
        hamming_candidates(s.segments, s.layout, s.y, 5, None, complement=False, gpu=gpu)
    assert len(made) == 2 and [m.asked for m in made] == [[5] * 3] * 2


def test_a_searcher_uses_them_and_answers_the_same(sketches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = sketches((64,), (80, 45), 4, seed=3)
    made: list[StandIn] = []

    def make(codes: Any) -> StandIn:
        made.append(StandIn(codes))
        return made[-1]

    monkeypatch.setattr("engine.search.searcher.on_gpu", lambda segments, device: GpuCandidates(segments, make))
    excluded = np.arange(s.n) % 9 == 0
    request = SearchRequest(s.y, 5, candidates=20)
    on_cpu = Searcher(s.segments, s.layout, s.c, excluded=excluded, engine="plain").search(request)
    on_device = Searcher(s.segments, s.layout, s.c, excluded=excluded, engine="gpu", device=torch.device("cpu")).search(request)
    assert made and on_device.method == on_cpu.method == "candidates" and on_device.n_candidates == on_cpu.n_candidates
    for mine, theirs in ((on_device.proponents, on_cpu.proponents), (on_device.opponents, on_cpu.opponents)):
        assert mine is not None and theirs is not None
        np.testing.assert_array_equal(mine.positions, theirs.positions)
        np.testing.assert_allclose(mine.scores, theirs.scores, rtol=1e-6)


def test_without_a_gpu_there_are_none(sketches: Any) -> None:
    assert on_gpu(sketches((64,), (8,), 1, seed=0).segments, torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="no CUDA GPU, or FAISS was built without one")
def test_on_a_gpu(sketches: Any) -> None:
    s = sketches((64, 40), (3000, 500), 3, seed=2)
    gpu = on_gpu(s.segments, torch.device("cuda"))
    assert gpu is not None
    excluded = np.arange(s.n) % 50 == 0
    request = SearchRequest(s.y, 20, candidates=1500)
    plain = Searcher(s.segments, s.layout, s.c, excluded=excluded, engine="plain").search(request)
    device = Searcher(s.segments, s.layout, s.c, excluded=excluded, engine="gpu", device=torch.device("cuda")).search(request)
    assert plain.proponents is not None and device.proponents is not None
    assert np.mean([len(set(a) & set(b)) / 20 for a, b in zip(plain.proponents.positions, device.proponents.positions, strict=True)]) > 0.97
    for r in (1, 64, 2048):
        near = hamming_candidates(s.segments, s.layout, s.y, r, None, complement=False)
        found = hamming_candidates(s.segments, s.layout, s.y, r, None, complement=False, gpu=gpu)
        codes, queries = np.concatenate([segment.codes for segment in s.segments]), query_bits(s.y, s.layout, complement=False)
        for query, mine, theirs in zip(queries, found, near, strict=True):  # the same distances; which of several equal rows comes last is not said
            own, other = (np.sort(np.unpackbits(codes[p] ^ query, axis=1).sum(axis=1)) for p in (mine, theirs))
            np.testing.assert_array_equal(own, other)
            assert len(set(mine.tolist())) == len(mine)
