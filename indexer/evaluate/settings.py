"""The table of settings of `eogp evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, field_validator

from engine.settings import ModelSettings, Settings

Metric = Literal["fidelity", "lds", "qld", "tail-patch", "facts"]
Method = Literal["random", "bm25", "gradient-dot", "gradient-cosine", "ek-fac", "store", "store-cosine"]


class EvaluationSettings(Settings):
    """Evaluation."""

    queries: list[str] = Field(default_factory=list, description="Held-out queries: files in the format of the indexed data. Repeat the flag for several.")
    max_queries: int = Field(100, ge=1, description="Queries used, from the first on.")
    metrics: list[Metric] = Field(
        default_factory=lambda: [get_args(Metric)[0]],
        description="What is measured: fidelity (NDCG@20, Spearman, recall@10 against uncompressed EK-FAC), lds and qld (retraining), tail-patch (one step), facts (--fact-field).",
    )
    methods: list[Method] = Field(
        default_factory=lambda: list(get_args(Method)),
        description="Rows of the table: random, bm25, gradient-dot, gradient-cosine, ek-fac, store, store-cosine.",
    )
    fact_field: str | None = Field(None, description="Metadata field that names the fact of a row and of a query; an example with the query's value proves it.")
    out: Path = Field(Path("evaluation"), description="Folder for evaluation.json, the plots, and the cached outcomes of retraining.")
    evaluation_seed: int = Field(0, ge=0, description="Seed of subsets, random rows and bootstrap samples.")
    bootstrap: int = Field(1000, ge=100, description="Bootstrap samples behind each 95 % interval.")

    @field_validator("metrics", "methods")
    @classmethod
    def _some(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("name at least one")
        return list(dict.fromkeys(value))


class RetrainingSettings(Settings):
    """Retraining."""

    base_model: str | None = Field(
        None, description="Model that the fine-tuning started from, for lds and qld; default: what the model's finetune.json records."
    )
    epochs: float | None = Field(None, gt=0, description="Passes over each subset; default: as recorded in finetune.json, else 3.")
    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate of AdamW, also of the tail patch; default: as recorded, else 5e-5.")
    batch_size: int | None = Field(None, ge=1, description="Examples per step; default: as recorded, else 16.")
    subsets: int = Field(100, ge=2, description="Half-size subsets that are retrained on for the LDS.")
    second_seed_subsets: int = Field(20, ge=0, description="Subsets trained with a second seed too: their agreement is the ceiling of the LDS.")
    removal_queries: int = Field(20, ge=1, description="Queries whose top examples are removed and the model retrained (qld).")
    removal_shares: list[float] = Field(default_factory=lambda: [0.01, 0.05], description="Shares of the training set that qld removes.")
    patch_examples: int = Field(10, ge=1, description="Proponents that the tail patch takes its step on.")

    @field_validator("removal_shares")
    @classmethod
    def _shares(cls, value: list[float]) -> list[float]:
        if not value or not all(0 < s < 1 for s in value):
            raise ValueError("shares lie between 0 and 1, for instance 0.05")
        return value


class EvaluateSettings(ModelSettings, EvaluationSettings, RetrainingSettings):
    """Every setting of `eogp evaluate`."""
