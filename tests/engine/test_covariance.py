"""Second moments block by block against the plain product."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

import engine.covariance as covariance
from engine.example import Batch
from engine.model import from_parts
from engine.modules import track


@pytest.mark.parametrize("d", [1, 5, 6, 7, 64])
@pytest.mark.parametrize("block", [1, 3, 6, 1000])
def test_blocks_equal_the_whole_product(d: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariance, "BLOCK", block)
    torch.manual_seed(0)
    total, expected = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(11, d, dtype=torch.float64)
        covariance.add_second_moment(total, x)
        expected += x.T @ x
    covariance.mirror(total)
    torch.testing.assert_close(total, expected)
    assert torch.equal(total, total.T)


def test_a_shared_input_is_added_once_and_padding_is_not_counted(tiny_llama: LlamaForCausalLM) -> None:
    modules = [m for m in track(from_parts(tiny_llama)).tracked if m.layer == 0 and "self_attn" in m.name and "o_proj" not in m.name]
    assert len({covariance.input_key(m) for m in modules}) == 1 and len(modules) == 3
    sums = covariance.CovarianceSums(modules, torch.bfloat16)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    a = torch.randn(2, 3, 24).masked_fill(mask[..., None] == 0, 0).bfloat16()
    sums.start(Batch(mask, mask, mask, mask.bool(), torch.arange(2), ["a", "b"]))
    deltas = {}
    for m in modules:
        deltas[m.name] = torch.randn(2, 3, m.d_out).masked_fill(mask[..., None] == 0, 0).bfloat16()
        sums.consume(m, a, deltas[m.name])
    assert sums.finite()
    sums.finish()
    (activation,) = sums.inputs.values()
    flat = a.float().reshape(-1, 24)
    torch.testing.assert_close(activation, flat.T @ flat / 4)
    for m in modules:
        flat = deltas[m.name].float().reshape(-1, m.d_out)
        torch.testing.assert_close(sums.outputs[m.name], flat.T @ flat / 4)
        assert sums.outputs[m.name].dtype == torch.float32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_entry_shows_on_a_diagonal(tiny_llama: LlamaForCausalLM, bad: float) -> None:
    module = track(from_parts(tiny_llama)).tracked[-1]
    for side in (0, 1):
        sums = covariance.CovarianceSums([module], torch.float32)
        ones = torch.ones(1, 2, dtype=torch.int64)
        sums.start(Batch(ones, ones, ones, ones.bool(), torch.arange(1), ["a"]))
        tensors = [torch.ones(1, 2, module.d_in), torch.ones(1, 2, module.d_out)]
        tensors[side][0, 1, 3] = bad
        sums.consume(module, *tensors)
        assert not sums.finite()
