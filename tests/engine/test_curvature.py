"""EK-FAC against naive float64 loops over autograd, and the influence that follows from it against a dense solve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from engine.curvature import Curvature
from engine.errors import DataError, NumericalError, StoreError
from engine.example import Example
from engine.fit_curvature import fit_curvature, sample_positions
from engine.loss import uniforms
from engine.model import LoadedModel, from_parts
from engine.modules import TrackedModule, track
from engine.settings import FitSettings
from engine.uncompressed import UncompressedInfluence

SEED = 3


def make_examples(n: int, seed: int = 0, longest: int = 12) -> list[Example]:
    """Random token ids of 4 to `longest` tokens; every other example has a prompt whose labels carry no loss."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        ids = rng.integers(1, 320, rng.integers(4, longest + 1))
        mask = np.arange(len(ids)) >= (1 if i % 2 else 3)
        found.append(Example(f"e{i}", ids, ids, mask, ""))
    return found


def naive(loaded: LoadedModel, modules: list[TrackedModule], examples: list[Example], rows: list[int], seed: int | None) -> list[dict[str, tuple[Any, ...]]]:
    """Per example {module: (a (T, d_in), delta (T, d_out), G (d_out, d_in))}, one example at a time by autograd; seed None: true labels."""
    everything = []
    for example, row in zip(examples, rows, strict=True):
        kept: dict[str, list[torch.Tensor]] = {}

        def hook(module: Any, args: Any, output: torch.Tensor, *, name: str, kept: dict[str, list[torch.Tensor]] = kept) -> torch.Tensor:
            output = output.detach().requires_grad_(True) + 0 if not output.requires_grad else output
            output.retain_grad()
            kept[name] = [args[0].detach(), output]
            return output

        handles = [m.module.register_forward_hook(lambda mod, args, out, name=m.name, hook=hook: hook(mod, args, out, name=name)) for m in modules]
        weights = [m.module.weight.requires_grad_(True) for m in modules]
        logits = loaded.model(input_ids=torch.from_numpy(example.input_ids)[None], use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        logp = torch.log_softmax(logits, -1)
        loss = logp.new_zeros(())
        for t in np.flatnonzero(example.target_mask):
            label = int(example.input_ids[t])
            if seed is not None:
                u = float(uniforms(seed, np.array([row]), np.array([t]))[0])
                label = int((logp[t - 1].exp().cumsum(0) <= u).sum())
            loss = loss - logp[t - 1, label]
        grads = torch.autograd.grad(loss, [*weights, *(kept[m.name][1] for m in modules)])
        for w in weights:
            w.requires_grad_(False)
        found = {}
        for m, g, delta in zip(modules, grads[: len(modules)], grads[len(modules) :], strict=True):
            a = kept[m.name][0][0]
            if m.bias:
                a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            g = g.T if isinstance(m.module, Conv1D) else g
            g = torch.cat([g, delta[0].sum(0)[:, None]], 1) if m.bias else g
            found[m.name] = (a.numpy(), delta[0].numpy(), g.numpy())
        everything.append(found)
    return everything


@pytest.fixture(params=["gpt2", "llama"])
def loaded64(request: pytest.FixtureRequest, tiny_gpt2: GPT2LMHeadModel, tiny_llama: LlamaForCausalLM) -> LoadedModel:
    return from_parts({"gpt2": tiny_gpt2, "llama": tiny_llama}[request.param].double())


def fit(loaded: LoadedModel, examples: list[Example], rows: list[int] | None = None, **options: Any) -> Curvature:
    kept = {k: options.pop(k) for k in ("checkpoint", "candidates", "progress") if k in options}
    settings = FitSettings(seed=SEED, **{"batch_tokens": 48, **options})
    return fit_curvature(loaded, track(loaded).tracked, examples, rows or list(range(len(examples))), settings, **kept)


def test_factors_and_corrected_eigenvalues_equal_naive_float64_loops(loaded64: LoadedModel) -> None:
    examples, rows = make_examples(9), [7, 2, 40, 1, 0, 9, 8, 100, 3]
    curvature = fit(loaded64, examples, rows)
    modules = track(loaded64).tracked
    truth = naive(loaded64, modules, examples, rows, SEED)
    tokens = sum(len(e) for e in examples)
    assert list(curvature.modules) == [m.name for m in modules]
    for m in modules:
        c = curvature.modules[m.name]
        a_cov = sum(np.outer(a, a) for f in truth for a in f[m.name][0]) / tokens
        s_cov = sum(np.outer(d, d) for f in truth for d in f[m.name][1]) / tokens
        q_a, q_s = c.q_a.numpy(), c.q_s.numpy()
        for q, values, factor in ((q_a, c.lambda_a.numpy(), a_cov), (q_s, c.lambda_s.numpy(), s_cov)):
            np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-10)
            np.testing.assert_allclose((q * values) @ q.T, factor, atol=1e-10 * np.abs(factor).max())
        lam = np.zeros((m.d_out, m.d_in))
        for f in truth:
            g = f[m.name][2]
            np.testing.assert_allclose(f[m.name][1].T @ f[m.name][0], g, atol=1e-12 * max(1, np.abs(g).max()))
            lam += (q_s.T @ g @ q_a) ** 2 / len(truth)
        np.testing.assert_allclose(c.lam.numpy(), lam, rtol=1e-8, atol=1e-12 * lam.max())
        assert c.mean_lambda == pytest.approx(lam.mean(), rel=1e-10)
        assert c.damping == pytest.approx(0.1 * lam.mean(), rel=1e-10)
    assert any(m.d_out != m.d_in for m in modules)


