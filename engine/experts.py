"""Mixtures of experts whose weights are fused into three-dimensional tensors, run expert by expert so that each weight's gradient can be captured.

transformers keeps the experts of a layer in gate_up_proj (E, ., .) and down_proj (E, ., .), which no hook can see. Its interface for experts'
implementations takes ours instead: the same arithmetic, with one linear module per expert and weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError:  # transformers before the interface
    ALL_EXPERTS_FUNCTIONS = None

IMPLEMENTATION = "eogp_per_expert"
_UP, _GATED, _DOWN = "up_proj", "gate_up_proj", "down_proj"


class ExpertLinear(nn.Module):
    """One expert's slice of a fused weight. It owns no parameter; it reads its slice at each call."""

    def __init__(self, experts: Any, weight: str, index: int) -> None:
        super().__init__()
        self.owner = (experts,)  # in a tuple: not a submodule
        self.weight_name = weight
        self.index = index
        shape = getattr(experts, weight).shape
        self.d_in, self.d_out = (int(shape[1]), int(shape[2])) if experts.is_transposed else (int(shape[2]), int(shape[1]))

    @property
    def weight(self) -> Tensor:
        """(d_out, d_in)."""
        w: Tensor = getattr(self.owner[0], self.weight_name)[self.index]
        return w.T if self.owner[0].is_transposed else w

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.owner[0], f"{self.weight_name}_bias")[self.index] if self.owner[0].has_bias else None

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x (n, d_in): the tokens routed to this expert; tokens (n,): their places in the flattened batch, for whoever watches."""
        return nn.functional.linear(x, self.weight, self.bias)


def expert_linears(experts: nn.Module) -> Iterator[tuple[str, ExpertLinear]]:
    """('3.gate_up_proj', module) in the order of the forward pass; nothing for a module that was not split."""
    for e, pair in enumerate(getattr(experts, "eogp_linears", ())):
        for module in pair:
            yield f"{e}.{module.weight_name}", module


def split_experts(model: Any) -> list[str]:
    """Let every layer of fused experts run expert by expert; names of the layers, [] where there is none or ours gives other outputs (then as before)."""
    layers = {name: m for name, m in model.named_modules() if ALL_EXPERTS_FUNCTIONS is not None and _fused(m)}
    if not layers:
        return []
    ids = torch.arange(1, 6, device=model.get_input_embeddings().weight.device)[None]
    before = {id(m.config): (m.config, m.config._experts_implementation) for m in layers.values()}

    def output() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return found.float()

    for config, _ in before.values():
        config._experts_implementation = "eager"
    wanted = output()
    for m in layers.values():
        first = _GATED if m.has_gate else _UP
        m.eogp_linears = tuple((ExpertLinear(m, first, e), ExpertLinear(m, _DOWN, e)) for e in range(m.num_experts))
    for config, _ in before.values():
        config._experts_implementation = IMPLEMENTATION
    try:
        same = torch.allclose(output(), wanted, rtol=1e-3, atol=1e-4)
    except Exception:  # a family with other conventions keeps its own code and is reported as skipped
        same = False
    if same:
        return list(layers)
    for m in layers.values():
        del m.eogp_linears
    for config, implementation in before.values():
        config._experts_implementation = implementation
    return []


def _fused(m: Any) -> bool:
    if not all(hasattr(m, a) for a in ("has_gate", "has_bias", "is_transposed", "num_experts", "_apply_gate", "config")):
        return False
    weights = (getattr(m, _GATED if m.has_gate else _UP, None), getattr(m, _DOWN, None))
    return all(isinstance(w, Tensor) and w.dim() == 3 for w in weights) and not getattr(m, "has_post_expert_norm", False)


def _forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states (N, d), top_k_index and top_k_weights (N, K) -> (N, d)."""
    out = torch.zeros_like(hidden_states)
    for e in torch.unique(top_k_index).tolist():
        if e >= experts.num_experts:
            continue
        tokens, place = torch.where(top_k_index == e)
        up, down = experts.eogp_linears[e]
        h = up(hidden_states[tokens], tokens)
        h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
        weighted = down(h, tokens) * top_k_weights[tokens, place, None]
        out.index_add_(0, tokens, weighted.to(out.dtype))
    return out


if ALL_EXPERTS_FUNCTIONS is not None:
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
