"""Bytes that autograd keeps between forward and backward, by the kind of module that keeps them."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from engine.modules import bare


class SavedBytes:
    """Counts saved tensors inside a `with`; each storage once, weights and buffers not at all. Adds no copy and changes no result.

    token_wise: kept by modules that work position by position (linear, norm, MLP, embedding). attention: kept by the attention modules themselves: queries,
    keys, values, masks, probabilities or log-sums, rotary tables. outside: kept by no module of the blocks (residual sums, pooling, the loss).
    """

    def __init__(self, model: Any) -> None:
        self.model: PreTrainedModel = bare(model)
        self.by_module: Counter[str] = Counter()
        self._stack: list[str] = []
        self._seen: set[int] = {t.untyped_storage().data_ptr() for t in [*self.model.parameters(), *self.model.buffers()]}
        self._alive: list[Tensor] = []
        self._handles: list[Any] = []
        self._hooks: Any = None

    def __enter__(self) -> SavedBytes:
        for name, module in self.model.named_modules():
            kind = "attention" if _attends(module) else "token_wise" if not list(module.children()) or _is_mlp(module) else ""
            if kind:
                self._handles.append(module.register_forward_pre_hook(lambda *_, name=name, kind=kind: self._stack.append(f"{kind} {name}")))
                self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._alive.clear()

    def _leave(self) -> None:
        self._stack.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._alive.append(tensor.detach())  # else the address could be used again
            self.by_module[self._stack[-1] if self._stack else "outside"] += storage.nbytes()
        return tensor

    def _sum(self, kind: str) -> int:
        return sum(n for name, n in self.by_module.items() if name.split(" ")[0] == kind)

    @property
    def token_wise(self) -> int:
        return self._sum("token_wise")

    @property
    def attention(self) -> int:
        return self._sum("attention")

    @property
    def outside(self) -> int:
        return self._sum("outside")

    @property
    def total(self) -> int:
        return sum(self.by_module.values())


def _attends(module: Any) -> bool:
    """The module that calls the attention interface: it holds the scaling, and its parents do not."""
    return "Attention" in type(module).__name__ and (hasattr(module, "scaling") or hasattr(module, "scale_attn_weights"))


def _is_mlp(module: Any) -> bool:
    return "MLP" in type(module).__name__
