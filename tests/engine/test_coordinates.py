"""Stage-1 coordinates against the dense formula t = (Q_S^T G Q_A) / sqrt(Lambda + lambda), with G from autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.coordinates import CoordinateMap, Selection
from engine.errors import ModelError, StoreError
from engine.example import Example, collate
from engine.model import LoadedModel, from_parts
from engine.modules import track


def random_curvature(loaded: LoadedModel, seed: int = 0) -> Any:
    """Random orthogonal bases, shared within input groups, and positive eigenvalues of every size."""
    g = torch.Generator().manual_seed(seed)
    bases: dict[str, torch.Tensor] = {}
    modules = {}
    for t in track(loaded).tracked:
        if t.input_group not in bases:
            bases[t.input_group] = torch.linalg.qr(torch.randn(t.d_in, t.d_in, generator=g, dtype=torch.float64))[0]
        q_s = torch.linalg.qr(torch.randn(t.d_out, t.d_out, generator=g, dtype=torch.float64))[0]
        lam = torch.rand(t.d_out, t.d_in, generator=g, dtype=torch.float64) ** 6
        modules[t.name] = SimpleNamespace(name=t.name, d_out=t.d_out, d_in=t.d_in, q_s=q_s, q_a=bases[t.input_group], lam=lam, damping=0.1 * float(lam.mean()))
    return SimpleNamespace(modules=modules)


def top(curvature: Any, m: int) -> Selection:
    return {name: np.sort(c.lam.reshape(-1).argsort(descending=True)[:m].numpy()) for name, c in curvature.modules.items()}


def dense(curvature: Any, gradients: dict[str, torch.Tensor], selection: Selection) -> dict[str, torch.Tensor]:
    found = {}
    for name, positions in selection.items():
        c = curvature.modules[name]
        t = (c.q_s.T @ gradients[name].double() @ c.q_a) / torch.sqrt(c.lam + c.damping)
        found[name] = t.reshape(-1)[torch.from_numpy(positions)]
    return found


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "m"), [(torch.float32, 1e-5, 40), (torch.float32, 1e-5, 10**6)] + [(torch.float64, 1e-10, m) for m in (1, 40, 10**6)]
)
def test_coordinates_equal_the_dense_formula(
    model: Any, m: int, dtype: torch.dtype, tolerance: float, make_examples: Callable[..., list[Example]], autograd_gradients: Any, worst_error: Any
) -> None:
    loaded = from_parts(model.to(dtype))
    curvature = random_curvature(loaded)
    selection = top(curvature, m)
    coordinates = CoordinateMap.from_curvature(loaded, curvature, selection)
    assert coordinates.widths == {name: min(m, c.d_out * c.d_in) for name, c in curvature.modules.items()}
    examples = make_examples(320)
    z = coordinates(collate(examples, range(4), loaded.pad_id))
    assert all(v.dtype == dtype for v in z.values())
    for i, example in enumerate(examples):
        gradients, _ = autograd_gradients(loaded, example, coordinates.modules)
        wanted = dense(curvature, gradients, selection)
        assert worst_error({n: v[i].double() for n, v in z.items()}, wanted) <= tolerance


@pytest.mark.parametrize("m", [40, 10**6])
def test_positions_add_up_exactly(model: Any, m: int, make_examples: Callable[..., list[Example]], worst_error: Any) -> None:
    loaded = from_parts(model.double())
    curvature = random_curvature(loaded)
    coordinates = CoordinateMap.from_curvature(loaded, curvature, top(curvature, m))
    examples = make_examples(320)
    batch = collate(examples, range(4), loaded.pad_id)
    each: dict[str, torch.Tensor] = {}
    stats = coordinates.stream(batch, each.__setitem__, per_position=True)
    whole = coordinates(batch)
    assert all(z.shape == (4, 12, coordinates.widths[n]) for n, z in each.items())
    for i, example in enumerate(examples):
        assert worst_error({n: z[i].sum(0) for n, z in each.items()}, {n: z[i] for n, z in whole.items()}) <= 1e-12
        assert not any(z[i, len(example) :].any() for z in each.values())
    assert stats.n_targets.tolist() == [e.n_targets for e in examples]


def test_positions_of_a_module_called_twice(tiny_llama: Any, make_examples: Callable[..., list[Example]], worst_error: Any) -> None:
    tiny_llama.model.layers[1].mlp = tiny_llama.model.layers[0].mlp
    loaded = from_parts(tiny_llama.double())
    curvature = random_curvature(loaded)
    coordinates = CoordinateMap.from_curvature(loaded, curvature, top(curvature, 50))
    batch = collate(make_examples(320), range(4), loaded.pad_id)
    each: dict[str, torch.Tensor] = {}
    coordinates.stream(batch, each.__setitem__, per_position=True)
    assert worst_error({n: z.sum(1) for n, z in each.items()}, coordinates(batch)) <= 1e-12
    assert all(z.shape[1] == 12 for z in each.values())


def test_batch_padding_and_order_change_nothing(model: Any, make_examples: Callable[..., list[Example]], worst_error: Any) -> None:
    loaded = from_parts(model)
    curvature = random_curvature(loaded)
    coordinates = CoordinateMap.from_curvature(loaded, curvature, top(curvature, 100))
    examples = make_examples(320, (9, 5, 12, 2, 40))
    order = [4, 2, 0, 3, 1]
    z = coordinates(collate([examples[i] for i in order], order, loaded.pad_id))
    for place, i in enumerate(order):
        alone = coordinates(collate([examples[i]], [i], loaded.pad_id))
        assert worst_error({n: v[place] for n, v in z.items()}, {n: v[0] for n, v in alone.items()}) <= 1e-4


def test_only_the_used_part_of_each_basis_is_kept(tiny_llama: Any) -> None:
    loaded = from_parts(tiny_llama)
    curvature = random_curvature(loaded)
    selection = {"model.layers.0.self_attn.q_proj": np.array([0, 5, 24 * 3 + 7]), "model.layers.0.self_attn.v_proj": np.array([2])}
    coordinates = CoordinateMap.from_curvature(loaded, curvature, selection)
    assert [t.name for t in coordinates.modules] == list(selection)
    q, v = coordinates.maps.values()
    assert q.q_s.shape == (24, 2) and v.q_s.shape == (12, 1)
    assert q.q_a is v.q_a and q.q_a.shape == (24, 4)  # columns 0, 2, 5, 7 of the shared basis


@pytest.mark.parametrize("m", [3, 40, 10**6])
def test_saved_and_loaded_again(model: Any, m: int, tmp_path: Path, make_examples: Callable[..., list[Example]]) -> None:
    loaded = from_parts(model)
    curvature = random_curvature(loaded)
    coordinates = CoordinateMap.from_curvature(loaded, curvature, top(curvature, m))
    coordinates.save(tmp_path)
    again = CoordinateMap.load(tmp_path, loaded)
    assert again.widths == coordinates.widths
    batch = collate(make_examples(320), range(4), loaded.pad_id)
    first, second = coordinates(batch), again(batch)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_loading_refuses_another_model_and_a_missing_file(tiny_gpt2: Any, tiny_llama: Any, tmp_path: Path) -> None:
    loaded = from_parts(tiny_gpt2)
    curvature = random_curvature(loaded)
    CoordinateMap.from_curvature(loaded, curvature, top(curvature, 3)).save(tmp_path)
    with pytest.raises(ModelError, match=r"module transformer\.h\.0\.attn\.c_attn of 72 x 25, which the loaded model does not have"):
        CoordinateMap.load(tmp_path, from_parts(tiny_llama))
    with pytest.raises(StoreError, match="cannot read the stage-1 coordinates"):
        CoordinateMap.load(tmp_path / "nowhere", loaded)
    with pytest.raises(ModelError, match="was selected, and the loaded model does not track it"):
        CoordinateMap.from_curvature(from_parts(tiny_llama), curvature, top(curvature, 3))


def test_a_non_finite_example_spoils_nobody(model: Any, make_examples: Callable[..., list[Example]], worst_error: Any) -> None:
    loaded = from_parts(model)
    curvature = random_curvature(loaded)
    coordinates = CoordinateMap.from_curvature(loaded, curvature, top(curvature, 50))
    good, bad, other = make_examples(320, (6, 9, 12))
    for e in (good, other):
        e.input_ids[e.input_ids == 300] = 1
    bad.input_ids[4] = 300
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[300] = float("nan")
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:  # tied: the logits of the token would spoil everybody, rightly
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num(), requires_grad=False)
    found: dict[str, torch.Tensor] = {}
    stats = coordinates.stream(collate([good, bad, other], range(3), loaded.pad_id), found.__setitem__)
    assert torch.isfinite(stats.loss).tolist() == [True, False, True]
    for place, example in ((0, good), (2, other)):
        alone = coordinates(collate([example], [0], loaded.pad_id))
        assert worst_error({n: z[place] for n, z in found.items()}, {n: z[0] for n, z in alone.items()}) <= 1e-4
