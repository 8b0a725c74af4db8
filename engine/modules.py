"""Which linear modules carry the gradient: attention and MLP linears, a small classification head, or the adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.errors import ModelError
from engine.experts import ExpertLinear, expert_linears

if TYPE_CHECKING:
    from engine.model import LoadedModel

_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|block)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, eq=False)
class TrackedModule:
    """A linear module whose weight gradient is attributed: G = sum_t delta_t a_t^T, (d_out, d_in).

    d_in counts the constant 1 of a bias (appended last). layer: 0-based block index, -1 outside the blocks. input_group: the name of the first
    module that is fed by the same tensor (q/k/v, gate/up share one input, so one activation covariance and one basis Q_A).
    """

    name: str
    module: nn.Module
    d_out: int
    d_in: int
    bias: bool
    layer: int
    input_group: str

    @property
    def n_parameters(self) -> int:
        return self.d_out * self.d_in


@dataclass(frozen=True)
class ModuleReport:
    """What is tracked, in the order of the forward pass, and what is not: (name, reason, number of parameters)."""

    tracked: list[TrackedModule]
    skipped: list[tuple[str, str, int]]
    tracked_parameters: int
    total_parameters: int
    notes: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Tracked share of all parameters."""
        return self.tracked_parameters / max(self.total_parameters, 1)


def bare(model: Any) -> Any:
    """The transformers model itself, inside a PEFT wrapper or not."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def evaluation_mode(model: nn.Module) -> None:
    """No dropout. bitsandbytes' 4-bit layers alone stay in training mode: in evaluation mode on a CPU they switch to a kernel without a gradient."""
    model.eval()
    for m in model.modules():
        if type(m).__name__ == "Linear4bit" and type(m).__module__.startswith("bitsandbytes"):
            m.training = True


def layer_of(name: str) -> int:
    """Block index in a module's name ('model.layers.3.mlp.up_proj' -> 3), -1 where there is none."""
    found = _BLOCK.search(name)
    return int(found.group(1)) if found else -1


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(d_out, d_in) of a linear module without the bias's column; None for anything else."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, Conv1D):
        return int(module.nf), int(module.nx)
    if isinstance(module, ExpertLinear):
        return module.d_out, module.d_in
    return None


def track(loaded: LoadedModel) -> ModuleReport:
    """Choose the modules to attribute to. Runs the model once on two tokens to learn the order and which modules share an input.

    Raises ModelError where nothing can be tracked.
    """
    model = bare(loaded.model)
    adapters = loaded.adapters_tracked
    head = model.get_output_embeddings() if loaded.task == "causal-lm" else None
    chosen: dict[str, nn.Module] = {}
    skipped: list[tuple[str, str, int]] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in own)
        size = sum(p.numel() for p in own)
        parts = dict(expert_linears(module))
        reason = _reason(module, parts, head)
        if reason is None and adapters and not _adapter(name):
            reason = "base weight under an adapter"
        elif reason is None and not adapters and loaded.has_adapters and _adapter(name):
            reason = "adapter (attribution goes to the base weights)"
        if reason is not None:
            skipped += [(name, reason, size)] if size else []
        elif parts:
            chosen.update({f"{name}.{part}": linear for part, linear in parts.items()})
        else:
            chosen[name] = module
    order, groups, other = _probe(loaded, chosen)
    tracked = []
    for name, module in chosen.items():
        if name not in order:
            skipped.append((name, other.get(name, "not called in the forward pass"), sum(p.numel() for p in module.parameters(recurse=False))))
    for name in order:
        module = chosen[name]
        d_out, d_in = linear_shape(module) or (0, 0)
        bias = getattr(module, "bias", None) is not None
        tracked.append(TrackedModule(name, module, d_out, d_in + bias, bias, layer_of(name), groups[name]))
    if not tracked:
        raise ModelError(f"{loaded.source}: no linear layer that could be attributed to was found in {type(model).__name__}", code="nothing-tracked")
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    return ModuleReport(tracked, skipped, sum(t.n_parameters for t in tracked), total)


def _reason(module: nn.Module, parts: dict[str, ExpertLinear], head: nn.Module | None) -> str | None:
    """Why a module is not tracked, whatever the adapters; None where it is."""
    if module is head:
        return "vocabulary head"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if parts or linear_shape(module) is not None:
        return None
    kind = type(module).__name__
    if kind.endswith("Router"):
        return f"router ({kind})"
    return f"fused experts ({kind})" if kind.endswith("Experts") else f"not a linear layer ({kind})"


def _adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name or ".modules_to_save." in name


def _probe(loaded: LoadedModel, chosen: dict[str, nn.Module]) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Order of first calls; for each module (and bias or not) the first module with the same input tensor; modules that do not act as linear, with why."""
    order: list[str] = []
    kept: list[Tensor] = []  # keeps the tensors alive, so that an address identifies a tensor
    first: dict[tuple[Any, ...], str] = {}
    groups: dict[str, str] = {}
    other: dict[str, str] = {}

    def note(name: str, key: tuple[Any, ...]) -> None:
        if name not in groups:
            order.append(name)
            groups[name] = first.setdefault(key, name)

    def watch_experts(name: str) -> Any:
        """Every expert counts as called: two tokens do not reach them all. Each is fed its own tokens."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            for part, _ in expert_linears(module):
                note(f"{name}.{part}", (name, part))

        return hook

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            if not _acts_as_linear(module, x, output):
                other[name] = f"does more than a linear layer ({type(module).__name__})"
                return
            kept.append(x)
            biased = getattr(module, "bias", None) is not None
            note(name, (id(x) if x.is_meta else x.data_ptr(), x.device, x.dtype, tuple(x.shape), tuple(x.stride()), x._version, biased))

        return hook

    handles = [module.register_forward_hook(watch(name), with_kwargs=True) for name, module in chosen.items() if not isinstance(module, ExpertLinear)]
    handles += [m.register_forward_pre_hook(watch_experts(name)) for name, m in bare(loaded.model).named_modules() if hasattr(m, "eogp_linears")]
    try:
        with torch.no_grad():
            ids = torch.zeros((1, 2), dtype=torch.int64, device=loaded.device)
            bare(loaded.model)(input_ids=ids, attention_mask=torch.ones_like(ids), **loaded.call_options)
    finally:
        for handle in handles:
            handle.remove()
    return order, groups, other


def _acts_as_linear(module: nn.Module, x: Tensor, output: Any) -> bool:
    """Some routers and the like derive from nn.Linear and return something else; a quantised weight is taken at its word."""
    weight: Any = module.weight
    if not isinstance(output, Tensor) or output.shape[:-1] != x.shape[:-1]:
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward) or not weight.is_floating_point() or weight.dim() != 2:
        return True
    plain = nn.functional.linear(x.to(weight.dtype), weight, module.bias)  # type: ignore[arg-type]  # Module attributes are typed Tensor | Module
    return plain.shape == output.shape and torch.allclose(plain.float(), output.float(), rtol=1e-2, atol=1e-3)
