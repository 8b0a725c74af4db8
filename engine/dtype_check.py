"""Gradients in 16 bits against float32, before anything is built on them.

Some models' gradients are silently wrong in bfloat16 (a cosine of -0.42 has been reported), so every module's gradient of every probe text must have a
cosine of at least 0.99 with its float32 counterpart; else float32 is used, or the dtype that was asked for is refused with the numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.capture import Capture
from engine.errors import ModelError
from engine.example import Example, collate
from engine.model import LoadedModel
from engine.modules import TrackedModule, bare, track

THRESHOLD = 0.99
_NEGLIGIBLE = 1e-3  # of the example's largest module gradient: below it, rounding is all there is
_LENGTH = 64
_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "In 1905 a clerk at the patent office published four papers; one of them explained the photoelectric effect.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
    "Question: What is the boiling point of water at sea level? Answer: 100 degrees Celsius, or 212 degrees Fahrenheit.",
)


@dataclass(frozen=True)
class DtypeReport:
    """The worst agreement found: cosine of one module's gradient of one probe text, and how many were compared."""

    cosine: float
    module: str
    example: str
    compared: int

    def __str__(self) -> str:
        return f"smallest cosine {self.cosine:.4f} (module {self.module}, probe {self.example}) of {self.compared} gradients"


def compare_gradients(low: LoadedModel, high: LoadedModel, examples: Sequence[Example]) -> DtypeReport:
    """Cosine between the two models' gradients, example by example and module by module; a non-finite gradient counts as -1.

    <G, G'> = sum_{s,t} (delta_s . delta'_t)(a_s . a'_t), so that no gradient is formed; sums in float64.
    """
    worst = DtypeReport(1.0, "", "", 0)
    tracked_low, tracked_high = track(low).tracked, track(high).tracked
    for example in examples:
        parts = [_factors(loaded, tracked, example) for loaded, tracked in ((low, tracked_low), (high, tracked_high))]
        square = {name: _inner(*parts[1][name], *parts[1][name]) for name in parts[1]}
        floor = max(square.values()) * _NEGLIGIBLE**2
        for name, wanted in square.items():
            if wanted <= floor or wanted == 0:
                continue
            own = _inner(*parts[0][name], *parts[0][name])
            cosine = 0.0 if own == 0 else _inner(*parts[0][name], *parts[1][name]) / (own * wanted) ** 0.5
            cosine = cosine if np.isfinite(cosine) else -1.0
            found = DtypeReport(cosine, name, example.id, 0) if cosine < worst.cosine else worst
            worst = replace(found, compared=worst.compared + 1)
    return worst


def settle_dtype(loaded: LoadedModel, *, asked_for: bool) -> LoadedModel:
    """The model itself where its 16-bit gradients agree with float32, else the model in float32; the outcome is in its notes.

    asked_for: the dtype was the user's choice, so a disagreement raises ModelError with the numbers. A float32 copy is held meanwhile; where there is no
    room for it on the device it goes to the CPU, and where there is none either the notes say that nothing was checked.
    """
    if loaded.dtype not in (torch.bfloat16, torch.float16):
        return loaded
    name = str(loaded.dtype).removeprefix("torch.")
    if getattr(bare(loaded.model), "is_quantized", False):
        return _noted(loaded, f"{name}: the base weights are quantised, so gradients were not checked against float32")
    if loaded.kept_elsewhere or len(set(getattr(loaded.model, "hf_device_map", {}).values())) > 1:
        return _noted(loaded, f"{name}: the model is spread over several devices, so gradients were not checked against float32")
    examples = probe_examples(loaded)
    high = _float32_copy(loaded)
    if high is None:
        return _noted(loaded, f"{name}: no room for a float32 copy, so gradients were not checked against float32")
    report = compare_gradients(loaded, high, examples)
    if report.cosine >= THRESHOLD:
        return _noted(loaded, f"{name}: gradients agree with float32, {report}")
    if asked_for:
        raise ModelError(
            f"{loaded.source}: gradients in {name} do not agree with float32: {report}, and {THRESHOLD} is needed; use --dtype float32", field="dtype"
        )
    fallback = replace(high, model=high.model.to(loaded.device), device=loaded.device)
    return _noted(fallback, f"{name}: gradients do not agree with float32 ({report}), so float32 is used")


def probe_examples(loaded: LoadedModel) -> list[Example]:
    """A few short texts through the model's tokenizer, or seeded random ids without one; every token but the first is a target."""
    made = []
    rng = np.random.default_rng(0)
    for i, text in enumerate(_TEXTS):
        if loaded.tokenizer is None:
            ids = rng.integers(0, loaded.vocab_size, 24)
        else:
            ids = np.asarray(loaded.tokenizer(text, add_special_tokens=True)["input_ids"], np.int64)
            ids = np.clip(ids, 0, loaded.vocab_size - 1)
        ids = ids[: min(_LENGTH, loaded.max_length)]
        causal = loaded.task == "causal-lm"
        made.append(Example(f"{i + 1}", ids, ids if causal else 0, (np.arange(len(ids)) > 0) & causal, text))
    return made


def _factors(loaded: LoadedModel, tracked: Sequence[TrackedModule], example: Example) -> dict[str, tuple[Tensor, Tensor]]:
    """{module: a (T, d_in), delta (T, d_out)} of one example."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    batch = collate([example], [0], loaded.pad_id, loaded.device)
    Capture(loaded, tracked).run(batch, lambda t, a, delta: found.__setitem__(t.name, (a[0], delta[0])))
    return found


def _inner(a: Tensor, delta: Tensor, other_a: Tensor, other_delta: Tensor) -> float:
    device = a.device
    left = delta.double() @ other_delta.to(device).double().T
    return float((left * (a.double() @ other_a.to(device).double().T)).sum())


def _float32_copy(loaded: LoadedModel) -> LoadedModel | None:
    for device in dict.fromkeys((loaded.device, torch.device("cpu"))):
        try:
            model = copy.deepcopy(loaded.model).to(device=device, dtype=torch.float32)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError):
            continue
        return replace(loaded, model=model, device=device, dtype=torch.float32, fingerprint={**loaded.fingerprint, "dtype": "float32"})
    return None


def _noted(loaded: LoadedModel, note: str) -> LoadedModel:
    return replace(loaded, notes=[*loaded.notes, note])
