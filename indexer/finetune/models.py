"""The model that is trained: loaded or fresh, with a classification head, LoRA adapters, 4-bit weights or mean pooling where asked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from engine.data.reading import Row
from engine.data.settings import DataSettings
from engine.errors import DataError, ModelError, SettingError
from engine.pooling import MEAN, classifier_class
from engine.settings import ModelSettings
from indexer.finetune.settings import FinetuneSettings, LoraMethods, SelectionMethods

EOS, PAD = "<|endoftext|>", "<|pad|>"


def row_texts(rows: Iterable[Row], settings: DataSettings) -> Iterator[str]:
    """The strings of each row's text, prompt, completion and messages: what a tokenizer is trained on."""
    for row in rows:
        for name in (settings.text_field, settings.prompt_field, settings.completion_field):
            if isinstance(row.values.get(name), str):
                yield row.values[name]
        messages = row.values.get(settings.messages_field)
        for turn in messages if isinstance(messages, list) else []:
            if isinstance(turn, dict) and isinstance(turn.get("content"), str):
                yield turn["content"]


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, the 256 bytes and two special tokens included. Raises DataError without any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    texts = list(texts)
    if not any(texts):
        raise DataError("the data has no text to train a tokenizer on; give one with --tokenizer", field="tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[EOS, PAD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, unk_token=EOS, pad_token=PAD, model_max_length=context)


def load_tokenizer(source: str, *, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    """A fast tokenizer from a folder or hub id. Raises ModelError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(f"{source}: no tokenizer can be loaded from it: {first_line(e)}", field="tokenizer") from None
    if not tokenizer.is_fast:
        raise ModelError(f"{source}: only tokenizers with character offsets (fast ones) are supported", field="tokenizer")
    return tokenizer


def fresh_gpt2(settings: FinetuneSettings, tokenizer: PreTrainedTokenizerFast) -> Any:
    """A GPT-2 with the tables' layers, width, heads and context, random weights from the seed, no dropout."""
    if settings.width % settings.heads:
        raise SettingError(f"width {settings.width} is not divisible by heads {settings.heads}", field="heads")
    torch.manual_seed(settings.seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=settings.context,
            n_embd=settings.width,
            n_layer=settings.layers,
            n_head=settings.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            use_cache=False,
        )
    )


def load_causal(settings: FinetuneSettings) -> tuple[Any, PreTrainedTokenizerFast]:
    """A causal LM in float32 with its tokenizer, as `eogp index` loads it."""
    if settings.four_bit:
        return load_four_bit(settings)
    from engine.model import load_model

    fields = {name: getattr(settings, name) for name in ModelSettings.model_fields}
    loaded = load_model(ModelSettings(**{**fields, "task": "causal-lm", "dtype": "float32"}))
    if loaded.tokenizer is None:
        raise ModelError(f"{settings.model}: no tokenizer beside the model; give one with --tokenizer", field="tokenizer")
    return loaded.model, loaded.tokenizer


def load_four_bit(settings: FinetuneSettings) -> tuple[Any, PreTrainedTokenizerFast]:
    """A causal LM with 4-bit weights on the GPU, and its tokenizer."""
    assert settings.model is not None
    tokenizer = load_tokenizer(settings.tokenizer or settings.model, trust_remote_code=settings.trust_remote_code)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, device_map={"": torch.cuda.current_device()}, trust_remote_code=settings.trust_remote_code, **four_bit(settings)
        )
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise ModelError(f"{settings.model}: cannot be loaded in 4 bits: {first_line(e)}", field="model") from None
    return model, tokenizer


