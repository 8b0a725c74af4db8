"""Retraining from the base model on part of the data, and what it does to the queries' losses. Outcomes are cached: each set is trained on once."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import SettingError
from engine.example import Example, collate, plan_batches
from engine.model import LoadedModel, load_model
from engine.settings import ModelSettings
from indexer.evaluate.settings import EvaluateSettings
from indexer.finetune.data import IGNORED, LengthSortedBatches, next_labels

RECORD = "finetune.json"


@dataclass(frozen=True)
class Recipe:
    """How a subset is trained on: AdamW, linear warm-up and decay, the loss a mean over the batch's target tokens, every weight trained."""

    base: str
    epochs: float = 3.0
    learning_rate: float = 5e-5
    batch_size: int = 16
    warmup: float = 0.03
    weight_decay: float = 0.0
    clip: float = 1.0


def read_recipe(model: str, settings: EvaluateSettings) -> Recipe:
    """The recipe in the model's finetune.json, what the settings say first. Raises SettingError where the base model is unknown or the method is not `full`."""
    path = Path(model) / RECORD
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    recorded = {key.removeprefix("setting "): value for key, value in record.items() if key.startswith("setting ")}
    if recorded.get("method", "full") != "full":
        raise SettingError(
            f"{model} was fine-tuned with {recorded['method']}, and retraining trains every weight; lds and qld would measure another training", field="metrics"
        )
    base = settings.base_model or recorded.get("model")
    if base is None:
        raise SettingError("lds and qld retrain from the model that the fine-tuning started from; name it with --base-model", field="base_model")
    chosen = {"epochs": settings.epochs, "learning_rate": settings.learning_rate, "batch_size": settings.batch_size}
    names = ("epochs", "learning_rate", "batch_size", "warmup", "weight_decay", "clip")
    values = {name: recorded[name] for name in names if name in recorded} | {name: v for name, v in chosen.items() if v is not None}
    return Recipe(str(base), **values)


class Retrainer:
    """Outcomes of training the base on subsets of `examples`, measured on `queries`; cached in `folder`/outcomes-KEY.npz."""

    def __init__(
        self,
        base: LoadedModel,
        recipe: Recipe,
        examples: Sequence[Example],
        queries: Sequence[Example],
        folder: Path,
        *,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.base, self.recipe, self.examples, self.queries, self.progress = base, recipe, list(examples), list(queries), progress
        self.key = key_of(base, recipe, self.examples, self.queries)
        self.path = folder / f"outcomes-{self.key[:16]}.npz"
        self.known: dict[str, NDArray[np.float32]] = {}
        if self.path.exists():
            with np.load(self.path, allow_pickle=False) as stored:
                self.known = dict(zip(stored["sets"].tolist(), stored["losses"], strict=True))

    @classmethod
    def load(cls, settings: EvaluateSettings, recipe: Recipe, examples: Sequence[Example], queries: Sequence[Example], **kwargs: Any) -> Retrainer:
        """With the base model from disk."""
        base = load_model(
            ModelSettings(
                model=recipe.base, tokenizer=settings.tokenizer, device=settings.device, dtype="float32", trust_remote_code=settings.trust_remote_code
            )
        )
        return cls(base, recipe, examples, queries, settings.out, **kwargs)

    def losses(self, members: NDArray[np.int64], seed: int) -> NDArray[np.float32]:
        """(Q,) token-summed query losses after training on the examples at `members`."""
        digest = hashlib.sha256(np.sort(members).astype("<i8").tobytes() + seed.to_bytes(8, "little")).hexdigest()
        if digest not in self.known:
            model = self.train(np.sort(members), seed)
            self.known[digest] = query_losses(model, self.queries)
            self._save()
            self.progress(f"retrained on {len(members):,} examples, seed {seed}: {len(self.known):,} outcomes in {self.path}")
        return self.known[digest]

    def train(self, members: NDArray[np.int64], seed: int) -> LoadedModel:
        """The base model trained on some of the examples."""
        r = self.recipe
        loaded = copy.copy(self.base)
        loaded.model = copy.deepcopy(self.base.model)
        chosen = [self.examples[i] for i in members]
        sampler = LengthSortedBatches([len(e) for e in chosen], r.batch_size, seed)
        steps = max(1, int(len(sampler) * r.epochs + 0.5))
        warm = math.ceil(r.warmup * steps)
        loaded.model.requires_grad_(True)
        optimiser = optimiser_of(loaded.model, r.learning_rate, r.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: min((s + 1) / warm if s < warm else 1.0, (steps - s) / max(1, steps - warm)))
        torch.manual_seed(seed)
        loaded.model.train()
        for step in range(steps):
            sampler.epoch, place = divmod(step, len(sampler))
            if place == 0:
                order = list(sampler)
            training_loss(loaded, [chosen[i] for i in order[place]]).backward()
            if r.clip:
                torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), r.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            schedule.step()
        loaded.model.eval().requires_grad_(False)
        return loaded

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part.npz")
        np.savez_compressed(part, sets=np.array(list(self.known)), losses=np.stack(list(self.known.values())))
        part.replace(self.path)


