"""Stage 2 against a naive float64 SVD, and what it must conserve."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # torch's stubs leave it out

from engine.errors import NumericalError, SettingError, StoreError
from engine.fit_projection import fit_projection, project_rows
from engine.pca import gram, random_rotation, spectrum
from engine.projection import HEADER, MATRIX, Projection
from engine.signs import block_scales, decode, encode

WIDTHS = {"a": 30, "b": 7, "c": 45}
BLOCKS = {"module": {"a": ["a"], "b": ["b"], "c": ["c"]}, "layer": {"layer.0": ["a", "b"], "layer.1": ["c"]}, "model": {"model": ["a", "b", "c"]}}
Z = dict[str, NDArray[np.float32]]


def coordinates(n: int, seed: int = 0, decay: float = 0.7) -> Z:
    """Coordinates with a falling spectrum and uneven norms, as gradients have."""
    rng = np.random.default_rng(seed)
    norms = rng.lognormal(0, 1, (n, 1))
    return {name: (norms * rng.standard_normal((n, w)) * np.arange(1, w + 1) ** -decay).astype(np.float32) for name, w in WIDTHS.items()}


def tensors(z: Z) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in z.items()}


def flat(z: Z, names: list[str]) -> NDArray[np.float64]:
    return np.concatenate([z[name] for name in names], axis=1).astype(np.float64)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_pca_spans_what_a_float64_svd_spans(kind: str, rotate: bool, normalise: bool) -> None:
    z, blocks = coordinates(40), BLOCKS[kind]
    k = {block: 3 + b for b, block in enumerate(blocks)}
    projection = fit_projection(z, blocks, k, rotate=rotate, normalise=normalise, dtype=torch.float32)
    norms = np.linalg.norm(flat(z, list(WIDTHS)), axis=1, keepdims=True)
    for b, (block, names) in enumerate(blocks.items()):
        data = flat(z, names) / (norms if normalise else 1)
        right = np.linalg.svd(data, full_matrices=False)[2][: k[block]].T
        p = np.concatenate([projection.matrices[name].entries.numpy().astype(np.float64) for name in names]) * projection.gain[b]
        np.testing.assert_allclose(p.T @ p, np.eye(k[block]), atol=2e-6)
        np.testing.assert_allclose(p @ p.T, right @ right.T, atol=5e-6)
        if not rotate:
            np.testing.assert_allclose(np.abs(np.sum(p * right, axis=0)), 1, atol=5e-6)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("rotate", [False, True])
def test_full_rank_keeps_dot_products_of_fitting_examples(kind: str, rotate: bool) -> None:
    z, blocks = coordinates(25), BLOCKS[kind]
    projection = fit_projection(z, blocks, 25, rotate=rotate, dtype=torch.float32)
    x = projection.project(tensors(z)).numpy().astype(np.float64)
    whole = flat(z, list(WIDTHS))
    norms = np.linalg.norm(whole, axis=1)
    error = np.abs(x @ x.T - whole @ whole.T) / np.outer(norms, norms)
    assert error.max() <= 1e-4
    assert projection.layout.k == tuple(min(25, sum(WIDTHS[name] for name in names)) for names in blocks.values())


def test_a_blocks_gram_is_the_sum_of_its_modules() -> None:
    z = coordinates(20)
    whole = flat(z, list(WIDTHS))
    parts = sum(gram(z, [name]) for name in WIDTHS)
    np.testing.assert_allclose(parts, whole @ whole.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gram(z, list(WIDTHS)), parts, rtol=1e-12, atol=1e-12)


def test_column_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    z = coordinates(20)
    before, projected = gram(z, list(WIDTHS)), fit_projection(z, BLOCKS["model"], 8)
    monkeypatch.setattr("engine.pca._CHUNK_BYTES", 8 * 20 * 3)
    monkeypatch.setattr("engine.quantised._CONVERT", 16)
    np.testing.assert_allclose(gram(z, list(WIDTHS)), before, rtol=1e-13, atol=1e-13)
    again = fit_projection(z, BLOCKS["model"], 8)
    np.testing.assert_allclose(again.project(tensors(z)), projected.project(tensors(z)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 7, 512])
def test_gram_by_tiles_and_in_float32_products(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z = coordinates(20)
    whole = flat(z, list(WIDTHS))
    monkeypatch.setattr("engine.pca._ROWS", rows)
    np.testing.assert_allclose(gram(z, list(WIDTHS)), whole @ whole.T, rtol=1e-12, atol=1e-12)
    size = np.linalg.norm(whole, axis=1)
    error = gram(z, list(WIDTHS), product=torch.float32).numpy() - whole @ whole.T
    assert (np.abs(error) / np.outer(size, size)).max() < 1e-6


@pytest.mark.parametrize("kind", BLOCKS)
def test_flattened_directions_are_weighted_on_both_sides_and_keep_the_energy(kind: str, tmp_path: Path) -> None:
    z, blocks = coordinates(25), BLOCKS[kind]
    plain, flat_ = (fit_projection(z, blocks, 10, directions=0.5, flatten=power, dtype=torch.float32) for power in (0.0, 0.5))
    x, y = plain.project(tensors(z)).numpy(), flat_.project(tensors(z)).numpy()
    products = np.zeros((25, 25))
    for names in blocks.values():
        left, sigma, _ = np.linalg.svd(flat(z, names), full_matrices=False)
        d = plain.directions[list(blocks.values()).index(names)]
        v = left[:, :d] * sigma[:d]
        w = sigma[:d] ** -0.5
        w *= np.sqrt((sigma[:d] ** 2).sum() / ((sigma[:d] * w) ** 2).sum())
        products += (v * w**2) @ v.T
    np.testing.assert_allclose(y.astype(np.float64) @ y.T, products, atol=2e-3 * np.abs(products).max())
    assert np.square(y).sum() == pytest.approx(np.square(x).sum(), rel=2e-3)
    np.testing.assert_allclose(flat_.captured(y), plain.captured(x), rtol=5e-3)
    flat_.save(tmp_path)
    np.testing.assert_array_equal(Projection.load(tmp_path).captured(y), flat_.captured(y))
    with pytest.raises(ValueError, match="flatten needs directions"):
        fit_projection(z, blocks, 10, flatten=0.5)


def test_small_singular_values_are_dropped() -> None:
    rng = np.random.default_rng(0)
    left, right = np.linalg.qr(rng.standard_normal((9, 4)))[0], np.linalg.qr(rng.standard_normal((30, 4)))[0]
    matrix = left * np.array([1.0, 1e-2, 2e-4, 0.5e-4]) @ right.T
    found = spectrum(torch.from_numpy(matrix @ matrix.T))
    assert found.rank == 3
    np.testing.assert_allclose(found.singular, [1.0, 1e-2, 2e-4], rtol=1e-6)
    assert found.energy == pytest.approx(np.square(matrix).sum())


def test_rotation_is_orthogonal_and_seeded() -> None:
    r = random_rotation(33, np.random.default_rng(5))
    np.testing.assert_allclose(r.T @ r, np.eye(33), atol=1e-12)
    assert torch.equal(r, random_rotation(33, np.random.default_rng(5)))
    z = coordinates(30)
    first, second = (fit_projection(z, BLOCKS["model"], 16, seed=s).project(tensors(z)) for s in (0, 1))
    assert not torch.allclose(first, second)
    np.testing.assert_allclose(first @ first.T, second @ second.T, rtol=5e-2, atol=5e-2)


def test_rotation_evens_out_the_energy_of_the_bits() -> None:
    z = coordinates(60, decay=1.5)
    plain, turned = (fit_projection(z, BLOCKS["model"], 24, rotate=r).project(tensors(z)).square().mean(0) for r in (False, True))
    assert turned.max() / turned.mean() < plain.max() / plain.mean() / 3


def test_k_above_the_rank_is_reduced_with_a_notice_or_refused_with_the_number() -> None:
    z = coordinates(12)
    projection = fit_projection(z, BLOCKS["module"], 10)
    assert projection.layout.k == (10, 7, 10)
    assert projection.info["rank"]["b"] == 7
    assert projection.info["notices"] == ["block b: k reduced from 10 to 7, as it has 7 independent gradients among its 12 fitting examples"]
    with pytest.raises(SettingError, match=r"block b has only 7 .* k = 10 is too large") as caught:
        fit_projection(z, BLOCKS["module"], 10, explicit_k=True)
    assert caught.value.field == "k"


def test_repeated_examples_do_not_raise_the_rank() -> None:
    z = {name: np.repeat(value, 3, axis=0) for name, value in coordinates(5).items()}
    assert fit_projection(z, BLOCKS["model"], 9).layout.k == (5,)


def test_a_block_without_energy_gives_zero_scales() -> None:
    z = coordinates(10)
    z["c"][:] = 0
    projection = fit_projection(z, BLOCKS["layer"], 6)
    assert projection.layout.k == (6, 1)
    assert projection.c[1] == 1
    x = projection.project(tensors(z)).numpy()
    _, scales = encode(x, projection.layout, projection.c, projection.scale)
    assert (scales[:, 1] == 0).all()
    assert (scales[:, 0] > 0).all()


def test_non_finite_coordinates_are_named() -> None:
    z = coordinates(6)
    z["b"][4, 2] = np.inf
    with pytest.raises(NumericalError, match=r"module b: .* fitting example 4"):
        fit_projection(z, BLOCKS["model"], 3)


@pytest.mark.parametrize("method", ["pca", "srht"])
@pytest.mark.parametrize("scale", ["l1", "unbiased"])
def test_c_is_the_geometric_mean_of_the_fitting_scales(method: str, scale: str) -> None:
    z = coordinates(30)
    projection = fit_projection(z, BLOCKS["layer"], 12, method=method, scale=scale)
    s = block_scales(projection.project(tensors(z)).numpy(), projection.layout, scale)
    np.testing.assert_allclose(projection.c, np.exp(np.log(s).mean(axis=0)), rtol=1e-4)
    stored = encode(projection.project(tensors(z)).numpy(), projection.layout, projection.c, projection.scale)[1].astype(np.float64)
    np.testing.assert_allclose(np.log(stored).mean(axis=0), 0, atol=1e-3)


@pytest.mark.parametrize("method", ["pca", "srht"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_save_and_load_are_inverse(tmp_path: Path, method: str, kind: str) -> None:
    z = coordinates(30)
    projection = fit_projection(z, BLOCKS[kind], 7, method=method)
    projection.save(tmp_path)
    again = Projection.load(tmp_path)
    assert (again.layout, again.block_modules, again.widths, again.scale, again.method, again.info) == (
        projection.layout,
        projection.block_modules,
        projection.widths,
        projection.scale,
        projection.method,
        projection.info,
    )
    np.testing.assert_array_equal(again.c, projection.c)
    assert torch.equal(again.project(tensors(z)), projection.project(tensors(z)))
    assert again.projection_bytes == projection.projection_bytes == (0 if method == "srht" else 2 * sum(7 * w for w in WIDTHS.values()))


def test_a_damaged_projection_is_refused(tmp_path: Path) -> None:
    fit_projection(coordinates(12), BLOCKS["model"], 5).save(tmp_path)
    np.save(tmp_path / MATRIX, np.load(tmp_path / MATRIX)[:-1])
    with pytest.raises(StoreError, match="409 entries, the layout needs 410"):
        Projection.load(tmp_path)
    (tmp_path / HEADER).write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        Projection.load(tmp_path)
    with pytest.raises(StoreError, match="cannot be read"):
        Projection.load(tmp_path / "missing")


@pytest.mark.parametrize("method", ["pca", "srht"])
def test_positions_add_up_and_back_is_the_transpose(method: str) -> None:
    z = tensors(coordinates(30))
    projection = fit_projection(coordinates(30), BLOCKS["layer"], 6, method=method)
    parts = {name: torch.stack([0.25 * value, 0.75 * value], dim=1) for name, value in z.items()}
    x = projection.project(z)
    positions = projection.start((30, 2))
    for name in reversed(projection.modules):
        assert projection.add(positions, name, parts[name]) is positions
    torch.testing.assert_close(projection.finish(positions).sum(1), x, rtol=1e-4, atol=1e-5)
    w = torch.from_numpy(np.random.default_rng(1).standard_normal((30, projection.layout.total_k)).astype(np.float32))
    through = sum((projection.back(name, w) * z[name]).sum(-1) for name in projection.modules)
    torch.testing.assert_close(through, (x * w).sum(-1), rtol=1e-4, atol=1e-4)


def test_wrong_width_is_refused() -> None:
    projection = fit_projection(coordinates(10), BLOCKS["model"], 4)
    with pytest.raises(ValueError, match="module b has 7 coordinates, got 8"):
        projection.add(projection.start((1,)), "b", torch.zeros(1, 8))


def test_srht_products_are_unbiased() -> None:
    z = coordinates(4)
    whole = flat(z, list(WIDTHS))
    exact, norms = whole @ whole.T, np.linalg.norm(whole, axis=1)
    found = []
    for seed in range(400):
        x = fit_projection(z, BLOCKS["model"], 16, method="srht", seed=seed).project(tensors(z)).numpy().astype(np.float64)
        found.append(x @ x.T / np.outer(norms, norms))
    error = np.mean(found, axis=0) - exact / np.outer(norms, norms)
    assert np.abs(error).max() < 5 * np.std(found, axis=0).max() / np.sqrt(400)


def test_project_rows_equals_project() -> None:
    z = coordinates(23)
    projection = fit_projection(z, BLOCKS["layer"], 9)
    np.testing.assert_allclose(project_rows(projection, z, rows=5), projection.project(tensors(z)), rtol=1e-5, atol=1e-6)


def test_one_bit_scores_of_fitting_examples_track_the_floats() -> None:
    """Rotated bits with the unbiased scale estimate the dot products without bias: the slope of one-bit on float scores is 1."""
    z = coordinates(60, decay=0.3)
    projection = fit_projection(z, BLOCKS["model"], 60)
    x = projection.project(tensors(z)).numpy()
    codes, scales = encode(x, projection.layout, projection.c, projection.scale)
    bits = x.astype(np.float64) @ decode(codes, scales, projection.layout, projection.c).T
    exact = x.astype(np.float64) @ x.T
    assert np.corrcoef(bits.ravel(), exact.ravel())[0, 1] > 0.9
    np.testing.assert_allclose(np.diag(bits), np.diag(exact), rtol=2e-3)


class StopError(Exception):
    pass


@pytest.mark.parametrize("options", [{}, {"directions": 0.5, "refine": 1, "quantise": True, "normalise": True}, {"method": "srht"}])
def test_a_stopped_fit_goes_on_to_the_same_projection(options: dict[str, Any], tmp_path: Path) -> None:
    z, blocks = coordinates(30), BLOCKS["layer"]
    whole, steps = fit_projection(z, blocks, 8, **options), []

    def progress(done: float, total: float) -> None:
        steps.append(done / total)

    def stop(done: float, total: float) -> None:
        if done > 0.6 * total:
            raise StopError

    fit_projection(z, blocks, 8, progress=progress, **options)
    assert steps == sorted(steps) and steps[-1] == pytest.approx(1)
    with pytest.raises(StopError):
        fit_projection(z, blocks, 8, progress=stop, checkpoint=tmp_path, **options)
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == ([] if options.get("method") == "srht" else ["spectrum-0.npz"])
    for name in kept:  # what is kept is used: another spectrum gives another projection
        np.testing.assert_array_less(0, np.load(tmp_path / name)["singular"])
    again = fit_projection(z, blocks, 8, checkpoint=tmp_path, **options)
    assert torch.equal(again.project(tensors(z)), whole.project(tensors(z)))
    np.testing.assert_array_equal(again.c, whole.c)
    assert again.info == whole.info


def test_a_kept_spectrum_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    z = coordinates(30)
    fit_projection(z, BLOCKS["layer"], 8, checkpoint=tmp_path)
    monkeypatch.setattr("engine.fit_projection.gram", lambda *_, **__: pytest.fail("the Gram matrix was computed again"))
    fit_projection(z, BLOCKS["layer"], 8, checkpoint=tmp_path)


def test_a_long_decomposition_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def tell(operations: float) -> None:
        raise StopError

    monkeypatch.setattr("engine.pca._decompose", lambda matrix: release.wait(60))
    started = time.monotonic()
    with pytest.raises(StopError):
        spectrum(torch.eye(3, dtype=torch.float64), tell=tell)
    assert time.monotonic() - started < 5
    release.set()


def test_a_solver_that_gives_up_leaves_the_work_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = gram(coordinates(9), list(WIDTHS))
    expected = spectrum(matrix)
    solve, calls = torch.linalg.eigh, [0]

    def first_fails(given: torch.Tensor) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise LinAlgError("no convergence")
        return solve(given)

    monkeypatch.setattr("torch.linalg.eigh", first_fails)
    np.testing.assert_allclose(spectrum(matrix).singular, expected.singular, rtol=1e-9)


@pytest.mark.parametrize("options", [{"rotate": True}, {"rotate": False}, {"directions": 0.6, "refine": 2, "flatten": 0.3}])
@pytest.mark.parametrize("normalise", [False, True])
def test_c_needs_no_second_look_at_the_coordinates(options: dict[str, Any], normalise: bool) -> None:
    """U Sigma is Z V: c is the mean scale of the projected fitting examples, an example without energy left out."""
    z = coordinates(30)
    for values in z.values():
        values[4] = 0
    projection = fit_projection(z, BLOCKS["layer"], 8, normalise=normalise, dtype=torch.float32, **options)
    s = projection.scales(project_rows(projection, z))
    assert (s[4] == 0).all()
    np.testing.assert_allclose(projection.c, np.exp(np.log(np.delete(s, 4, 0)).mean(axis=0)), rtol=2e-4)


def test_weights_of_directions_cost_a_two_bit_p_nothing() -> None:
    """Coordinates that one example owns, as real ones are: their errors add up, and weights inside P would let the weak directions drown the strong."""
    rng = np.random.default_rng(0)
    z = {"a": (rng.standard_normal((30, 4000)) * rng.lognormal(0, 2, (30, 4000)) * np.exp(-np.arange(30) / 6)[:, None]).astype(np.float32)}
    plain, weighted = (fit_projection(z, {"m": ["a"]}, 60, directions=0.5, refine=2, flatten=power, quantise=True) for power in (0.0, 0.5))
    x, y = (p.project(tensors(z)).numpy() for p in (plain, weighted))
    assert weighted.flattening[0].max() / weighted.flattening[0].min() > 2
    np.testing.assert_allclose(weighted.captured(y), plain.captured(x), rtol=5e-3)
    assert torch.equal(weighted.matrices["a"].codes, plain.matrices["a"].codes)  # type: ignore[union-attr]  # both at two bits
    tight = weighted.frames[0].double().numpy() / weighted.flattening[0][:, None]
    for row, signs in zip(y.astype(np.float64), weighted.signs(y), strict=True):  # refined in the frame without the weights, no worse than plain signs
        target = tight @ row
        chosen, first = (float((tight @ b @ target) ** 2 / np.square(tight @ b).sum()) for b in (signs, np.where(row >= 0, 1.0, -1.0)))
        assert chosen >= first * (1 - 1e-6)
