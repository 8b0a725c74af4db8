"""prompt + generate: the model continues the prompt, and its own words become the completion that is attributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from engine.data.settings import DataSettings
from engine.errors import DataError
from engine.example import Example
from engine.model import LoadedModel
from engine.query.prepare import Pending, tokenise


def complete(pending: Pending, loaded: LoadedModel, settings: DataSettings) -> tuple[Example, str]:
    """Generate, and return the query it makes with the text that was written. Raises DataError where the model ends at once."""
    new = _continue(pending, loaded)
    written = str(loaded.tokenizer.decode(new, skip_special_tokens=True))
    if not written.strip():
        raise DataError(f"{pending.where}: the model ended at once; nothing was generated that could be attributed", field=f"{pending.where}.generate")
    if pending.query.messages is not None:
        messages = [*pending.query.messages, {"role": "assistant", "content": written}]
        return tokenise({"messages": messages}, "messages", pending.where, "left", loaded, settings), written
    ids = [*pending.input_ids, *new]
    example = tokenise({"prompt": pending.prompt, "completion": written}, "completion", pending.where, "left", loaded, settings)
    if example.input_ids.tolist() == ids:
        return example, written
    # joining the strings would make other tokens than those that the model chose: keep its own, without offsets
    labels = [-100] * len(pending.input_ids) + new
    exact = tokenise({"input_ids": ids, "labels": labels}, "tokens", pending.where, "left", loaded, settings)
    return exact, written


def _continue(pending: Pending, loaded: LoadedModel) -> list[int]:
    options, tokenizer = pending.options, loaded.tokenizer
    eos = getattr(loaded.model.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
    sample: dict[str, Any] = {"temperature": options.temperature, "top_p": options.top_p} if options.temperature > 0 else {}
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens, do_sample=options.temperature > 0, pad_token_id=loaded.pad_id, eos_token_id=eos, use_cache=True, **sample
    )
    ids = torch.tensor([pending.input_ids], device=loaded.device)
    devices = [loaded.device] if loaded.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(options.seed)
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    new = out[0, len(pending.input_ids) :].tolist()
    ends = set(np.atleast_1d(eos).tolist()) if eos is not None else set()
    while new and new[-1] in ends:  # queries carry no end-of-sequence token
        new.pop()
    return [int(i) for i in new]
