"""Token-selection fine-tuning (TokenTune, arXiv 2501.18824): backpropagate through k positions per example, keep only their activations.

Two passes over the same weights. The first runs every position without gradients and keeps each attention layer's keys and values. The second runs the
selected positions alone, as a sequence of k tokens at their own positions; in its attention the selected queries meet ALL keys and values, those of the
second pass at the selected positions (with gradient) and those of the first pass elsewhere (without). Every module but attention works position by position,
so the second pass computes the same states as the first, and its saved activations are k / L of an ordinary pass's in every linear, norm and MLP. It asks
nothing of a model but transformers' attention interface, and `TokenSelection` verifies that on a random batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from engine.errors import ModelError
from engine.modules import bare
from engine.pooling import classify, mean_pool

_NUMBER = count()
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class _StopError(Exception):
    """Raised behind the last attention layer of the first pass: nothing reads what would follow."""


class TokenSelection:
    """Logits of selected positions, with gradients through those positions only.

    model: a causal LM, or a sequence classifier that pools the mean (engine.pooling), inside a PEFT wrapper or not. Its attention implementation is replaced
    by one that behaves as SDPA outside `__call__`; `close` puts the old one back. Raises ModelError for architectures that do not go through transformers'
    attention interface, or mix positions elsewhere. Switch gradient checkpointing on before, not after.
    """

    def __init__(self, model: Any) -> None:
        self.model = bare(model)
        self.base = self.model.base_model
        self.pooled = getattr(self.model.config, "pooling", None) is not None
        self.kernel: Callable[..., Any] = AttentionInterface()["sdpa"]
        self.before = self.model.config._attn_implementation
        self.keep = any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        self.offset = 0
        self.layers: int | None = None
        self.attached = 0
        self._recording = False
        self._step: _Step | None = None
        name = f"token-selection-{next(_NUMBER)}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, sdpa_mask)
        self._verify(name)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, selected: Tensor, selected_mask: Tensor) -> Tensor:
        """input_ids, attention_mask (B, T), right-padded; selected (B, K) int64 distinct positions; selected_mask (B, K) bool, off for fillers.

        Returns logits: (B, K, V) of the selected positions, or (B, C) from the mean of the selected states. With K = T this is the ordinary pass.
        With gradient checkpointing call `release` after the backward pass, which needs the keys and values once more.
        """
        self.release()
        if selected.shape[1] == input_ids.shape[1]:
            out = self._outputs(input_ids=input_ids, attention_mask=attention_mask)
        else:
            out = self._selected_outputs(input_ids, attention_mask, selected, selected_mask)
        return classify(self.model, mean_pool(out, selected_mask)) if self.pooled else out

    def release(self) -> None:
        """Drop recorded keys and values, and attend as an ordinary model again."""
        self._step = None
        self._recording = False

    @property
    def recorded_bytes(self) -> int:
        """Keys and values of the first pass that are held now: none after a forward pass, except with gradient checkpointing."""
        return sum(key.nbytes + value.nbytes for key, value, _ in self._step.recorded.values()) if self._step else 0

    def close(self) -> None:
        """Put the model's own attention implementation back."""
        self.release()
        self.model.set_attn_implementation(self.before)

    def _outputs(self, **inputs: Tensor) -> Tensor:
        """States behind the last block (B, T, d) where they are pooled, else logits (B, T, V)."""
        return self.base(**inputs)[0] if self.pooled else self.model(**inputs, use_cache=False).logits

    def _selected_outputs(self, input_ids: Tensor, attention_mask: Tensor, selected: Tensor, selected_mask: Tensor) -> Tensor:
        self._step = _Step(selected, None if bool(selected_mask.all()) else selected_mask, self.keep)
        self._recording = True
        try:
            with torch.no_grad():
                self.base(input_ids=input_ids, attention_mask=attention_mask)
        except _StopError:
            pass
        finally:
            self._recording = False
        return self._outputs(input_ids=input_ids.gather(1, selected), position_ids=selected + self.offset)

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """The attention interface's function. query (B, H, Q, D), key and value (B, H_kv, Q, D)."""
        step = self._step
        if step is None:
            return self.kernel(module, query, key, value, attention_mask, **kwargs)
        if self._recording:
            step.record(module, key, value, attention_mask)
            self.attached = len(step.recorded)
            if len(step.recorded) == self.layers:
                raise _StopError
            return self.kernel(module, query, key, value, attention_mask, **kwargs)
        key, value, rows = step.complete(module, key, value, kwargs.pop("is_causal", None))
        if not step.recorded:
            self.release()
        return self.kernel(module, query, key, value, rows, is_causal=False, **kwargs)

    @torch.no_grad()
    def _verify(self, name: str) -> None:
        """Outputs at selected positions must equal those of the model as it came, on a random padded batch. Sets the number of layers and the offset of positions."""
        training = self.model.training
        self.model.eval()
        device = next(self.base.parameters()).device
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.model.get_input_embeddings().weight.shape[0], (2, 12), generator=generator)
        pad = getattr(self.model.config, "pad_token_id", None)
        if pad is not None:
            ids[ids == pad] = (pad + 1) % 7
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, 8:] = 0
        selected = torch.tensor([[1, 4, 5, 11], [0, 3, 6, 7]])
        ids, mask, selected = ids.to(device), mask.to(device), selected.to(device)
        problem = "its attention does not go through transformers' attention interface"
        try:
            expected = self._outputs(input_ids=ids, attention_mask=mask)
            expected = expected.gather(1, selected[:, :, None].expand(-1, -1, expected.shape[2]))
            self.model.set_attn_implementation(name)
            if self.model.config._attn_implementation != name:
                raise ModelError(problem)
            for self.offset in dict.fromkeys((0, (pad or 0) + 1)):  # RoBERTa's kin count positions from behind the pad id
                found = self._selected_outputs(ids, mask, selected, torch.ones_like(selected, dtype=torch.bool))
                self.layers = self.attached
                error = float((found - expected).abs().max() / expected.abs().max())
                if error <= _TOLERANCE.get(expected.dtype, 1e-3):
                    break
            else:
                raise ModelError(
                    problem
                    if not self.layers
                    else f"its outputs at selected positions differ from the model's own by {error:.1%}: it mixes positions outside attention"
                )
        except (ModelError, TypeError, ValueError, RuntimeError, KeyError, IndexError) as e:
            self.close()
            raise ModelError(
                f"token selection does not cover {type(self.model).__name__}: {str(e).splitlines()[0]}; use --method full or lora", field="method"
            ) from None
        finally:
            self.release()
            self.model.train(training)


