"""`eogp inspect model`: what is tracked and skipped, and what indexing will take. Reads a configuration where that is enough, weights where it is not."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from transformers import AutoTokenizer

from engine.budget import SketchPlan, choose_budget
from engine.covariance import input_key
from engine.data.reading import BadRow, read_rows
from engine.data.settings import DataSettings
from engine.data.tokens import length_limit, resolve_kind, to_example
from engine.errors import DataError, LimitError, ModelError
from engine.groups import factor_bytes, in_gb
from engine.memory import FitEstimate, estimate_fit, free_memory, weight_bytes
from engine.model import LoadedModel, load_model
from engine.modules import ModuleReport, track
from engine.shapes import CARDS, Card, fit_hours, hub_config, named_config, without_storage
from indexer.settings import InspectSettings

SAMPLED_ROWS = 2000  # tokenised to learn their mean length
ROW_OVERHEAD = 80  # bytes of a stored row beside its sketch, text and token ids


@dataclass(frozen=True, slots=True)
class Corpus:
    """n examples of `mean` tokens and `text` bytes on average; `longest` in tokens."""

    n: int
    mean: int
    longest: int
    text: int


def inspect_model(source: str | None, settings: InspectSettings) -> list[str]:
    """The page, line by line. Raises ModelError, DataError, LimitError."""
    name = source or settings.model
    if name is None:
        raise ModelError("no model: give a folder, a hub id, a GGUF file, or a named shape such as olmo2-7b", field="model")
    loaded, report = _lay_out(name, settings)
    corpus = _corpus(loaded, name, settings)
    plan = choose_budget(report.tracked, settings, n_fit=max(1, min(corpus.n - min(128, corpus.n // 20), settings.pca_examples)))
    return [*_model_lines(loaded, report), *_store_lines(report, plan, corpus), *_fit_lines(loaded, report, settings, corpus)]


def _lay_out(name: str, settings: InspectSettings) -> tuple[LoadedModel, ModuleReport]:
    """The model without its weights where its configuration tells all; else loaded."""
    device = torch.device("cuda" if settings.device == "auto" and torch.cuda.is_available() else "cpu" if settings.device == "auto" else settings.device)
    config = named_config(name)
    named = config is not None
    if not named:
        if settings.adapters or name.lower().endswith(".gguf"):
            loaded = load_model(settings, source=name)
            return loaded, track(loaded)
        config = hub_config(name, trust_remote_code=settings.trust_remote_code)
    stored = getattr(config, "dtype", None)
    by_name = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = by_name.get(settings.dtype) or (stored if (named or device.type != "cpu") and isinstance(stored, torch.dtype) else torch.float32)
    laid_out = without_storage(config, name, dtype)
    try:
        report = track(laid_out)
    except RuntimeError:  # a family that looks at values while it runs
        report = None
    if report is None or any(reason.startswith("fused experts") for _, reason, _ in report.skipped):
        loaded = load_model(settings, source=name)
        return loaded, track(loaded)
    return replace(laid_out, device=device), report


def _corpus(loaded: LoadedModel, name: str, settings: InspectSettings) -> Corpus:
    if not settings.data:
        mean = min(settings.tokens_per_example, loaded.max_length)
        return Corpus(settings.examples, mean, mean, 4 * mean)
    if loaded.tokenizer is None:
        try:
            loaded.tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer or name, trust_remote_code=settings.trust_remote_code)
        except Exception as e:
            raise ModelError(f"no tokenizer for {name}, which --data needs; name one with --tokenizer ({str(e).splitlines()[0]})", field="tokenizer") from e
    data: DataSettings | None = None
    lengths: list[int] = []
    n = text = 0
    for row in read_rows(settings):
        if isinstance(row, BadRow):
            continue
        n += 1
        if len(lengths) >= SAMPLED_ROWS:
            continue
        try:
            data = data or resolve_kind(row, loaded, settings)
            example = to_example(row, loaded, data, training=True, default_id=str(n))
        except DataError:
            n -= 1
            continue
        lengths.append(len(example))
        text += len(example.text.encode())
    if not lengths:
        raise DataError(f"{', '.join(settings.data)}: no usable row")
    longest = max(lengths) if n == len(lengths) else length_limit(loaded, settings)
    return Corpus(n, round(sum(lengths) / len(lengths)), longest, text // len(lengths))


def _model_lines(loaded: LoadedModel, report: ModuleReport) -> list[str]:
    kind = type(loaded.model).__name__
    lines = [
        f"model      {loaded.source}: {kind}, {loaded.task}, {str(loaded.dtype).removeprefix('torch.')}, {in_gb(weight_bytes(loaded))} of weights",
        f"tracked    {len(report.tracked):,} modules, {report.tracked_parameters:,} of {report.total_parameters:,} parameters ({report.share:.1%})",
    ]
    shapes: dict[str, int] = {}
    for m in report.tracked:
        pattern = f"{_pattern(m.name)}  {m.d_out} x {m.d_in}{' (bias included)' if m.bias else ''}"
        shapes[pattern] = shapes.get(pattern, 0) + 1
    lines += [f"           {count:>5} {pattern}" for pattern, count in shapes.items()]
    reasons: dict[tuple[str, str], list[int]] = {}
    for name, reason, size in report.skipped:
        reasons.setdefault((_pattern(name), reason), []).append(size)
    lines += [f"skipped    {len(sizes):>5} {name}: {reason}, {sum(sizes):,} parameters" for (name, reason), sizes in reasons.items()]
    lines += [f"note       {note}" for note in [*loaded.notes, *report.notes]]
    return lines


def _store_lines(report: ModuleReport, plan: SketchPlan, corpus: Corpus) -> list[str]:
    fp16 = 2 * report.tracked_parameters
    shared = shared_bytes(report, plan)
    rows = corpus.n * (plan.payload_bytes + ROW_OVERHEAD + corpus.text + 4 * corpus.mean)
    smaller = shared // max(fp16 - plan.payload_bytes, 1) + 1
    factors = factor_bytes(report.tracked)
    return [
        f"data       {corpus.n:,} examples of {corpus.mean:,} tokens on average",
        f"sketch     {plan.payload_bytes:,} bytes per example; a gradient in 16 bit takes {in_gb(fp16)}",
        *(f"           {reason}" for reason in plan.why),
        f"shared     {in_gb(shared)} at most: {in_gb(plan.projection_bytes)} projection, {in_gb(shared - plan.projection_bytes)} eigenvectors and eigenvalues that queries use",
        f"disk       {in_gb(corpus.n * plan.payload_bytes)} of sketches in {in_gb(rows)} of rows; with shared {in_gb(rows + shared)}, which is less than 16-bit gradients from "
        f"{smaller:,} example{'s' if smaller > 1 else ''} on",
        f"curvature  {in_gb(factors)} of eigenvectors and {in_gb(4 * report.tracked_parameters)} of corrected eigenvalues, on disk while fitting (kept for rescoring where asked)",
    ]


def shared_bytes(report: ModuleReport, plan: SketchPlan) -> int:
    """P, and the columns of Q that the selection may use: at most one per selected coordinate and side; positions and eigenvalues of the selection."""
    outputs = sum(m.d_out * min(m.d_out, plan.m[m.name]) for m in report.tracked)
    inputs: dict[str, tuple[int, int]] = {}
    for m in report.tracked:
        inputs[input_key(m)] = (m.d_in, inputs.get(input_key(m), (0, 0))[1] + plan.m[m.name])
    return plan.projection_bytes + 4 * (outputs + sum(d * min(d, used) for d, used in inputs.values())) + 12 * sum(plan.m.values())


def _fit_lines(loaded: LoadedModel, report: ModuleReport, settings: InspectSettings, corpus: Corpus) -> list[str]:
    n = min(corpus.n, settings.fit_examples)
    lines = [f"fit        on {n:,} examples, {n * corpus.mean:,} tokens; groups of modules, two passes each:"]
    here, weights = free_memory(loaded.device), weight_bytes(loaded)
    held = any(not p.is_meta for p in loaded.model.parameters())
    at_home = replace(loaded, dtype=torch.float32) if not held and loaded.device.type == "cpu" and settings.dtype == "auto" else loaded
    lines.append(_fit_line(f"this machine, {in_gb(here)} free", at_home, report, settings, corpus, here if held else here - weight_bytes(at_home), None))
    for card in CARDS:
        on_card = replace(loaded, device=torch.device("meta"))  # any device but the CPU: a workspace that does not fit is left to main memory
        lines.append(_fit_line(f"a card with {card.name}", on_card, report, settings, corpus, int(0.97 * card.memory) - weights, card))
    rates = "; ".join(f"{c.name}: {c.model_rate / 1e12:.0f} and {c.sums_rate / 1e12:.0f}" for c in CARDS)
    lines.append(f"           hours from the arithmetic alone, at assumed sustained TFLOP/s for the model and for float32 sums ({rates})")
    return lines


def _fit_line(where: str, loaded: LoadedModel, report: ModuleReport, settings: InspectSettings, corpus: Corpus, free: int, card: Card | None) -> str:
    if free <= 0:
        return f"           {where}: does not fit, the weights alone take {in_gb(weight_bytes(loaded))}; load it on several cards"
    best: tuple[float, int, FitEstimate] | None = None
    tokens, refusal = settings.batch_tokens, ""
    while tokens >= min(corpus.longest, settings.batch_tokens):
        try:
            found = estimate_fit(loaded, report.tracked, settings, tokens=max(tokens, corpus.longest), free=free)
        except LimitError as e:
            refusal = e.message
        else:
            n = min(corpus.n, settings.fit_examples) * corpus.mean
            cost = fit_hours(report.tracked, report.total_parameters, found, n, corpus.mean, card or CARDS[0])
            if best is None or cost < best[0]:
                best = (cost, tokens, found)
        tokens //= 2
    if best is None:
        return f"           {where}: does not fit: {refusal}"
    cost, tokens, found = best
    parts = [f"{len(found.groups)} group{'s' if len(found.groups) > 1 else ''}, {found.passes} passes", f"peak {in_gb(found.peak)} with the weights"]
    if tokens != settings.batch_tokens:
        parts.append(f"--batch-tokens {tokens}")
    if found.recompute:
        parts.append("layers run twice to save memory")
    few = sum(len(g.on_candidates) for g in found.groups)
    if few:
        parts.append(f"corrected eigenvalues of {few} modules at candidate positions")
    if card is not None:
        parts.append(f"{cost:.1f} hours" if cost >= 1 else f"{60 * cost:.0f} minutes")
    return f"           {where}: {', '.join(parts)}"


def _pattern(name: str) -> str:
    """A module's name with its numbers as stars."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
