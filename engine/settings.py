"""One source of settings: pydantic models are the table; flags, environment and docs are generated from their fields.

Precedence: flag > environment (EOGP_*) > configuration file (YAML or TOML) > default.
"""

from __future__ import annotations

import inspect
import tomllib
import types
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
import yaml
from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from engine.errors import SettingError

ENV_PREFIX = "EOGP_"
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
S = TypeVar("S", bound="Settings")


def parse_bytes(value: Any) -> Any:
    """'1GB', '512 MB' or a number of bytes -> int; decimal units (1 KB = 1,000 bytes)."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    digits = text.rstrip("kmgtb").strip()
    unit = text[len(digits) :].strip()
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError):
        raise ValueError(f"{value!r} is not a size; write a number of bytes, or for instance 512MB or 1GB") from None


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class Settings(BaseSettings):
    """Base of every table of settings. A field's description is its help text, its documentation, and must exist."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", validate_default=True, frozen=True, env_parse_none_str="none")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # resolve() reads the environment, so that it can say where a value came from

    @classmethod
    def resolve(cls: type[S], flags: dict[str, Any] | None = None, file: Path | None = None, written: dict[str, Any] | None = None) -> S:
        """Flags over environment over file over defaults; `written`: the file's settings where they are read already. Raises SettingError naming the field and
        where it came from."""
        flags = {k: v for k, v in (flags or {}).items() if v is not None}
        if written is None:
            written = read_config(file) if file else {}
        unknown = sorted(set(written) - set(cls.model_fields))
        if unknown:
            raise SettingError(f"{file}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(cls.model_fields))}", field=unknown[0])
        try:
            from_env = _Environment(cls)()
            return cls(**{**written, **from_env, **flags})
        except ValidationError as e:
            first = e.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            origin = (
                "--" + name.replace("_", "-")
                if name in flags
                else f"{ENV_PREFIX}{name.upper()}"
                if name in from_env
                else f"{name} in {file}"
                if name in written
                else name
            )
            raise SettingError(f"{origin or 'settings'}: {first['msg'].removeprefix('Value error, ')}", field=name or None) from None


def _inner(annotation: Any) -> Any:
    """The type of a field without Optional and Annotated."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            rest = [a for a in get_args(annotation) if a is not type(None)]
            if len(rest) != 1:
                return str
            annotation = rest[0]
        else:
            return annotation


class _Environment(EnvSettingsSource):
    """EOGP_* variables; a list may be written a,b,c or as JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
            return [part.strip() for part in value.split(",") if part.strip()]
        return super().decode_complex_value(field_name, field, value)


def read_config(path: Path) -> dict[str, Any]:
    """A flat mapping of settings from YAML or TOML. Raises SettingError naming file and line."""
    if not path.is_file():
        raise SettingError(f"configuration file {path} does not exist", field="config")
    text = path.read_text(encoding="utf-8")
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as e:
        raise SettingError(f"configuration file {path}: {str(e).splitlines()[0]}", field="config") from None
    if not isinstance(data or {}, dict):
        raise SettingError(f"configuration file {path} must be a mapping of setting to value", field="config")
    return {str(k).replace("-", "_"): v for k, v in (data or {}).items()}


def options(settings: type[Settings]) -> Iterator[inspect.Parameter]:
    """One Typer option per field: --field-name, with the field's description and default as help."""
    for name, info in settings.model_fields.items():
        kind = _inner(info.annotation)
        flag = "--" + name.replace("_", "-")
        annotation: Any = str
        declared = [flag]
        choices = ""
        if kind is bool:
            annotation = bool
            declared = [f"{flag}/--no-{flag[2:]}"]
        elif get_origin(kind) in (list, tuple):
            annotation = list[str]
        elif get_origin(kind) is Literal:
            choices = f" [{'|'.join(map(str, get_args(kind)))}]"
        default = info.get_default(call_default_factory=True)
        shown = "" if default is None or default == "" else f" (default: {default})"
        option = typer.Option(*declared, help=f"{info.description}{choices}{shown}", show_default=False, rich_help_panel=panel_of(settings, name))
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option])


def panel_of(settings: type[Settings], name: str) -> str:
    """The heading under which a field is listed: the docstring's first line of the table that declares it."""
    owner = next(c for c in reversed(settings.__mro__) if name in inspect.get_annotations(c))
    return (owner.__doc__ or owner.__name__).strip().splitlines()[0].rstrip(".")


