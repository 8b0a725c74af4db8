"""One run of `eogp evaluate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from engine.errors import SettingError
from engine.query import QueryEngine
from engine.settings import ModelSettings
from indexer.evaluate import measure, metrics, report
from indexer.evaluate.case import Case, open_case
from indexer.evaluate.measure import Figures
from indexer.evaluate.retrain import Recipe, Retrainer, read_recipe
from indexer.evaluate.scores import compute_scores
from indexer.evaluate.settings import EvaluateSettings


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check(settings: EvaluateSettings) -> None:
    """Contradictions between settings, before any work. Raises SettingError."""
    if "facts" in settings.metrics and settings.fact_field is None:
        raise SettingError("the metric facts needs --fact-field, the metadata field that names a fact", field="fact_field")
    if "fidelity" in settings.metrics and "ek-fac" not in settings.methods:
        raise SettingError("fidelity is measured against ek-fac; add it to --methods", field="methods")


def evaluate(path: Path, settings: EvaluateSettings) -> dict[str, Any]:
    """Measure what the settings ask for; print the table, write evaluation.json and evaluation.png, and return the record."""
    check(settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    explicit = ModelSettings(**{name: getattr(settings, name) for name in settings.model_fields_set if name in ModelSettings.model_fields})
    engine = QueryEngine.open(path, explicit)
    case = open_case(engine, settings)
    recipe = _recipe(engine, settings)
    retrainer = None
    if {"lds", "qld"} & set(settings.metrics):
        assert recipe is not None
        retrainer = Retrainer.load(settings, recipe, case.examples, case.queries, progress=say)
    began = time.perf_counter()
    scores = compute_scores(case, settings.methods, seed=settings.evaluation_seed)
    say(f"scores of {len(case.queries):,} queries against {len(case.examples):,} examples in {time.perf_counter() - began:.0f} s")
    figures, about = _figures(case, settings, scores, recipe, retrainer)
    bytes_of: dict[str, float] = {name: m.bytes for name, m in scores.items()}
    record = {
        "store": str(path),
        "generation": engine.store.generation,
        "sketch": engine.store.manifest.sketch.model_dump(mode="json"),
        "queries": len(case.queries),
        "examples": len(case.examples),
        "settings": settings.model_dump(mode="json"),
        "about": about,
        "methods": {name: {"bytes_per_example": bytes_of[name], **own} for name, own in figures.items()},
    }
    report.write_json(settings.out / "evaluation.json", record)
    report.print_table(figures, bytes_of, about)
    report.plot(settings.out / "evaluation.png", figures, bytes_of)
    say(f"wrote {settings.out / 'evaluation.json'} and evaluation.png")
    return record


def _recipe(engine: QueryEngine, settings: EvaluateSettings) -> Recipe | None:
    """How the model was trained, where a metric needs it."""
    source = engine.loaded.source
    if {"lds", "qld"} & set(settings.metrics):
        return read_recipe(source, settings)
    if "tail-patch" in settings.metrics:
        return read_recipe(source, settings.model_copy(update={"base_model": settings.base_model or source}))
    return None


def _figures(
    case: Case, settings: EvaluateSettings, scores: dict[Any, Any], recipe: Recipe | None, retrainer: Retrainer | None
) -> tuple[Figures, dict[str, Any]]:
    draws = metrics.resamples(len(case.queries), settings.bootstrap, settings.evaluation_seed)
    parts: list[Figures] = [{name: {} for name in scores}]
    about: dict[str, Any] = {}
    if recipe is not None:
        about["recipe"] = vars(recipe)
    if "fidelity" in settings.metrics:
        parts.append(measure.fidelity(scores, scores["ek-fac"].scores, draws))
    if "lds" in settings.metrics and retrainer is not None:
        found, about["lds"] = measure.lds(scores, retrainer, settings)
        parts.append(found)
    if "qld" in settings.metrics and retrainer is not None:
        n = min(settings.removal_queries, len(case.queries))
        parts.append(measure.removal(scores, retrainer, settings, metrics.resamples(n, settings.bootstrap, settings.evaluation_seed)))
        about["qld"] = {"queries": n}
    if "tail-patch" in settings.metrics and recipe is not None:
        parts.append(measure.patch(scores, case, case.engine.loaded, recipe.learning_rate, settings.patch_examples, draws))
    if "facts" in settings.metrics and settings.fact_field is not None:
        found, about["facts"] = measure.facts(scores, case, settings.fact_field)
        parts.append(found)
    return measure.merge(parts), about