def test_modules_with_one_input_share_its_basis(loaded64: LoadedModel) -> None:
    curvature = fit(loaded64, make_examples(6))
    shared: dict[str, list[Any]] = {}
    for m in curvature.modules.values():
        shared.setdefault(m.input_key, []).append(m.q_a)
    assert all(q is members[0] for members in shared.values() for q in members)
    if "Llama" in type(loaded64.model).__name__:
        assert len(shared) < len(curvature.modules)


def test_influence_equals_a_dense_solve(loaded64: LoadedModel) -> None:
    examples, queries = make_examples(8), make_examples(3, seed=5)
    curvature = fit(loaded64, examples)
    modules = track(loaded64).tracked
    train = naive(loaded64, modules, examples, list(range(8)), None)
    asked = naive(loaded64, modules, queries, list(range(3)), None)
    expected, size = np.zeros((3, 8)), np.zeros((3, 8))
    for m in modules:
        c = curvature.modules[m.name]
        basis = np.kron(c.q_s.numpy(), c.q_a.numpy())  # row-major vec(G): G[o, i] at o * d_in + i
        h = basis @ np.diag(c.lam.numpy().reshape(-1) + c.damping) @ basis.T
        g_q = np.stack([f[m.name][2].reshape(-1) for f in asked])
        g_i = np.stack([f[m.name][2].reshape(-1) for f in train])
        solved = np.linalg.solve(h, g_i.T)
        expected += g_q @ solved
        size += np.sqrt(np.outer(np.einsum("qp,qp->q", g_q, np.linalg.solve(h, g_q.T).T), np.einsum("np,np->n", g_i, solved.T)))
    found = UncompressedInfluence(loaded64, curvature, batch_tokens=30).scores(queries, examples)
    assert np.abs(found - expected).max() <= 1e-6 * size.max()
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7 * size.max())


def test_float32_accumulation_agrees_with_float64(tiny_llama: LlamaForCausalLM) -> None:
    examples, queries = make_examples(20), make_examples(4, seed=5)
    single = from_parts(tiny_llama)
    a = UncompressedInfluence(single, fit(single, examples)).scores(queries, examples)
    double = from_parts(tiny_llama.double())
    b = UncompressedInfluence(double, fit(double, examples)).scores(queries, examples)
    assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()


@pytest.mark.parametrize("batch_tokens", [1, 24, 500])
def test_batches_change_nothing(tiny_gpt2: GPT2LMHeadModel, batch_tokens: int) -> None:
    loaded = from_parts(tiny_gpt2)
    examples, queries = make_examples(16), make_examples(3, seed=5)
    reference = UncompressedInfluence(loaded, fit(loaded, examples)).scores(queries, examples)
    found = UncompressedInfluence(loaded, fit(loaded, examples, batch_tokens=batch_tokens), batch_tokens=batch_tokens).scores(queries, examples)
    assert np.abs(found - reference).max() <= 1e-4 * np.abs(reference).max()


