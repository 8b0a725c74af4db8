"""What the server may be told: where it listens, what it accepts, how long it waits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from engine.cluster import ClusterSettings
from engine.settings import Bytes, ModelSettings, Settings


class LimitSettings(Settings):
    """Limits."""

    max_body_bytes: Bytes = Field(2_000_000, ge=1_000, description="Largest request body in bytes, e.g. 2MB; more is refused with 413.")
    max_queries: int = Field(32, ge=1, description="Queries in one request.")
    max_query_tokens: int = Field(0, ge=0, description="Tokens of one query; 0 takes the model's context.")
    max_request_tokens: int = Field(16_384, ge=1, description="Tokens of all queries of one request together.")
    max_top_k: int = Field(1_000, ge=1, description="Largest top_k.")
    max_results: int = Field(5_000, ge=1, description="Results of one answer: queries x top_k x directions.")
    max_candidates: int = Field(1_000_000, ge=1, description="Largest number of Hamming candidates that a request may ask to re-score.")
    max_filter_terms: int = Field(64, ge=1, description="Conditions and operators in one filter.")
    max_filter_values: int = Field(10_000, ge=1, description="Values in all `in` lists of one filter together.")
    max_new_tokens: int = Field(256, ge=1, description="Tokens that the model may generate for one query.")
    max_rescored: int = Field(64, ge=1, description="Results per direction whose gradients one request may have recomputed.")


class QueueSettings(Settings):
    """Queue."""

    batch_tokens: int = Field(4_096, ge=1, description="Tokens of the requests that one pass of the model answers together.")
    max_queue: int = Field(128, ge=1, description="Requests that may wait; more are refused with 429 and Retry-After.")
    deadline_seconds: float = Field(30.0, gt=0, description="Longest time from arrival to answer; past it, 504.")
    stuck_seconds: float = Field(120.0, gt=0, description="A batch that takes longer makes /readyz answer 503.")


class ShardSettings(ClusterSettings):
    """Cluster."""

    ray_shards: int = Field(1, ge=1, description="Parts of the index, each held by a process of its own on the cluster.")
    ray_replicas: int = Field(1, ge=1, description="Processes that take requests and sketch queries, each with the model.")
    shard_seconds: float = Field(5.0, gt=0, description="Longest wait for a part of the index; past it, 503.")


class ServeSettings(LimitSettings, QueueSettings, ModelSettings, ShardSettings):
    """Server."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on; 0 takes a free one and prints it.")
    api_keys: Path | None = Field(None, description="File of API keys, one `KEY read|admin [name]` a line; without it every request is allowed.")
    cors_origins: list[str] = Field(default_factory=list, description="Web origins that may call the API from a browser; none by default.")
    reload_seconds: float = Field(2.0, ge=0, description="How often to look for a new generation of the store; 0 only reloads on POST /v1/reload.")
    drain_seconds: float = Field(0.0, ge=0, description="After SIGTERM: how long /readyz says 503 while requests are still accepted.")
    grace_seconds: float = Field(30.0, gt=0, description="After SIGTERM: how long running requests may take to finish.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line that is written.")
    log_format: Literal["json", "text"] = Field("json", description="JSON lines for machines, or text for people.")
    log_queries: bool = Field(False, description="Write the text of queries into the log. Off by default: queries may be private.")
    check_rate: Bytes = Field(
        20_000_000, ge=0, description="Bytes per second that the background check of the store's hashes reads, e.g. 20MB; 0 turns it off."
    )
    check_hours: float = Field(24.0, gt=0, description="Hours between the end of one background check and the beginning of the next.")
    verify: bool = Field(False, description="Check every file of the store against its SHA-256 before serving.")


class QuerySettings(ModelSettings):
    """Query."""

    top_k: int = Field(10, ge=1, le=1_000, description="Results per direction.")
    score: Literal["influence", "cosine"] = Field(
        "influence", description="influence: equation (14); cosine: its angle, where long examples do not weigh more."
    )
    direction: Literal["proponents", "opponents", "both"] = Field("both", description="Examples that lower the query's loss, that raise it, or both.")
    truncation: Literal["error", "left", "right"] = Field("error", description="What to do with a query that is too long: refuse, or drop tokens on a side.")
    max_new_tokens: int = Field(32, ge=1, le=256, description="With a prompt alone: the longest continuation that the model may write.")
