"""The frontier's shortcuts against the engine and against naive loops."""

from __future__ import annotations

from pathlib import Path

import frontier
import frontier_baselines as baselines
import numpy as np
import outcomes
import pytest
import torch
from frontier_kernels import Kernels
from frontier_sketches import Lab, Plan, spread_bits

from engine.blocks import blocks_of
from engine.fit_projection import fit_projection, project_rows
from engine.signs import decode

MODULES = [("h.0.a", 0), ("h.0.b", 0), ("h.1.a", 1)]
SIZES = {"train": 30, "disjoint": 24, "query": 5}


@pytest.fixture
def z() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: (rng.standard_normal((59, 40)) * np.geomspace(3, 0.1, 40)).astype(np.float32) for name, _ in MODULES}


@pytest.fixture
def lab(z: dict[str, np.ndarray], tmp_path: Path) -> Lab:
    (tmp_path / "40").mkdir()
    for name, values in z.items():
        np.save(tmp_path / "40" / f"{name}.npy", values.astype(np.float64) @ values.T.astype(np.float64))
    return Lab(Kernels(tmp_path, SIZES, {40: {name: [name] for name in z}}), MODULES, dict.fromkeys(z, 40))


@pytest.mark.parametrize("fit", ["train", "disjoint"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan("module", 8, 40),
        Plan("layer", 12, 40, rotate=True, scale="unbiased"),
        Plan("model", 16, 40, rotate=True, scale="unbiased"),
        Plan("model", 16, 40, normalise=True),
        Plan("model", 24, 40, directions=0.5, refine=2, scale="unbiased"),
        Plan("model", 24, 40, directions=0.5, refine=2, scale="unbiased", normalise=True, flatten=0.5),
    ],
    ids=lambda p: p.label if isinstance(p, Plan) else p,
)
def test_kernels_give_the_engines_sketch(z: dict[str, np.ndarray], lab: Lab, plan: Plan, fit: str) -> None:
    rows = lab.kernels.rows(fit)
    fitting = {name: values[rows] for name, values in z.items()}
    blocks = blocks_of(MODULES, plan.kind)
    projection = fit_projection(
        fitting,
        blocks,
        plan.k,
        rotate=plan.rotate,
        scale=plan.scale,
        normalise=plan.normalise,
        directions=plan.directions,
        refine=plan.refine,
        flatten=plan.flatten,
        dtype=torch.float32,
    )
    x = project_rows(projection, z)
    stored, asked = x[lab.kernels.rows("train")], x[lab.kernels.rows("query")]
    expected = asked @ decode(*projection.encode(stored), projection.layout, projection.c).T
    found = lab.scores(plan, fit)  # type: ignore[arg-type]  # a Fit, parametrised as str
    assert found.bytes == projection.layout.payload_bytes
    assert found.shared == sum(p.n_bytes for p in projection.matrices.values()) / 2 + sum(2 * f.numel() for f in projection.frames)  # P is float32 here
    assert found.scores is not None
    # a sign of a singular vector is arbitrary and cancels without a rotation; with one it changes the rotated axes, so only quality can be compared
    if plan.rotate or plan.directions:
        truth = sum(values[lab.kernels.rows("query")] @ values[lab.kernels.rows("train")].T for values in z.values())
        quality = [np.mean([np.corrcoef(s[q], truth[q])[0, 1] for q in range(5)]) for s in (found.scores, expected)]
        assert quality[0] == pytest.approx(quality[1], abs=0.15) and min(quality) > 0.5
    else:
        np.testing.assert_allclose(found.scores, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def test_spread_bits_follow_the_spectrum() -> None:
    k = spread_bits([np.geomspace(100, 1, 64), np.geomspace(1, 0.01, 64)], 64)
    assert k[0] > 5 * k[1] and k[1] >= 8 and all(bits % 8 == 0 for bits in k)


def test_half_whitening_makes_the_score_an_inverse_fisher() -> None:
    rng = np.random.default_rng(1)
    train, query = rng.standard_normal((50, 6)).astype(np.float32), rng.standard_normal((4, 6)).astype(np.float32)
    stored, asked = baselines.half_whiten(train, query, 0.1)
    fisher = train.T.astype(np.float64) @ train / 50
    expected = query @ np.linalg.inv(fisher + 0.1 * np.trace(fisher) / 6 * np.eye(6)) @ train.T
    np.testing.assert_allclose(asked @ stored.T, expected, rtol=1e-4, atol=1e-4)


def test_one_bit_twin_of_a_row() -> None:
    rows = baselines.Rows()
    stored = np.array([[1.0, -3.0, 0.5], [0.25, 2.0, -1.0]], np.float32)
    asked = np.array([[2.0, 1.0, -1.0]], np.float32)
    rows.pair("x", "k=3", stored, asked)
    bit = rows.rows["x, k=3, 1 bit"]
    assert bit.bytes == 3 and rows.rows["x, k=3, fp16"].bytes == 6
    np.testing.assert_allclose(bit.scores, [[1.5 * (2 - 1 - 1), 13 / 12 * (2 + 1 + 1)]], rtol=1e-3)


def test_subsets_are_halves_and_reproducible() -> None:
    task = outcomes.Task(n_train=21, n_subsets=5)
    masks = outcomes.subset_masks(task)
    assert (masks.sum(1) == 10).all()
    np.testing.assert_array_equal(masks, outcomes.subset_masks(task))


def test_summed_losses_do_not_depend_on_batch_mates() -> None:
    task = outcomes.Task(layers=1, width=16, heads=2, vocab=50)
    model = outcomes.new_model(task, 0).eval()
    rng = np.random.default_rng(2)
    data = [rng.integers(1, 50, n) for n in (5, 9, 3)]
    together = outcomes.losses(model, data).detach().numpy()
    for x, loss in zip(data, together, strict=True):
        logp = torch.log_softmax(model(input_ids=torch.from_numpy(x)[None]).logits[0].detach(), -1)
        assert loss == pytest.approx(-sum(float(logp[t - 1, x[t]]) for t in range(1, len(x))), rel=1e-5)


def test_a_comparison_is_paired_with_the_strongest() -> None:
    rng = np.random.default_rng(3)
    noise = rng.standard_normal(500)

    def row(name: str, value: float) -> dict:
        return {"name": name, "bytes": 1, "lds": [value], "ndcg": [value], "_lds": value + noise, "_ndcg": value + noise}

    found = frontier.compare(row("ours", 0.5), [row("weak", 0.1), row("strong", 0.4)])
    assert found is not None and found["lds"]["against"] == "strong"
    np.testing.assert_allclose(found["lds"]["difference"], [0.1, 0.1, 0.1])
    assert frontier.compare(row("ours", 0.5), []) is None
