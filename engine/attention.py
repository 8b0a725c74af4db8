"""An attention kernel whose choice does not depend on padding.

transformers drops the mask of a batch without padding and sets is_causal instead, and then another kernel runs (with other rounding, which in 16 bits is
not small). Here the mask is always given, so that an example meets the same kernel alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MASKED = "eogp_masked_sdpa"


def choose_attention(model: Any) -> str:
    """Set the model's attention and return its name for the record: 'sdpa, always masked', or 'eager' where SDPA would drop a soft cap, or as it was."""
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    current = str(getattr(model.config, "_attn_implementation", None) or "eager")
    if current in ("sdpa", MASKED) and getattr(text, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
        return "eager"
    if current == "sdpa":
        model.set_attn_implementation(MASKED)
        current = str(model.config._attn_implementation)
    return "sdpa, always masked" if current == MASKED else current


@contextmanager
def same_kernel(device: torch.device) -> Iterator[None]:
    """Inside, SDPA on a GPU is left with the kernels that take a mask."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    found: Tensor | None = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return found


ALL_ATTENTION_FUNCTIONS.register(MASKED, sdpa_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED, _mask)