def test_order_of_the_fitting_rows_changes_nothing(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    examples = make_examples(10)
    a = fit(loaded, examples)
    b = fit(loaded, examples[::-1], list(range(10))[::-1])
    scores = [UncompressedInfluence(loaded, c).scores(examples[:2], examples) for c in (a, b)]
    assert np.abs(scores[0] - scores[1]).max() <= 1e-4 * np.abs(scores[0]).max()


def test_sampled_labels_depend_on_the_row_number(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    examples = make_examples(6)
    a, b = fit(loaded, examples), fit(loaded, examples, [9, 8, 7, 6, 5, 4])
    name = next(iter(a.modules))
    assert a.modules[name].mean_lambda != b.modules[name].mean_lambda


def test_fit_examples_draws_a_seeded_sample() -> None:
    assert sample_positions(5, 9, 0) == [0, 1, 2, 3, 4]
    drawn = sample_positions(1000, 50, 1)
    assert drawn == sample_positions(1000, 50, 1) == sorted(set(drawn))
    assert len(drawn) == 50 and drawn != sample_positions(1000, 50, 2)


def test_only_the_sample_is_read(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    examples = make_examples(12)
    drawn = sample_positions(12, 5, SEED)
    a = fit(loaded, examples, fit_examples=5)
    b = fit(loaded, [examples[i] for i in drawn], drawn)
    for name in a.modules:
        assert torch.equal(a.modules[name].lam, b.modules[name].lam)


def test_saved_curvature_reads_back(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    loaded = from_parts(tiny_llama)
    curvature = fit(loaded, make_examples(6))
    curvature.save(tmp_path / "full")
    again = Curvature.load(tmp_path / "full")
    assert list(again.modules) == list(curvature.modules) and again.c == curvature.c and again.skipped == curvature.skipped
    for name, m in curvature.modules.items():
        other = again.modules[name]
        assert (m.d_out, m.d_in, m.mean_lambda, m.damping, m.input_key) == (other.d_out, other.d_in, other.mean_lambda, other.damping, other.input_key)
        for part in ("q_s", "q_a", "lam", "lambda_s", "lambda_a"):
            assert torch.equal(getattr(m, part), getattr(other, part))
    again.save(tmp_path / "copy")
    assert torch.equal(Curvature.load(tmp_path / "copy").modules[name].lam, curvature.modules[name].lam)
    assert Curvature.load(tmp_path / "full", c=0.01).modules[name].damping == pytest.approx(0.1 * curvature.modules[name].damping)


def test_a_damaged_file_is_refused_by_name(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    fit(from_parts(tiny_llama), make_examples(3)).save(tmp_path)
    path = sorted(tmp_path.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreError, match=path.name):
        Curvature.load(tmp_path)
    with pytest.raises(StoreError, match="cannot be read"):
        Curvature.load(tmp_path / "nowhere")


def test_a_module_without_gradient_is_skipped_by_name(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    with torch.no_grad():
        tiny_llama.model.layers[1].mlp.up_proj.weight.zero_()
        tiny_llama.model.layers[1].mlp.down_proj.weight.zero_()
    curvature = fit(loaded, make_examples(4))
    assert set(curvature.skipped) == {f"model.layers.1.mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")}
    assert all("zero on all 4" in reason for reason in curvature.skipped.values())
    assert np.isfinite(UncompressedInfluence(loaded, curvature).scores(make_examples(2), make_examples(3))).all()


def test_a_non_finite_weight_names_module_and_example(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    with torch.no_grad():
        tiny_llama.model.embed_tokens.weight[17] = torch.nan
    examples = make_examples(5)
    examples[3].input_ids[2] = 17
    with pytest.raises(NumericalError, match=r"model\.layers\.\d.*'e3'"):
        fit(loaded, examples)


def test_overflowing_squares_are_refused(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    with torch.no_grad():
        tiny_llama.model.layers[0].input_layernorm.weight.fill_(1e20)
    with pytest.raises(NumericalError, match=r"overflow|non-finite"):
        fit(loaded, make_examples(3))


def test_examples_without_targets_are_left_out(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    examples = make_examples(4)
    empty = Example("none", examples[0].input_ids, examples[0].labels, np.zeros(len(examples[0]), bool), "")
    a, b = fit(loaded, [*examples, empty]), fit(loaded, examples)
    name = next(iter(a.modules))
    assert torch.equal(a.modules[name].lam, b.modules[name].lam)
    with pytest.raises(DataError, match="no example has a target"):
        fit(loaded, [empty])


def test_progress_counts_two_passes_and_the_decompositions(tiny_llama: LlamaForCausalLM) -> None:
    seen: list[tuple[str, int, int]] = []
    fit(from_parts(tiny_llama), make_examples(6), progress=lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == list(range(1, seen[-1][2] + 1))
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == ["covariance", "eigenbases", "eigenvalues"]
