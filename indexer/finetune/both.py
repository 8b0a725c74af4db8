"""`eogp run config.yaml`: fine-tune and index in one go, from one file.

out: my-model            # folder of the trained model
store: my-store          # folder of the store
data: train.jsonl        # any setting that both know, given once
finetune: {model: base-model, method: lora, epochs: 2}
index: {bytes_per_example: 256}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import SettingError
from engine.settings import read_config
from indexer.finetune.checkpoints import RECORD
from indexer.finetune.models import folder_exists
from indexer.finetune.run import NOT_COMPARED, finetune
from indexer.finetune.settings import FinetuneSettings, LoraMethods
from indexer.index import index
from indexer.reporter import Reporter
from indexer.settings import IndexSettings

PATHS, SECTIONS = ("out", "store"), ("finetune", "index")
FROM_TRAINING = ("model", "adapters", "task", "tokenizer")  # what the index takes from the trained model


def run(config: Path) -> dict[str, Any]:
    """Train, unless the model is finished; then index it, or go on with an interrupted run of either. Returns the index's report. Raises SettingError, both
    parts being checked before work starts."""
    out, store, training, indexing = parse(config)
    reporter = Reporter(log_json=training.log_json)
    if (out / "finetune.json").exists():
        require_same(out, training)
        reporter.say(f"model      {out} is trained already")
    else:
        resume = (out / "checkpoints" / RECORD).exists()
        finetune(out, training.model_copy(update={"resume": resume}), reporter)
    return index(store, indexing, reporter)


def parse(config: Path) -> tuple[Path, Path, FinetuneSettings, IndexSettings]:
    """out, store and the settings of both parts. Raises SettingError naming what is missing or unknown."""
    written = read_config(config)
    for name in PATHS:
        if not isinstance(written.get(name), str):
            raise SettingError(f"{config}: {name!r} must name a folder", field=name)
    sections = {name: _section(config, name, written.get(name) or {}) for name in SECTIONS}
    shared = {k: v for k, v in written.items() if k not in (*PATHS, *SECTIONS)}
    for name in shared:
        if name not in FinetuneSettings.model_fields or name not in IndexSettings.model_fields:
            raise SettingError(f"{config}: {name!r} is not a setting that both parts know; put it under finetune: or index:", field=name)
    for name in FROM_TRAINING:
        if name in sections["index"] or name in shared:
            raise SettingError(f"{config}: {name!r} belongs under finetune: alone; the index takes it from the trained model", field=name)
    out, store = Path(written["out"]), Path(written["store"])
    training = FinetuneSettings.resolve(file=config, written=_lists(shared | sections["finetune"]))
    indexing = IndexSettings.resolve(flags={**trained(out, training)}, file=config, written=_lists(shared | sections["index"]))
    return out, store, training, indexing


def trained(out: Path, training: FinetuneSettings) -> dict[str, Any]:
    """What the index loads: the folder; with adapters that were not merged, the base model and the adapters."""
    if training.method in LoraMethods and (training.four_bit or not training.merge):
        return {"model": training.model, "tokenizer": training.tokenizer, "adapters": str(out / "adapters")}
    return {"model": str(out)}


def require_same(out: Path, training: FinetuneSettings) -> None:
    """Raises SettingError when the finished model in `out` was trained with other settings."""
    before = json.loads((out / "finetune.json").read_text(encoding="utf-8"))
    for name, value in training.model_dump(mode="json").items():
        if name not in NOT_COMPARED and before.get(f"setting {name}") != value:
            raise SettingError(
                f"{out} was trained with {name} {before.get(f'setting {name}')!r}, and the file says {value!r}; choose another folder", field=name
            )
    if not folder_exists(out):
        raise SettingError(f"{out} has a record of training but no model; choose another folder", field="out")


def _section(config: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingError(f"{config}: {name!r} must be a mapping of settings", field=name)
    return {str(k).replace("-", "_"): v for k, v in value.items()}


def _lists(values: dict[str, Any]) -> dict[str, Any]:
    """One file may be written without the brackets of a list."""
    return {k: [v] if k in ("data", "lora_targets") and isinstance(v, str) else v for k, v in values.items()}
