"""Where the parts of a model are: on one device, spread over several, or kept in main memory or on disk and brought to a device when they run (accelerate)."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from engine.errors import ModelError
from engine.settings import ModelSettings, parse_bytes

_C = ctypes.CDLL(None) if sys.platform == "linux" else None
NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def device_of(module: nn.Module) -> torch.device:
    """Where a module with a weight computes: where its weight is, or, for one that is kept elsewhere, where it is brought to."""
    weight: Tensor = module.weight  # type: ignore[assignment]  # Module attributes are typed Tensor | Module
    if not weight.is_meta:
        return weight.device
    hooks = [getattr(module, "_hf_hook", None)]
    hooks += list(getattr(hooks[0], "hooks", ()))
    for hook in hooks:
        place = getattr(hook, "execution_device", None)
        if place is not None:
            return torch.device(place if not isinstance(place, int) else f"cuda:{place}")
    return weight.device


def kept_elsewhere(model: nn.Module) -> bool:
    """Whether some weights are brought to their device only while they are used. A model without any storage is not meant."""
    return any(p.is_meta for p in model.parameters()) and any(hasattr(m, "_hf_hook") for m in model.modules())


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of the model's state in name order; what is kept elsewhere is there until the next one is asked for."""
    for name, tensor in sorted(model.state_dict().items()):
        if not tensor.is_meta:
            yield name, tensor.detach()
            continue
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        with align_module_device(owner, execution_device="cpu"):
            yield name, getattr(owner, leaf).detach()


def release_heap() -> None:
    """Give freed memory back to the system: glibc would keep what a pass has brought in and let go, several layers' worth. Elsewhere nothing happens."""
    if _C is not None and hasattr(_C, "malloc_trim"):
        _C.malloc_trim(0)


def placement(settings: ModelSettings) -> dict[str, Any]:
    """What `from_pretrained` takes to spread a model; empty where it is not asked for. Raises ModelError naming the setting."""
    if settings.device_map is None:
        for name in ("max_memory", "offload_folder"):
            if getattr(settings, name):
                raise ModelError(f"--{name.replace('_', '-')} says how to spread a model, so --device-map is needed too", field=name)
        return {}
    found: dict[str, Any] = {"device_map": settings.device_map if settings.device_map in NAMED_MAPS else _written(settings.device_map)}
    if settings.max_memory:
        found["max_memory"] = dict(_limit(entry) for entry in settings.max_memory)
    if settings.offload_folder:
        found["offload_folder"] = str(settings.offload_folder)
    return found


def _written(name: str) -> dict[str, int | str]:
    """A map of one's own: module name -> GPU number, "cpu" or "disk"."""
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError:
        raise ModelError(f"--device-map must be {', '.join(NAMED_MAPS)}, or a JSON file, and {name!r} is none of them", field="device_map") from None
    except ValueError as e:
        raise ModelError(f"--device-map {name}: not JSON ({e})", field="device_map") from None
    if not isinstance(found, dict) or not all(isinstance(v, int | str) for v in found.values()):
        raise ModelError(f'--device-map {name}: must be an object such as {{"model.layers.0": 0, "model.layers.1": "cpu", "": "disk"}}', field="device_map")
    return found


def _limit(entry: str) -> tuple[int | str, int]:
    device, _, size = entry.partition("=")
    try:
        return (int(device) if device.isdigit() else device), int(parse_bytes(size.strip()))
    except ValueError:
        raise ModelError(f"--max-memory {entry!r}: write a device and a size, for instance 0=20GB or cpu=60GB", field="max_memory") from None
