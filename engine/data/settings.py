"""Settings of the data: where rows come from, what their fields are called, and what becomes of bad ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.settings import Bytes, Settings

DataKind = Literal["auto", "text", "completion", "messages", "tokens", "classification"]


class DataSettings(Settings):
    """Data."""

    data: list[str] = Field(
        default_factory=list,
        description="Files, globs, folders or hub ids: JSONL, JSON, CSV, Parquet, Arrow or a datasets folder; .gz and .zst are read too. Repeat the flag for several.",
    )
    data_format: Literal["auto", "jsonl", "json", "csv", "parquet", "arrow", "dataset"] = Field(
        "auto", description="Format of the data; auto goes by the name."
    )
    data_split: str = Field("train", description="Split read from a datasets folder or hub id.")
    kind: DataKind = Field("auto", description="What a row is; auto goes by the fields that the first row has.")
    text_field: str = Field("text", description="Field of a text (causal LM on all tokens, or the input of a classifier).")
    prompt_field: str = Field("prompt", description="Field of a prompt, which carries no loss.")
    completion_field: str = Field("completion", description="Field of a completion, which carries the loss.")
    messages_field: str = Field("messages", description="Field of a chat: a list of {role, content}; assistant turns carry the loss.")
    input_ids_field: str = Field("input_ids", description="Field of token ids already made.")
    labels_field: str = Field("labels", description="Field of labels beside the token ids; -100 marks tokens without loss.")
    label_field: str = Field("label", description="Field of the class of a text (sequence classification): a number or a name that the model knows.")
    id_field: str = Field("auto", description="Field of a row's id. auto: `id` where the first row has it, else a running number that is never reused.")
    max_length: int | None = Field(
        None, ge=2, description="Longest example in tokens; default: the model's context, at most 2,048. Longer ones are truncated and marked."
    )
    append_eos: bool = Field(True, description="Append the end-of-sequence token to training completions (never to queries).")
    chat_fallback: Literal["refuse", "roles"] = Field(
        "refuse", description="For chats when the tokenizer has no chat template: refuse them, or write each turn as a line `role: content`."
    )
    on_error: Literal["skip", "fail"] = Field("skip", description="Bad rows: skip them and list them in the report, or stop at the first one.")
    max_row_bytes: Bytes = Field(4_000_000, ge=1, description="A line longer than this is a bad row, e.g. 4MB.")
