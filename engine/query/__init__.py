"""Queries: a parsed request in, ranked training examples out. Knows nothing of HTTP."""

from engine.query.engine import QueryEngine, Sketched
from engine.query.prepare import Pending, Prepared, check_spec
from engine.query.spec import Answer, Generate, Hit, InputReport, Limits, QueryAnswer, QueryInput, QuerySpec, Token

__all__ = [
    "Answer",
    "Generate",
    "Hit",
    "InputReport",
    "Limits",
    "Pending",
    "Prepared",
    "QueryAnswer",
    "QueryEngine",
    "QueryInput",
    "QuerySpec",
    "Sketched",
    "Token",
    "check_spec",
]