def load_classifier(settings: FinetuneSettings, names: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Any:
    """A sequence classifier for the named classes. The model's own head is kept where it knows them all; else a fresh one is drawn from the seed."""
    assert settings.model is not None
    torch.manual_seed(settings.seed)
    verbosity = transformers_logging.get_verbosity()
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
        trained = any("SequenceClassification" in name for name in config.architectures or [])
        if not (trained and set(names) <= set(config.label2id)):
            config.id2label = dict(enumerate(names))
            config.label2id = {name: i for i, name in enumerate(names)}
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
        if pools_mean(settings, config):
            config.pooling = MEAN
        transformers_logging.set_verbosity_error()  # a fresh head is what was asked for, no reason to warn
        return classifier_class(config, AutoModelForSequenceClassification).from_pretrained(
            settings.model, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(f"{settings.model}: cannot be loaded as a sequence classifier: {first_line(e)}", field="model") from None
    finally:
        transformers_logging.set_verbosity(verbosity)


def pools_mean(settings: FinetuneSettings, config: Any) -> bool:
    """Whether a classifier pools the mean of the token states. Raises SettingError where token selection is asked for with another pooling."""
    selects = settings.method in SelectionMethods
    if selects and settings.pooling == "model":
        raise SettingError("token selection classifies by the mean of the selected states; use --pooling mean or auto", field="pooling")
    return selects or settings.pooling == "mean" or (settings.pooling == "auto" and getattr(config, "pooling", None) == MEAN)


def four_bit(settings: FinetuneSettings) -> dict[str, Any]:
    """Arguments of from_pretrained for 4-bit weights. Raises SettingError where bitsandbytes or a CUDA GPU is missing."""
    if not settings.four_bit:
        return {}
    if settings.method not in LoraMethods:
        raise SettingError("four_bit trains LoRA adapters on a quantised model: use it with method lora or lora+token-selection", field="four_bit")
    if not torch.cuda.is_available():
        raise SettingError("four_bit needs a CUDA GPU, and this machine has none; leave it off to train LoRA on the model as it is", field="four_bit")
    if find_spec("bitsandbytes") is None:
        raise SettingError("four_bit needs the package bitsandbytes: pip install bitsandbytes", field="four_bit")
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)}


def add_adapters(model: Any, settings: FinetuneSettings, task: str) -> Any:
    """The model with LoRA adapters (peft) on its attention and MLP layers, all else frozen but a classification head. Raises SettingError naming a target that does not exist."""
    if find_spec("peft") is None:
        raise SettingError("method lora needs the package peft: pip install 'eogp[peft]'", field="method")
    from peft import get_peft_model, prepare_model_for_kbit_training

    targets: list[str] = settings.lora_targets or block_linears(model)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for target in settings.lora_targets:
        if target not in names:
            raise SettingError(f"lora_targets: the model has no module {target!r}", field="lora_targets")
    if settings.four_bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=settings.gradient_checkpointing)
    torch.manual_seed(settings.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads attributes that transformers is about to rename
        return get_peft_model(model, lora_config(settings, task, targets, model))


def lora_config(settings: FinetuneSettings, task: str, targets: list[str], model: Any) -> Any:
    """peft's LoraConfig. A classification head is trained whole and saved beside the adapters."""
    from peft import LoraConfig, TaskType

    return LoraConfig(
        task_type=TaskType.CAUSAL_LM if task == "causal-lm" else TaskType.SEQ_CLS,
        r=settings.lora_rank,
        lora_alpha=int(settings.lora_alpha) if settings.lora_alpha == int(settings.lora_alpha) else settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )


def checkpoint_activations(model: Any) -> None:
    """Recompute blocks in the backward pass. Raises SettingError where the model cannot. (transformers 5.2x renamed the method.)"""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as e:
        raise SettingError(f"{type(model).__name__}: {first_line(e)}; leave --gradient-checkpointing off", field="gradient_checkpointing") from None
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            return
    raise SettingError(f"{type(model).__name__} has no blocks to checkpoint; leave --gradient-checkpointing off", field="gradient_checkpointing")


def block_linears(model: Any) -> list[str]:
    """Full names of the linear modules (nn.Linear, Conv1D) inside the model's numbered blocks."""
    found = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D") and any(part.isdigit() for part in name.split("."))
    ]
    if not found:
        raise ModelError(f"{type(model).__name__}: no linear modules inside numbered blocks to adapt; name some with --lora-targets")
    return found


def first_line(e: BaseException) -> str:
    """The first line of an exception's text."""
    return (str(e) or type(e).__name__).splitlines()[0]


def folder_exists(out: Path) -> bool:
    """Whether a folder holds a model already."""
    return (out / "config.json").exists() or (out / "adapters").exists()