def with_settings(settings: type[S]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Give a Typer command one option per field, plus --config; the function receives `settings=` resolved and validated."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "settings"]
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None, typer.Option("--config", help="YAML or TOML file of settings; flags and environment win over it.", show_default=False)
            ],
        )
        generated = list(options(settings))

        @wraps(function)
        def command(*args: Any, config: Path | None = None, **kwargs: Any) -> None:
            flags = {p.name: kwargs.pop(p.name, None) for p in generated}
            flags = {k: (v if v != [] else None) for k, v in flags.items()}
            function(*args, settings=settings.resolve(flags, config), **kwargs)

        command.__signature__ = inspect.Signature([*own, config, *generated])  # type: ignore[attr-defined]  # Typer reads it; functions declare no such attribute
        del command.__wrapped__  # else Typer would look through to the undecorated function
        command.__annotations__ = {p.name: p.annotation for p in [*own, config, *generated]}
        return command

    return decorate


class ModelSettings(Settings):
    """Model."""

    model: str | None = Field(None, description="Model folder, hub id, or GGUF file.")
    tokenizer: str | None = Field(None, description="Tokenizer folder or hub id, where it is not beside the model.")
    adapters: str | None = Field(None, description="PEFT adapter folder loaded on top of the model.")
    attribute_to: Literal["adapters", "base"] = Field("adapters", description="With adapters loaded: which weights are tracked.")
    task: Literal["auto", "causal-lm", "sequence-classification"] = Field("auto", description="What the model does; auto reads its configuration.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N. auto takes a GPU where there is one.")
    device_map: str | None = Field(
        None,
        description="Spread a model that is larger than one device: auto, balanced, sequential, or a JSON file of module: GPU number, cpu or disk.",
    )
    max_memory: list[str] = Field(default_factory=list, description="With --device-map: the most that a device may hold, e.g. 0=20GB or cpu=60GB; repeat it.")
    offload_folder: Path | None = Field(None, description="With --device-map: where weights go that are kept on disk.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Precision of the model; auto is float32 on CPU and checked against float32 on GPU."
    )
    trust_remote_code: bool = Field(False, description="Run modelling code that comes with the model. Only for models that you trust.")
    threads: int = Field(0, ge=0, description="CPU threads; 0 keeps the default of the libraries. Fixed for a whole run, as bit-identical resumption needs.")


class FitSettings(Settings):
    """Curvature."""

    fit_examples: int = Field(4096, ge=1, description="Examples that the EK-FAC curvature is fitted on (at most all).")
    damping: float = Field(0.1, gt=0, description="c in lambda_u = c * mean(Lambda_u), equation (31).")
    fit_memory: Bytes | None = Field(
        None, description="Memory for factors and corrected eigenvalues while fitting, e.g. 20GB; default: what model and activations leave free."
    )
    seed: int = Field(0, ge=0, description="Seed of samples, sampled labels, rotation and SRHT.")
    batch_tokens: int = Field(4096, ge=1, description="Padded tokens per batch of the model's forward and backward pass.")


class SketchSettings(Settings):
    """Sketch."""

    method: Literal["default", "paper", "eogp", "eogp-r"] = Field(
        "default",
        description="default picks blocks, bits and stage-1 width from the two budgets; paper is the paper's configuration; eogp (PCA) and eogp-r (SRHT) take what is set below.",
    )
    bytes_per_example: int = Field(256, ge=3, description="Sketch bytes stored per example (codes and scales).")
    projection_bytes: Bytes = Field(10**9, description="Cap on the size of the projection P, e.g. 1GB; stage 1 is narrowed to fit.")
    blocks: Literal["module", "layer", "model"] | None = Field(None, description="Modules that share one PCA, bit string and scale.")
    k: int | None = Field(None, ge=1, description="Bits per block.")
    m: int | None = Field(None, ge=1, description="Stage-1 coordinates per module.")
    rotate: bool | None = Field(None, description="Rotate each block by a seeded random orthogonal matrix before taking signs.")
    scale: Literal["l1", "unbiased"] | None = Field(None, description="Scale of equation (13), or the unbiased one for rotated blocks.")
    pca_examples: int = Field(8192, ge=2, description="Examples that the PCA is fitted on (at most all).")
