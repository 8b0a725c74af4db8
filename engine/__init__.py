"""The engine: attribution mathematics and the store. `from engine import Store` is all that asking questions without a server needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.query import QueryEngine, QueryInput, QuerySpec
    from engine.store import Store

__all__ = ["QueryEngine", "QueryInput", "QuerySpec", "Store"]


def __getattr__(name: str) -> Any:
    """Load the store with its libraries only when it is asked for."""
    if name == "Store":
        from engine.store import Store

        return Store
    if name in __all__:
        from engine import query

        return getattr(query, name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