def optimiser_of(model: Any, learning_rate: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    parameters = list({id(p): p for p in model.parameters()}.values())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate)


def training_loss(loaded: LoadedModel, examples: Sequence[Example]) -> torch.Tensor:
    """Mean cross-entropy over the target tokens (or classes) of a batch, with a graph."""
    batch = collate(examples, range(len(examples)), loaded.pad_id, loaded.device)
    logits = loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    if batch.classification:
        return torch.nn.functional.cross_entropy(logits, batch.labels)
    labels = next_labels(batch.labels, batch.target_mask)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def query_losses(loaded: LoadedModel, queries: Sequence[Example], batch_tokens: int = 4096) -> NDArray[np.float32]:
    """(Q,) float32: token-summed loss of each query, in evaluation mode."""
    found = np.zeros(len(queries), np.float32)
    loaded.model.eval()
    with torch.no_grad():
        for chosen in plan_batches([len(q) for q in queries], batch_tokens):
            batch = collate([queries[i] for i in chosen], chosen, loaded.pad_id, loaded.device)
            logits = loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()
            if batch.classification:
                each = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none")
            else:
                labels = next_labels(batch.labels, batch.target_mask)
                each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none").sum(1)
            found[chosen] = each.cpu().numpy()
    return found


def tail_patch(loaded: LoadedModel, examples: Sequence[Example], query: Example, learning_rate: float) -> float:
    """Fall of the query's loss after one AdamW step from the model as it is on the given examples; positive: they teach it. The model is left as it was."""
    before = query_losses(loaded, [query])[0]
    patched = copy.copy(loaded)
    patched.model = copy.deepcopy(loaded.model)
    patched.model.requires_grad_(True)
    optimiser = optimiser_of(patched.model, learning_rate)
    training_loss(patched, examples).backward()
    optimiser.step()
    return float(before - query_losses(patched, [query])[0])


def key_of(base: LoadedModel, recipe: Recipe, examples: Sequence[Example], queries: Sequence[Example]) -> str:
    """Hash of data, base model and settings; the path of the base model is not part of it."""
    digest = hashlib.sha256(json.dumps({**asdict(recipe), "base": base.fingerprint}, sort_keys=True, default=str).encode())
    for part in (examples, queries):
        for e in part:
            labels = e.labels.to_bytes(8, "little", signed=True) if isinstance(e.labels, int) else np.ascontiguousarray(e.labels).tobytes()
            for field in (np.ascontiguousarray(e.input_ids).tobytes(), np.ascontiguousarray(e.target_mask).tobytes(), labels):
                digest.update(len(field).to_bytes(8, "little") + field)
        digest.update(b"|")
    return digest.hexdigest()
