"""Plans stay inside both budgets, use them, and refuse with the number that would do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import choose_budget
from engine.errors import SettingError
from engine.settings import SketchSettings


@dataclass(frozen=True)
class Module:
    name: str
    layer: int
    d_out: int
    d_in: int


def model(layers: int, d: int = 16, parts: int = 3) -> list[Module]:
    return [Module(f"{layer}.{part}", layer, d * (part + 1), d) for layer in range(layers) for part in range(parts)]


def settings(**values: Any) -> SketchSettings:
    return SketchSettings(**values)


@given(st.integers(1, 6), st.integers(3, 4000), st.integers(400, 10**6), st.integers(1, 5000), st.sampled_from([None, "module", "layer", "model"]))
def test_plans_stay_inside_both_budgets(layers: int, payload: int, projection: int, n_fit: int, blocks: str | None) -> None:
    modules = model(layers)
    try:
        plan = choose_budget(modules, settings(bytes_per_example=payload, projection_bytes=projection, blocks=blocks), n_fit=n_fit)
    except SettingError as e:
        assert e.field in {"bytes_per_example", "projection_bytes"}
        return
    sizes = {u.name: u.d_out * u.d_in for u in modules}
    assert plan.payload_bytes <= payload
    assert plan.projection_bytes <= projection
    assert all(1 <= plan.m[name] <= size for name, size in sizes.items())
    assert max(plan.k.values()) <= 4 * n_fit
    wider = replace(plan, m={name: min(plan.m[name] + 1, size) for name, size in sizes.items()})
    if wider.m != plan.m:  # what is left of P's budget cannot widen every open module by one
        assert wider.projection_bytes > projection
    assert plan.why


def test_one_block_where_the_fitting_set_spans_the_bits_and_layers_otherwise() -> None:
    plan = choose_budget(model(4), settings(bytes_per_example=256), n_fit=5000)
    assert (plan.kind, plan.k, plan.payload_bytes) == ("model", {"model": 8 * 254}, 256)
    assert (plan.rotate, plan.scale, plan.method) == (True, "unbiased", "pca")
    assert (plan.directions, plan.refine, plan.flatten, plan.quantise, plan.normalise, plan.joint) == (0.65, 2, 0.5, True, True, True)
    plan = choose_budget(model(4), settings(bytes_per_example=256), n_fit=500)
    assert plan.kind == "layer"
    assert set(plan.k.values()) == {8 * 62}
    assert any("500 fitting examples" in sentence for sentence in plan.why)


def test_the_plan_fits_what_it_promises() -> None:
    rng = np.random.default_rng(0)
    for values in ({}, {"method": "eogp"}, {"method": "eogp-r"}, {"method": "paper", "k": 16}, {"rotate": False}):
        plan = choose_budget(model(2), settings(bytes_per_example=10, projection_bytes=20000, **values), n_fit=40)
        z = {name: rng.standard_normal((40, m)).astype(np.float32) for name, m in plan.m.items()}
        steps: list[tuple[float, float]] = []

        def progress(done: float, total: float, steps: list[tuple[float, float]] = steps) -> None:
            steps.append((done, total))

        projection = plan.fit(z, seed=0, progress=progress)
        assert {total for _, total in steps} == {plan.operations} and steps[-1][0] == pytest.approx(plan.operations)
        assert (
            plan.entries
            == sum(m * d for block, d in zip(plan.blocks, projection.directions, strict=True) for m in (plan.m[name] for name in plan.blocks[block]))
            or plan.method == "srht"
        )
        assert projection.layout == plan.layout
        assert projection.projection_bytes == plan.projection_bytes
        assert projection.scale == plan.scale


def test_bytes_left_over_go_to_the_first_blocks() -> None:
    plan = choose_budget(model(3), settings(bytes_per_example=20, blocks="layer"), n_fit=5000)
    assert list(plan.k.values()) == [40, 40, 32]
    assert plan.payload_bytes == 20


def test_method_paper_is_the_papers_configuration() -> None:
    plan = choose_budget(model(2, d=128), settings(method="paper", projection_bytes=1000, bytes_per_example=3), n_fit=5000)
    assert (plan.kind, set(plan.k.values()), plan.rotate, plan.scale, plan.method) == ("module", {2048}, False, "l1", "pca")
    assert set(plan.m.values()) == {8192}
    assert (plan.directions, plan.refine, plan.quantise, plan.normalise) == (None, 0, False, False)
    assert not plan.explicit_k
    assert choose_budget(model(2), settings(method="paper", k=64), n_fit=5000).explicit_k


def test_what_the_user_sets_is_kept() -> None:
    plan = choose_budget(model(2), settings(method="eogp", blocks="layer", k=24, m=50, rotate=False, scale="unbiased"), n_fit=100)
    assert (plan.kind, plan.k, set(plan.m.values())) == ("layer", {"layer.0": 24, "layer.1": 24}, {50})
    assert (plan.rotate, plan.scale, plan.explicit_k) == (False, "unbiased", True)


def test_srht_stores_no_projection() -> None:
    plan = choose_budget(model(2), settings(method="eogp-r", projection_bytes=1), n_fit=10)
    assert (plan.method, plan.projection_bytes, plan.kind, plan.rotate) == ("srht", 0, "model", False)
    assert plan.k == {"model": 2032}


def test_small_modules_leave_their_share_to_large_ones() -> None:
    modules = [Module("small", 0, 2, 5), Module("large", 0, 100, 100)]
    plan = choose_budget(modules, settings(method="eogp", bytes_per_example=3, projection_bytes=2 * 8 * 1000), n_fit=100)
    assert plan.m == {"small": 10, "large": 990}
    plan = choose_budget(modules, settings(bytes_per_example=3, projection_bytes=2 * 8 * 1000), n_fit=100)
    assert plan.m == {"small": 10, "large": (16000 - 5 * 8 * 2) // 4 - 10}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bytes_per_example": 8, "blocks": "module"}, "9 blocks, which take at least 27 bytes"),
        ({"projection_bytes": 100, "method": "eogp"}, "one coordinate per module already takes 36576 bytes"),
    ],
)
def test_budgets_that_hold_nothing_are_refused_with_the_number(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        choose_budget(model(3), settings(**values), n_fit=5000)


def test_no_module_and_no_example_are_refused() -> None:
    with pytest.raises(SettingError, match="no tracked module"):
        choose_budget([], settings(), n_fit=10)
    with pytest.raises(SettingError, match="fitting example"):
        choose_budget(model(1), settings(), n_fit=0)


def test_a_wide_stage_1_is_bounded_by_what_the_fit_spills() -> None:
    for n_fit, spilled in ((100, 4096), (8192, 8192)):
        plan = choose_budget(model(8, d=8192), settings(bytes_per_example=10, projection_bytes=10**9), n_fit=n_fit)
        assert sum(plan.m.values()) * 4 * spilled <= 32 * 10**9 < (sum(plan.m.values()) + len(plan.m)) * 4 * spilled
        assert plan.projection_bytes < 10**9 / 2
        assert "wider would spill more than 32 GB" in plan.why[-1]
