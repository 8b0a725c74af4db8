"""Settings of the indexing job."""

from __future__ import annotations

from pydantic import Field

from engine.cluster import ClusterSettings
from engine.data.settings import DataSettings
from engine.settings import FitSettings, ModelSettings, Settings, SketchSettings


class RunSettings(Settings):
    """Run."""

    shard_rows: int = Field(4096, ge=1, description="Rows per segment; a killed job loses at most the segment in flight.")
    restart: bool = Field(False, description="Discard an interrupted run of this store instead of resuming it.")
    log_json: bool = Field(False, description="Write progress as JSON lines on standard error instead of a display.")


class WorkerSettings(ClusterSettings):
    """Cluster."""

    ray_workers: int = Field(
        0, ge=0, description="Copies of the model that work side by side on the cluster; 0 takes one per GPU, or without GPUs as many as the CPUs allow."
    )


class KeepSettings(Settings):
    """Store."""

    keep_curvature: bool | None = Field(
        None, description="Keep the whole curvature in the store, which `rescore: gradients` needs; default: where it takes less than 2 GB."
    )


class IndexSettings(DataSettings, ModelSettings, FitSettings, SketchSettings, KeepSettings, RunSettings, WorkerSettings):
    """Everything that `eogp index` can be told."""


class AppendSettings(DataSettings, ModelSettings, RunSettings, WorkerSettings):
    """What `eogp append` can be told; what is left out is as it was when the store was built."""

    batch_tokens: int | None = Field(
        None, ge=1, description="Padded tokens per batch of the model's forward and backward pass; default: as when the store was built."
    )


class InspectSettings(DataSettings, ModelSettings, FitSettings, SketchSettings):
    """What `eogp inspect model` can be told."""

    examples: int = Field(100_000, ge=1, description="Training examples to plan for, where no --data is given to count them.")
    tokens_per_example: int = Field(512, ge=1, description="Mean tokens of an example, where no --data is given to measure them.")


# how a run is carried out, not what it makes
OPERATIONAL = ("restart", "log_json", "device", "device_map", "max_memory", "offload_folder", "ray", "ray_workers")
