"""Memory, disk and shared bytes of indexing, estimated from shapes alone, before any work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.model import LoadedModel
from engine.modules import TrackedModule
from engine.settings import FitSettings

SHARE = 0.8  # of the free memory that a default budget takes


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: on a GPU, or in main memory under this process's control-group limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    if info.is_file():
        free = next(int(line.split()[1]) * 1024 for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def fit_budget(loaded: LoadedModel, tracked: Sequence[TrackedModule], settings: FitSettings) -> int:
    """Bytes for one group's factors and corrected eigenvalues: --fit-memory, or a share of what is free."""
    if settings.fit_memory is not None:
        return settings.fit_memory
    return int(SHARE * free_memory(loaded.device))
