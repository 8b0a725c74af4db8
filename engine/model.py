"""Load a model so that its gradients can be trusted: evaluation mode, one dtype, one attention kernel, a fingerprint."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from engine.attention import choose_attention
from engine.errors import ModelError
from engine.experts import split_experts
from engine.head import head_separates
from engine.modules import bare, evaluation_mode
from engine.placement import device_of, kept_elsewhere, placement
from engine.placement import tensors as named_tensors
from engine.pooling import classifier_class
from engine.settings import ModelSettings

Task = Literal["causal-lm", "sequence-classification"]
_STRIDED = 4096
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert"}  # positions start behind the pad id


@dataclass
class LoadedModel:
    """A model ready for gradients.

    dtype: of weights, activations and output gradients. max_length: the model's context in tokens. fingerprint: JSON-able; tensor names, shapes
    and a hash of 4,096 strided values of each, adapters included, and the tokenizer's hash. attention: the kernel whose results do not depend on
    padding. call_options: keyword arguments of every forward call. adapters_tracked: attribution goes to the adapters. kept_elsewhere: some
    weights are in main memory or on disk, and on their device only while they are used.
    """

    model: Any
    tokenizer: Any
    task: Task
    device: torch.device
    dtype: torch.dtype
    source: str
    max_length: int
    pad_id: int
    vocab_size: int
    fingerprint: dict[str, Any]
    attention: str
    separable_head: bool = False
    has_adapters: bool = False
    adapters_tracked: bool = False
    kept_elsewhere: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def call_options(self) -> dict[str, Any]:
        return {"use_cache": False} if self.task == "causal-lm" else {}


def from_parts(
    model: Any,
    tokenizer: Any = None,
    device: torch.device | str = "cpu",
    *,
    source: str = "in memory",
    attribute_to: str = "adapters",
) -> LoadedModel:
    """Wrap a model that is already in memory. It is put into evaluation mode on `device` and its weights stop requiring gradients.

    Raises ModelError for a regression head, or adapters that are not LoRA while attribution goes to adapters.
    """
    inner = bare(model)
    config = inner.config.get_text_config() if hasattr(inner.config, "get_text_config") else inner.config
    has_adapters = hasattr(model, "peft_config")
    adapters_tracked = has_adapters and attribute_to == "adapters"
    if any(getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", False) for p in inner.parameters()):
        raise ModelError(f"{source}: the 4-bit weights are packed for inference on a CPU and have no gradient; load the model anew", field="model")
    if has_adapters:
        _check_adapters(model.peft_config, adapters_tracked, source)
    if not hasattr(model, "hf_device_map") and not getattr(inner, "is_quantized", False):
        model.to(device)
    evaluation_mode(model)
    model.requires_grad_(False)
    task: Task = "causal-lm" if _generates(inner) else "sequence-classification"
    if task == "sequence-classification" and inner.config.num_labels < 2:
        raise ModelError(f"{source}: the classification head has {inner.config.num_labels} output; attribution needs two classes or more")
    attention = choose_attention(inner)
    if split_experts(inner) and kept_elsewhere(inner):
        raise ModelError(
            f"{source}: experts fused into one tensor cannot be kept in main memory or on disk; let --device-map hold them on GPUs", field="device_map"
        )
    pad = _pad_id(tokenizer, config)
    if task == "sequence-classification" and getattr(inner.config, "pad_token_id", None) is None:
        inner.config.pad_token_id = pad
    first, place = inner.get_input_embeddings().weight, device_of(inner.get_input_embeddings())
    notes = []
    if tokenizer is not None and len(tokenizer) > first.shape[0]:
        notes.append(f"the tokenizer has {len(tokenizer)} tokens and the model {first.shape[0]}: examples that use the others are refused by name")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        task=task,
        device=place,
        dtype=next(p.dtype for p in inner.parameters() if p.is_floating_point()),
        source=source,
        max_length=_context(config, tokenizer),
        pad_id=pad,
        vocab_size=int(first.shape[0]),
        fingerprint=fingerprint(model, tokenizer),
        attention=attention,
        separable_head=task == "causal-lm" and head_separates(inner, place),
        has_adapters=has_adapters,
        adapters_tracked=adapters_tracked,
        kept_elsewhere=kept_elsewhere(inner),
        notes=notes,
    )


def load_model(settings: ModelSettings, *, source: str | None = None, check_dtype: bool = True) -> LoadedModel:
    """Load a folder, hub id or GGUF file with its tokenizer and adapters.

    check_dtype: compare the gradients of a 16-bit model with float32 (engine.dtype_check); off where a store records that this was done.
    Raises ModelError with one sentence: what could not be loaded and what to do.
    """
    name = source or settings.model
    if not name:
        raise ModelError("no model: give --model FOLDER, a hub id, or a GGUF file", field="model")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = _device(settings.device)
    path = Path(name)
    where: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    spread = placement(settings)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"model file {name} does not exist", field="model")
        folder, where["gguf_file"] = str(path.parent), path.name
    else:
        folder = name
    try:
        config = AutoConfig.from_pretrained(folder, **where)
    except Exception as e:
        raise ModelError(f"cannot load a model from {name}: {_first_line(e)}", field="model") from e
    task = _task(settings, config)
    dtype = _wanted_dtype(settings, config, device)
    auto = AutoModelForCausalLM if task == "causal-lm" else classifier_class(config, AutoModelForSequenceClassification)
    try:
        model = auto.from_pretrained(folder, dtype=dtype, **spread, **where)
    except ImportError as e:
        raise ModelError(f"cannot load {name}: {_first_line(e)}", field="model") from e
    except Exception as e:
        raise ModelError(f"cannot load the weights of {name}: {_first_line(e)}", field="model") from e
    if "gguf_file" in where:
        _forget_quantisation(model)
    tokenizer = _tokenizer(settings, folder, where)
    if settings.adapters:
        model = _with_adapters(model, settings.adapters)
    loaded = from_parts(model, tokenizer, device, source=name, attribute_to=settings.attribute_to)
    if check_dtype:
        from engine.dtype_check import settle_dtype  # which itself needs this module

        loaded = settle_dtype(loaded, asked_for=settings.dtype != "auto")
    return loaded


def fingerprint(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What a store remembers of its model. Values are compared in float32, so that a move between devices keeps the fingerprint."""
    tensors: dict[str, Any] = {}
    for name, tensor in named_tensors(model):
        flat = tensor.reshape(-1)
        step = max(1, -(-flat.numel() // _STRIDED))
        sample = flat[::step].to("cpu")
        sample = sample.float() if sample.is_floating_point() else sample
        tensors[name] = [list(tensor.shape), hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]]
    dtype = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
    return {"class": type(bare(model)).__name__, "dtype": dtype, "tensors": tensors, "tokenizer": tokenizer_hash(tokenizer)}


def fingerprint_mismatch(stored: dict[str, Any], found: dict[str, Any]) -> str | None:
    """None where the models are the same; else one clause that names the first difference."""
    for key in ("class", "dtype"):
        if stored.get(key) != found.get(key):
            return f"{key} {stored.get(key)} against {found.get(key)}"
    a, b = stored["tensors"], found["tensors"]
    for name in sorted(set(a) | set(b)):
        if name not in a or name not in b:
            return f"tensor {name} is only in {'the loaded model' if name not in a else 'the stored model'}"
        if list(a[name][0]) != list(b[name][0]):
            return f"tensor {name} has shape {tuple(a[name][0])} against {tuple(b[name][0])}"
        if a[name][1] != b[name][1]:
            return f"tensor {name} has other values"
    if stored.get("tokenizer") != found.get("tokenizer"):
        return "another tokenizer"
    return None


def tokenizer_hash(tokenizer: Any) -> str | None:
    """SHA-256 of the tokenizer's serialised form and chat template; None without a tokenizer."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    if backend is not None:
        state = json.loads(text)
        state["padding"] = state["truncation"] = None  # set by calls, not part of what the tokenizer is
        text = json.dumps(state, sort_keys=True)
    return hashlib.sha256((text + repr(getattr(tokenizer, "chat_template", None))).encode()).hexdigest()


def _generates(model: Any) -> bool:
    name = type(model).__name__
    return "SequenceClassification" not in name and model.get_output_embeddings() is not None


def _pad_id(tokenizer: Any, config: Any) -> int:
    """Padding is masked, so any id of the vocabulary serves where a tokenizer has no pad token."""
    for holder in (tokenizer, config):
        for attribute in ("pad_token_id", "eos_token_id"):
            value = getattr(holder, attribute, None) if holder is not None else None
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and 0 <= value < int(getattr(config, "vocab_size", value + 1)):
                return value
    return 0


def _context(config: Any, tokenizer: Any) -> int:
    found = [int(v) for name in _POSITIONS if isinstance(v := getattr(config, name, None), int) and v > 0][:1]
    if found and config.model_type in _OFFSET_POSITIONS:
        found[0] -= int(config.pad_token_id or 0) + 1
    limit = getattr(tokenizer, "model_max_length", None)
    if isinstance(limit, int) and 0 < limit < 10**7:
        found.append(limit)
    return min(found, default=2048)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"{name!r} is not a device; use auto, cpu, cuda or cuda:N", field="device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name} was asked for, and no GPU is visible; use --device cpu", field="device")
    return device


def _task(settings: ModelSettings, config: Any) -> Task:
    if settings.task != "auto":
        return settings.task
    kinds = getattr(config, "architectures", None) or []
    return "sequence-classification" if any("SequenceClassification" in kind for kind in kinds) else "causal-lm"


def _wanted_dtype(settings: ModelSettings, config: Any, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    stored = getattr(config, "dtype", None)
    return stored if device.type != "cpu" and isinstance(stored, torch.dtype) else torch.float32


def _forget_quantisation(model: Any) -> None:
    """A GGUF file is dequantised on loading; what is left of the quantiser would refuse saving."""
    for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "is_quantized"), (model, "quantization_method")):
        if hasattr(holder, name):
            delattr(holder, name)


def _tokenizer(settings: ModelSettings, folder: str, where: dict[str, Any]) -> Any:
    own = settings.tokenizer
    missing = f"cannot load a tokenizer from {own}" if own else f"no tokenizer beside the model in {folder}; name one with --tokenizer"
    try:
        found = AutoTokenizer.from_pretrained(own, trust_remote_code=settings.trust_remote_code) if own else AutoTokenizer.from_pretrained(folder, **where)
        empty = not found("a b", add_special_tokens=False)["input_ids"]  # some classes come up without a vocabulary where their files are missing
    except Exception as e:
        raise ModelError(f"{missing} ({_first_line(e)})", field="tokenizer") from e
    if empty:
        raise ModelError(f"{missing} (its vocabulary is empty)", field="tokenizer")
    return found


def _with_adapters(model: Any, adapters: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError:
        raise ModelError("loading adapters needs the package peft: pip install 'eogp[peft]'", field="adapters") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft reads attributes that transformers is about to rename
            return PeftModel.from_pretrained(model, adapters)
    except Exception as e:
        raise ModelError(f"cannot load adapters from {adapters}: {_first_line(e)}", field="adapters") from e


def _check_adapters(configs: dict[str, Any], tracked: bool, source: str) -> None:
    """Refuse adapters whose gradient is not that of linear layers, and prompts, which the base model alone does not see."""
    for name, config in configs.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "is_prompt_learning", False):
            raise ModelError(f"{source}: adapter {name!r} of kind {kind} prepends learned prompts, which cannot be attributed; use LoRA", field="adapters")
        if tracked and kind != "LORA":
            raise ModelError(f"{source}: adapters of kind {kind} (adapter {name!r}) are not linear layers; use LoRA, or --attribute-to base", field="adapters")
        if tracked and getattr(config, "use_dora", False):
            raise ModelError(f"{source}: adapter {name!r} is DoRA, whose magnitudes are not linear; use LoRA, or --attribute-to base", field="adapters")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
