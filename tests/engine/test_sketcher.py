"""Examples to sketches and queries to coordinates, against gradients by autograd and equation (14) by loops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.blocks import blocks_of
from engine.coordinates import CoordinateMap
from engine.example import Example
from engine.fit_projection import fit_projection
from engine.model import LoadedModel, from_parts
from engine.modules import track
from engine.projection import Projection
from engine.selection import select_coordinates
from engine.signs import FLAG_NO_TARGET, FLAG_NONFINITE, FLAG_OK, decode
from engine.sketcher import Sketcher, spill_coordinates

KINDS = ("module", "layer", "model")


def example(i: int, length: int, targets: bool = True) -> Example:
    ids = np.random.default_rng(i).integers(1, 320, length)
    mask = np.zeros(length, np.bool_)
    mask[1 + i % 3 :] = targets
    return Example(f"e{i}", ids, ids, mask, "")


EXAMPLES = [example(i, 5 + i % 7) for i in range(24)]
ROWS = list(range(24))


def curvature(loaded: LoadedModel) -> Any:
    """Random orthogonal bases and eigenvalues; Q_A shared inside an input group, as in a fit."""
    rng, shared, modules = np.random.default_rng(0), {}, {}
    for t in track(loaded).tracked:
        q = {d: torch.from_numpy(np.linalg.qr(rng.standard_normal((d, d)))[0].astype(np.float32)) for d in (t.d_out, t.d_in)}
        q_a = shared.setdefault(t.input_group, q[t.d_in])
        lam = torch.from_numpy(rng.lognormal(-4, 2, (t.d_out, t.d_in)).astype(np.float32))
        mean = float(lam.mean())
        modules[t.name] = SimpleNamespace(name=t.name, d_out=t.d_out, d_in=t.d_in, q_s=q[t.d_out], q_a=q_a, lam=lam, mean_lambda=mean, damping=0.1 * mean)
    return SimpleNamespace(modules=modules)


@pytest.fixture
def loaded(tiny_llama: Any) -> LoadedModel:
    return from_parts(tiny_llama, None)


def build(loaded: LoadedModel, folder: Path, kind: str, m: int = 10**6, k: int = 8, **options: Any) -> Sketcher:
    fitted = curvature(loaded)
    blocks = blocks_of([(t.name, t.layer) for t in track(loaded).tracked], kind)
    selected = select_coordinates(fitted, blocks, dict.fromkeys(fitted.modules, m))
    coordinates = CoordinateMap.from_curvature(loaded, fitted, selected.positions)
    z = spill_coordinates(coordinates, EXAMPLES, ROWS, folder / "spill", 64)
    return Sketcher(loaded, coordinates, fit_projection(z, blocks, k, **options), batch_tokens=64)


def half_whitened(loaded: LoadedModel, e: Example) -> NDArray[np.float64]:
    """t of one example over all modules, from autograd's weight gradients."""
    fitted, tracked = curvature(loaded), track(loaded).tracked
    weights = [t.module.weight for t in tracked]
    for w in weights:
        w.requires_grad_(True)
    logits = loaded.model(torch.from_numpy(e.input_ids)[None]).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(e.input_ids)[1:], reduction="none")
    grads = torch.autograd.grad(losses[torch.from_numpy(e.target_mask[1:])].sum(), weights)
    parts = []
    for t, g in zip(tracked, grads, strict=True):
        c = fitted.modules[t.name]
        parts.append(((c.q_s.T @ g @ c.q_a) / (c.lam + c.damping).sqrt()).double().reshape(-1))
    return torch.cat(parts).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_full_rank_float_scores_equal_influence_on_fitting_examples(loaded: LoadedModel, tmp_path: Path, kind: str) -> None:
    sketcher = build(loaded, tmp_path, kind, k=24, dtype=torch.float32)
    y = sketcher.query(EXAMPLES).y.astype(np.float64)
    t = np.stack([half_whitened(loaded, e) for e in EXAMPLES])
    norms = np.linalg.norm(t, axis=1)
    assert (np.abs(y @ y.T - t @ t.T) / np.outer(norms, norms)).max() <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["pca", "srht"])
@pytest.mark.parametrize("scale", ["l1", "unbiased"])
def test_sketch_is_the_signs_and_scales_of_query(loaded: LoadedModel, tmp_path: Path, kind: str, method: str, scale: str) -> None:
    sketcher = build(loaded, tmp_path, kind, m=60, method=method, scale=scale)
    found, query, layout = sketcher.sketch(EXAMPLES, ROWS), sketcher.query(EXAMPLES), sketcher.projection.layout
    assert found.codes.shape == (24, layout.code_bytes)
    assert found.scales.shape == (24, layout.n_blocks)
    np.testing.assert_allclose(found.norm_sq, query.z_norm_sq, rtol=1e-4)
    scores = query.y.astype(np.float64) @ decode(found.codes, found.scales, layout, sketcher.projection.c).astype(np.float64).T
    for q, i in ((0, 0), (1, 5), (7, 23)):
        expected, size = 0.0, 0.0
        for b in range(layout.n_blocks):
            x, own = query.y[i, layout.slice(b)].astype(np.float64), query.y[q, layout.slice(b)].astype(np.float64)
            stored = float(sketcher.projection.c[b]) * float(found.scales[i, b])
            assert stored == pytest.approx(np.abs(x).sum() / x.size if scale == "l1" else np.square(x).sum() / np.abs(x).sum(), rel=1e-3)
            expected += stored * sum(float(v) if u >= 0 else -float(v) for u, v in zip(x, own, strict=True))
            size += stored * float(np.abs(own).sum())
        assert scores[q, i] == pytest.approx(expected, abs=1e-5 * size)
    assert (query.coverage is None) == (method == "srht")


