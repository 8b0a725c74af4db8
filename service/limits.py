"""Limits that depend on the server's settings, checked before any work is done for a request."""

from __future__ import annotations

from engine.errors import LimitError
from service.schemas import InfluenceRequest, Limits
from service.settings import ServeSettings


def limits_of(settings: ServeSettings) -> Limits:
    """The limits as GET /v1/info shows them."""
    return Limits(**{name: getattr(settings, name) for name in Limits.model_fields})


def check_limits(request: InfluenceRequest, settings: ServeSettings) -> None:
    """Raise LimitError naming the field, its value and the limit."""
    _at_most("queries", len(request.queries), settings.max_queries, "queries in one request")
    _at_most("top_k", request.top_k, settings.max_top_k, "results per direction")
    answers = 1 if request.aggregate == "sum" else len(request.queries)
    results = answers * request.top_k * (2 if request.direction == "both" else 1)
    _at_most("top_k", results, settings.max_results, "results in one answer (queries x top_k x directions)")
    if request.rescore is not None:
        _at_most("rescore_n", request.rescore_n * answers, settings.max_rescored, "results per direction whose gradients are recomputed (queries x rescore_n)")
    if isinstance(request.candidates, int):
        _at_most("candidates", request.candidates, settings.max_candidates, "candidates")
    if request.filter is not None:
        terms, values = request.filter.size()
        _at_most("filter", terms, settings.max_filter_terms, "conditions and operators in a filter")
        _at_most("filter", values, settings.max_filter_values, "values in a filter")
    for name, queries in (("queries", request.queries), ("contrast", request.contrast or [])):
        for i, query in enumerate(queries):
            if query.generate is not None and query.generate is not True:
                _at_most(f"{name}.{i}.generate.max_new_tokens", query.generate.max_new_tokens, settings.max_new_tokens, "generated tokens")


def check_tokens(n_tokens: int, settings: ServeSettings) -> None:
    """Raise LimitError when all queries of a request together are too long."""
    _at_most("queries", n_tokens, settings.max_request_tokens, "tokens in one request; send fewer queries at a time")


def _at_most(field: str, value: int, limit: int, what: str) -> None:
    if value > limit:
        raise LimitError(f"{field}: {value:,} is more than the limit of {limit:,} {what}.", field=field)