class _Step:
    """Keys, values and masks of one batch, by attention module."""

    def __init__(self, selected: Tensor, real: Tensor | None, keep: bool) -> None:
        self.selected = selected
        self.real = None if real is None else real[:, None, :, None]
        self.keep = keep
        self.recorded: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self.rows: dict[int, Tensor | None] = {}

    def record(self, module: Any, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        if id(module) in self.recorded:
            raise ModelError("it calls one attention module twice")
        self.recorded[id(module)] = (key, value, mask)

    def complete(self, module: Any, key: Tensor, value: Tensor, causal: bool | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """All keys and values (B, H_kv, T, D), the selected ones with gradient, and the mask's rows (B, 1, K, T) of the selected queries."""
        all_keys, all_values, mask = self.recorded[id(module)] if self.keep else self.recorded.pop(id(module))
        return self._place(all_keys, key), self._place(all_values, value), self._rows(mask, module, causal, all_keys.shape[2])

    def _place(self, everywhere: Tensor, here: Tensor) -> Tensor:
        if self.real is not None:  # fillers carry no gradient
            here = torch.where(self.real, here, here.detach())
        index = self.selected[:, None, :, None].expand(-1, here.shape[1], -1, here.shape[3])
        return everywhere.scatter(2, index, here.to(everywhere.dtype))

    def _rows(self, mask: Tensor | None, module: Any, causal: bool | None, length: int) -> Tensor | None:
        """Rows of the first pass's mask; without one, causal rows if the module is causal. Masks are shared by layers, and so are their rows."""
        if id(mask) not in self.rows:
            if mask is not None:
                index = self.selected[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
                self.rows[id(mask)] = mask.expand(self.selected.shape[0], -1, -1, -1).gather(2, index)
            elif causal if causal is not None else getattr(module, "is_causal", True):
                self.rows[id(mask)] = (torch.arange(length, device=self.selected.device) <= self.selected[:, :, None])[:, None]
            else:
                self.rows[id(mask)] = None
        return self.rows[id(mask)]