def test_coordinates_do_not_depend_on_batch_mates_or_order(loaded: LoadedModel, tmp_path: Path) -> None:
    sketcher = build(loaded, tmp_path, "layer")
    together = sketcher.query(EXAMPLES)
    alone = np.concatenate([sketcher.query([e]).y for e in EXAMPLES])
    backwards = sketcher.query(EXAMPLES[::-1]).y[::-1]
    size = np.abs(together.y).max(axis=1, keepdims=True)
    assert (np.abs(together.y - alone) / size).max() < 1e-4
    assert (np.abs(together.y - backwards) / size).max() < 1e-4


def test_positions_sum_to_the_query(loaded: LoadedModel, tmp_path: Path) -> None:
    for method in ("pca", "srht"):
        sketcher = build(loaded, tmp_path, "model", method=method)
        tokens = sketcher.token_coordinates(EXAMPLES[3])
        assert tokens.shape == (len(EXAMPLES[3]), 8)
        y = sketcher.query([EXAMPLES[3]]).y[0]
        np.testing.assert_allclose(tokens.sum(0), y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_coverage_is_one_inside_the_span_and_less_outside(loaded: LoadedModel, tmp_path: Path) -> None:
    coverage = build(loaded, tmp_path, "model", k=24).query([*EXAMPLES, example(99, 9)]).coverage
    assert coverage is not None
    np.testing.assert_allclose(coverage[:-1], 1, atol=2e-3)
    assert coverage[-1] < 0.9


def test_examples_without_targets_are_flagged_and_alter_nobody(loaded: LoadedModel, tmp_path: Path) -> None:
    sketcher = build(loaded, tmp_path, "layer")
    mixed = [EXAMPLES[0], example(50, 6, targets=False), EXAMPLES[1]]
    found = sketcher.sketch(mixed, [0, 50, 1])
    assert found.flags.tolist() == [FLAG_OK, FLAG_NO_TARGET, FLAG_OK]
    assert not found.codes[1].any()
    assert not found.scales[1].any()
    assert found.n_tokens[1] == 0
    clean = sketcher.sketch([EXAMPLES[0], EXAMPLES[1]], [0, 1])
    np.testing.assert_allclose(found.scales[[0, 2]].astype(float), clean.scales.astype(float), rtol=2e-3)
    only = sketcher.query([mixed[1]])
    assert only.flags.tolist() == [FLAG_NO_TARGET]
    assert not only.y.any()


def test_a_non_finite_gradient_is_flagged_for_that_example_alone(loaded: LoadedModel, tmp_path: Path) -> None:
    sketcher = build(loaded, tmp_path, "model")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[int(EXAMPLES[2].input_ids[0])] = torch.inf
    poisoned = {i for i, e in enumerate(EXAMPLES) if EXAMPLES[2].input_ids[0] in e.input_ids}
    found = sketcher.sketch(EXAMPLES[:6], ROWS[:6])
    assert [f != FLAG_OK for f in found.flags] == [i in poisoned for i in range(6)]
    assert found.flags[2] == FLAG_NONFINITE
    assert not found.codes[2].any()
    assert np.isfinite(found.norm_sq).all()


def test_save_and_load_give_the_same_sketches(loaded: LoadedModel, tmp_path: Path) -> None:
    sketcher = build(loaded, tmp_path, "layer", m=40)
    sketcher.save(tmp_path / "sketch")
    again = Sketcher.load(tmp_path / "sketch", loaded, batch_tokens=64)
    first, second = sketcher.sketch(EXAMPLES, ROWS), again.sketch(EXAMPLES, ROWS)
    np.testing.assert_array_equal(first.codes, second.codes)
    np.testing.assert_array_equal(first.scales, second.scales)


def test_projection_and_coordinates_of_different_modules_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    sketcher = build(loaded, tmp_path, "module", m=20)
    p = sketcher.projection
    name = p.modules[0]
    other = Projection(p.layout, {**p.block_modules, name: ["elsewhere"]}, p.widths, p.scale, p.c, p.method, p.gain, p.directions, p.matrices)
    with pytest.raises(ValueError, match="disagree on module elsewhere"):
        Sketcher(loaded, sketcher.coordinates, other)


def test_spilled_rows_keep_their_order(loaded: LoadedModel, tmp_path: Path) -> None:
    sketcher = build(loaded, tmp_path, "model", m=15)
    z = spill_coordinates(sketcher.coordinates, EXAMPLES, ROWS, tmp_path / "again", 30)
    assert {name: value.shape for name, value in z.items()} == dict.fromkeys(sketcher.coordinates.widths, (24, 15))
    norms = sum(np.square(value, dtype=np.float64).sum(1) for value in z.values())
    np.testing.assert_allclose(norms, sketcher.query(EXAMPLES).z_norm_sq, rtol=1e-4)
