"""Module groups, checkpoints and candidate sets: whatever the memory, the same curvature."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
)

import engine.memory as memory
from engine.capture import Capture
from engine.curvature import Curvature
from engine.errors import LimitError, StoreError
from engine.example import Example, collate
from engine.fit_curvature import fit_curvature
from engine.groups import Group, group_bytes, plan_groups
from engine.model import LoadedModel, from_parts
from engine.modules import TrackedModule, track
from engine.recompute import recomputed_layers
from engine.settings import FitSettings
from engine.uncompressed import UncompressedInfluence


def make_examples(n: int, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        ids = rng.integers(1, 320, rng.integers(4, 13))
        found.append(Example(f"e{i}", ids, ids, np.arange(len(ids)) >= 1, ""))
    return found


def fit(loaded: LoadedModel, examples: list[Example], fit_memory: int | None = None, **options: Any) -> Curvature:
    settings = FitSettings(batch_tokens=48, fit_memory=fit_memory)
    return fit_curvature(loaded, track(loaded).tracked, examples, range(len(examples)), settings, **options)


def assert_identical(a: Curvature, b: Curvature) -> None:
    assert list(a.modules) == list(b.modules) and a.skipped == b.skipped
    for name, m in a.modules.items():
        other = b.modules[name]
        assert m.mean_lambda == other.mean_lambda and m.damping == other.damping
        for part in ("q_s", "q_a", "lam", "lambda_s", "lambda_a"):
            assert torch.equal(getattr(m, part), getattr(other, part)), (name, part)


def test_grouped_equals_ungrouped_to_the_bit(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    examples, modules = make_examples(12), track(from_parts(tiny_llama)).tracked
    whole = fit(loaded, examples)
    one_by_one = max(group_bytes([m]) for m in modules)
    for budget in (one_by_one, 2 * one_by_one):
        assert len(plan_groups(modules, budget)) > 1
        assert_identical(whole, fit(loaded, examples, budget))


def test_groups_keep_inputs_together_and_cover_every_module_once(tiny_llama: LlamaForCausalLM) -> None:
    modules = track(from_parts(tiny_llama)).tracked
    attention = [m for m in modules if m.input_group == modules[0].input_group]
    assert len(attention) == 3
    groups = plan_groups(modules, max(group_bytes(attention), max(group_bytes([m]) for m in modules)))
    assert sorted(m.name for g in groups for m in g.modules) == sorted(m.name for m in modules)
    for g in groups:
        names = {m.name for m in g.modules}
        assert {m.name for m in attention} <= names or not names & {m.name for m in attention}
    layers = [max(m.layer for m in g.modules) for g in groups]
    assert layers == sorted(layers, reverse=True)  # the last layers first


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_run_again_in_the_backward_give_the_same_curvature(tiny_llama: LlamaForCausalLM, tiny_gpt2: GPT2LMHeadModel, family: str) -> None:
    model, inner = (tiny_llama, "layers.1.mlp.act_fn") if family == "llama" else (tiny_gpt2, "h.1.mlp.act")
    loaded, examples = from_parts(model), make_examples(8)
    runs: list[int] = []
    model.base_model.get_submodule(inner).register_forward_hook(lambda *_: runs.append(1))
    kept = fit(loaded, examples)
    plain = len(runs)
    with recomputed_layers(model):
        assert_identical(kept, fit(loaded, examples))
    assert len(runs) - plain > 1.5 * plain  # nearly every pass runs the layer twice
    runs.clear()
    fit(loaded, examples)
    assert len(runs) == plain


def test_a_budget_too_small_for_one_module_is_refused_with_numbers(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(LimitError, match=r"mlp\.gate_proj \(40 x 24\) needs \d+ KB .* raise --fit-memory to at least \d+ KB"):
        fit(from_parts(tiny_llama), make_examples(3), 9_000)


def test_backward_stops_at_the_lowest_module_of_the_group(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    modules = track(loaded).tracked
    groups = plan_groups(modules, max(group_bytes([m]) for m in modules))
    assert {m.layer for m in groups[0].modules} == {1}
    below: list[torch.Tensor] = []
    handle = tiny_llama.model.layers[0].register_forward_hook(lambda module, args, output: below.append(output))
    first = fit_curvature(loaded, groups[0].modules, make_examples(3), range(3), FitSettings())
    handle.remove()
    assert list(first.modules) == [m.name for m in groups[0].modules]
    assert below and not any(output.requires_grad for output in below)


def test_a_killed_fit_resumes_at_the_finished_group_to_the_same_bits(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    loaded = from_parts(tiny_llama)
    examples, modules = make_examples(12), track(loaded).tracked
    budget = 2 * max(group_bytes([m]) for m in modules)
    whole = fit(loaded, examples)
    n_groups = len(plan_groups(modules, budget))

    class KilledError(Exception):
        pass

    steps: list[int] = []

    def kill(phase: str, done: int, total: int) -> None:
        steps.append(done)
        if done == total // 2 + 1:
            raise KilledError

    with pytest.raises(KilledError):
        fit(loaded, examples, budget, checkpoint=tmp_path, progress=kill)
    finished = len(list(tmp_path.glob("group-*.safetensors")))
    assert 0 < finished < n_groups
    with pytest.raises(StoreError):
        Curvature.load(tmp_path)  # half a fit is not read as a whole one
    total: list[int] = []
    resumed = fit(loaded, examples, budget, checkpoint=tmp_path, progress=lambda phase, done, n: total.append(n))
    assert len(total) == total[0] < len(steps)
    assert_identical(whole, resumed)
    assert_identical(whole, Curvature.load(tmp_path))
    again = fit(loaded, examples, checkpoint=tmp_path, progress=lambda *_: pytest.fail("a finished fit was run again"))
    assert_identical(whole, again)


def test_a_checkpoint_of_another_fit_is_not_used(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    loaded = from_parts(tiny_llama)
    fit(loaded, make_examples(6), checkpoint=tmp_path)
    others = make_examples(6, seed=1)
    assert_identical(fit(loaded, others), fit(loaded, others, checkpoint=tmp_path))


def test_damping_alone_reuses_a_checkpoint(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    loaded, examples = from_parts(tiny_llama), make_examples(4)
    a = fit(loaded, examples, checkpoint=tmp_path)
    settings = FitSettings(batch_tokens=48, damping=0.01)
    b = fit_curvature(loaded, track(loaded).tracked, examples, range(4), settings, checkpoint=tmp_path, progress=lambda *_: pytest.fail("fitted again"))
    for name in a.modules:
        assert b.modules[name].damping == pytest.approx(0.1 * a.modules[name].damping)


def test_candidates_equal_the_whole_grid_there_and_damping_stays_exact(tiny_llama: LlamaForCausalLM) -> None:
    loaded, examples = from_parts(tiny_llama), make_examples(12)
    whole = fit(loaded, examples)
    some = fit_on_candidates(loaded, examples, 50)
    for name, m in some.modules.items():
        full = whole.modules[name]
        positions = m.positions
        assert positions is not None and positions.numel() == 50
        product = torch.outer(full.lambda_s, full.lambda_a).reshape(-1)
        assert float(product[positions].min()) >= float(product.sort(descending=True).values[50])
        torch.testing.assert_close(m.lam, full.lam.reshape(-1)[positions], rtol=1e-4, atol=1e-6 * float(full.lam.max()))
        assert m.mean_lambda == pytest.approx(full.mean_lambda, rel=1e-4)
        assert m.damping == pytest.approx(full.damping, rel=1e-4)
        dense = m.dense_lambda()
        assert float(dense.mean(dtype=torch.float64)) == pytest.approx(m.mean_lambda, rel=1e-5)
        torch.testing.assert_close(dense.reshape(-1)[positions], m.lam)
        assert torch.equal(m.lam_at(positions[::2].numpy()), m.lam[::2])
        outside = np.setdiff1d(np.arange(m.d_out * m.d_in), positions.numpy())[:1]
        with pytest.raises(ValueError, match="not among the 50 candidates"):
            m.lam_at(outside)
    scores = UncompressedInfluence(loaded, some).scores(examples[:2], examples)
    assert np.isfinite(scores).all()


def test_candidates_survive_the_disk(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    loaded = from_parts(tiny_llama)
    some = fit_on_candidates(loaded, make_examples(4), 30)
    some.save(tmp_path)
    for name, m in Curvature.load(tmp_path).modules.items():
        assert torch.equal(m.positions, some.modules[name].positions)  # type: ignore[arg-type]  # both fits are on a candidate set
        assert torch.equal(m.lam, some.modules[name].lam)


def fit_on_candidates(loaded: LoadedModel, examples: list[Example], count: int) -> Curvature:
    """A fit whose plan puts every module on a candidate set, whatever the memory."""

    def plan(modules: Any, budget: int, **options: Any) -> list[Group]:
        return [replace(g, on_candidates=frozenset(m.name for m in g.modules)) for g in plan_groups(modules, budget, **options)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "plan_groups", plan)
        return fit(loaded, examples, candidates=count)


def test_a_lambda_too_large_for_the_budget_goes_on_candidates() -> None:
    def shaped(name: str, d_out: int, d_in: int) -> TrackedModule:
        return TrackedModule(name, torch.nn.Identity(), d_out, d_in, False, 0, name)

    square, small = shaped("square", 4000, 4000), shaped("small", 100, 100)  # square: factors 128 MB, Lambda 64 MB
    assert group_bytes([square]) == 192 * 10**6
    assert [g.on_candidates for g in plan_groups([square, small], 193 * 10**6)] == [frozenset()]
    assert [g.on_candidates for g in plan_groups([square, small], 191 * 10**6)] == [frozenset({"square"})]
    with pytest.raises(LimitError, match=r"square \(4000 x 4000\) needs 129\.6 MB .* 128\.0 MB may be used"):
        plan_groups([square, small], 128 * 10**6)


@pytest.mark.parametrize("family", ["experts", "classifier"])
def test_modules_that_see_other_shapes(family: str) -> None:
    """Experts see only the tokens routed to them, a pooler one vector per example: the mean of Lambda is E||G||_F^2 all the same, in any basis."""
    torch.manual_seed(0)
    shape = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "experts":
        model = AutoModelForCausalLM.from_config(MixtralConfig(**shape, num_key_value_heads=1, num_local_experts=3))
        examples = make_examples(6)
    else:
        model = AutoModelForSequenceClassification.from_config(BertConfig(**shape, num_labels=3))
        examples = [replace(e, labels=i % 3, target_mask=np.zeros(len(e), bool)) for i, e in enumerate(make_examples(6))]
    loaded = from_parts(model.double())
    modules = track(loaded).tracked
    assert any("experts" in m.name if family == "experts" else "pooler" in m.name for m in modules)
    curvature = fit(loaded, examples)
    norms = dict.fromkeys((m.name for m in modules), 0.0)

    def add(m: TrackedModule, a: torch.Tensor, delta: torch.Tensor) -> None:
        norms[m.name] += float((delta.transpose(1, 2) @ a).square().sum()) / len(examples)

    for row, example in enumerate(examples):
        Capture(loaded, modules).run(collate([example], [row], loaded.pad_id), add, labels="sampled")
    assert set(curvature.modules) | set(curvature.skipped) == set(norms)
    for name, m in curvature.modules.items():
        assert m.mean_lambda * m.d_out * m.d_in == pytest.approx(norms[name], rel=1e-10)
    influence = UncompressedInfluence(loaded, curvature)
    scores = influence.scores(examples[:2], examples)
    np.testing.assert_allclose(influence.token_scores(examples[:2], examples[3]).sum(1), scores[:, 3], rtol=1e-4, atol=1e-6 * np.abs(scores).max())


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np, torch
from transformers import GPT2Config, GPT2LMHeadModel
from engine.example import Example
from engine.fit_curvature import fit_curvature
from engine.model import from_parts
from engine.modules import track
from engine.settings import FitSettings

torch.set_num_threads(1)
torch.manual_seed(0)
loaded = from_parts(GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=64, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)))
rng = np.random.default_rng(0)
drawn = [rng.integers(1, 320, 10) for _ in range(8)]
examples = [Example(str(i), ids, ids, np.arange(10) > 0, "") for i, ids in enumerate(drawn)]
last, steps = int(sys.argv[2]), 0

def progress(*_):
    global steps
    steps += 1
    if steps == last:
        os.kill(os.getpid(), signal.SIGKILL)

fit_curvature(loaded, track(loaded).tracked, examples, range(8), FitSettings(batch_tokens=40, fit_memory=80_000), checkpoint=Path(sys.argv[1]), progress=progress)
print(steps)
"""


@pytest.mark.slow
def test_a_process_killed_anywhere_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, last: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", KILLED, str(folder), str(last)], capture_output=True, text=True, check=False, timeout=120)

    steps = int(run(tmp_path / "whole", 0).stdout)
    whole = Curvature.load(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("group-*.safetensors"))) > 2
    folder = tmp_path / "killed"
    for last in (3, steps // 3, 5):  # in the first group, some groups on, soon after resuming
        assert run(folder, last).returncode == -signal.SIGKILL
        (folder / "group-99999.safetensors.partial").write_bytes(b"half a file")
    finished = run(folder, 0)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) < steps  # not from the start
    assert_identical(whole, Curvature.load(folder))
