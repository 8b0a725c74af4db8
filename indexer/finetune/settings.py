"""The table of settings of `eogp finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from engine.data.settings import DataSettings
from engine.settings import ModelSettings, Settings


class TrainingSettings(Settings):
    """Training."""

    method: Literal["full", "lora", "token-selection", "lora+token-selection"] = Field(
        "full", description="What is trained, and through which positions: all weights or LoRA adapters; all positions or a random selection (TokenTune)."
    )
    epochs: float = Field(3.0, gt=0, description="Passes over the training data; a fraction is allowed.")
    learning_rate: float = Field(5e-5, gt=0, description="Peak learning rate of AdamW.")
    batch_size: int = Field(16, ge=1, description="Examples per forward and backward pass.")
    accumulate: int = Field(1, ge=1, description="Passes per optimizer step (gradient accumulation).")
    schedule: Literal["linear", "cosine", "constant"] = Field("linear", description="Learning rate after the warm-up.")
    warmup: float = Field(0.03, ge=0, lt=1, description="Share of the steps over which the learning rate rises to its peak.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay (not on biases and norms).")
    clip: float = Field(1.0, ge=0, description="Largest gradient norm per step; 0 does not clip.")
    precision: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Autocast precision of the passes; weights stay in float32.")
    gradient_checkpointing: bool = Field(False, description="Recompute each block in the backward pass instead of keeping its activations.")
    seed: int = Field(0, ge=0, description="Seed of initial weights, order of the data, dropout and token selection.")
    pooling: Literal["auto", "model", "mean"] = Field(
        "auto",
        description="Classification: the model's own pooling, or the mean of the token states (recorded in the model's config). auto is mean with token selection.",
    )


class SelectionSettings(Settings):
    """Token selection."""

    selected_tokens: float = Field(
        16.0, gt=0, description="k: positions per example that are trained through; a number of tokens, or below 1 a share of the example's length."
    )


class LoraSettings(Settings):
    """LoRA."""

    lora_rank: int = Field(8, ge=1, description="Rank r of the adapters.")
    lora_alpha: float = Field(16.0, gt=0, description="Adapters are scaled by alpha / r.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapters.")
    lora_targets: list[str] = Field(
        default_factory=list, description="Names of the adapted linear modules (last part of the name); default: all of attention and MLP."
    )
    merge: bool = Field(True, description="Also save the model with the adapters merged in, so that the folder loads like any other.")
    four_bit: bool = Field(False, description="QLoRA: load the base model in 4 bits (bitsandbytes and a CUDA GPU).")


class EvaluationSettings(Settings):
    """Evaluation split and checkpoints."""

    eval_data: Path | None = Field(None, description="File of held-out examples, in the same format as the training data.")
    eval_share: float = Field(0.0, ge=0, lt=1, description="Share of the training data held out instead, drawn with the seed.")
    eval_every: int | None = Field(None, ge=1, description="Steps between evaluations; default: at every checkpoint.")
    patience: int = Field(0, ge=0, description="Stop after this many evaluations without improvement; 0 never stops early. The best model is kept.")
    save_every: int | None = Field(None, ge=1, description="Steps between checkpoints; default: at every evaluation if that is set, else once an epoch.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept while training runs; the best one is kept besides.")
    log_json: bool = Field(False, description="Write progress as JSON lines on standard error instead of a display.")
    resume: bool = Field(False, description="Continue from the newest whole checkpoint in the output folder.")


class NewModelSettings(Settings):
    """A new model."""

    new: Literal["gpt2"] | None = Field(None, description="Start from a fresh model of this kind instead of --model; its size follows.")
    layers: int = Field(4, ge=1, description="Blocks of a fresh model.")
    width: int = Field(128, ge=1, description="Hidden width of a fresh model.")
    heads: int = Field(4, ge=1, description="Attention heads of a fresh model; they must divide the width.")
    vocabulary: int = Field(
        4096, ge=257, description="Largest vocabulary of the byte-level BPE tokenizer trained on the data for a fresh model without --tokenizer."
    )
    context: int = Field(256, ge=2, description="Longest sequence of a fresh model, in tokens.")


class FinetuneSettings(DataSettings, ModelSettings, NewModelSettings, TrainingSettings, SelectionSettings, LoraSettings, EvaluationSettings):
    """Every setting of `eogp finetune`."""

    @field_validator("adapters", "attribute_to")
    @classmethod
    def _no_adapters(cls, value: str | None) -> str | None:
        if value not in (None, "adapters"):
            raise ValueError("finetune makes its own adapters: merge existing ones into the model first")
        return value


SelectionMethods = ("token-selection", "lora+token-selection")
LoraMethods = ("lora", "lora+token-selection")
