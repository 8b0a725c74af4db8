"""What the server needs of an engine: prepare a request, answer several together, look up examples.

A backend is one generation of one store with one model, and never changes; a reload makes another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.errors import EogpError
from service.schemas import ExampleList, InfluenceRequest, InfluenceResponse, ModelInfo, Order, StoredExample, StoreInfo


class Prepared(Protocol):
    """A request that has been checked and tokenised. n_tokens: of all its queries, what it weighs in a batch."""

    @property
    def n_tokens(self) -> int: ...


class Backend(Protocol):
    """One generation, ready to answer."""

    @property
    def generation(self) -> str: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def store(self) -> StoreInfo: ...

    @property
    def rescore(self) -> bool:
        """Whether the store keeps the whole curvature."""
        ...

    def prepare(self, request: InfluenceRequest) -> Any:
        """Check and tokenise, on any thread. Raises EogpError for what cannot be answered."""
        ...

    def answer(self, items: Sequence[Any]) -> Sequence[InfluenceResponse | EogpError]:
        """Answer prepared requests, on the inference thread only."""
        ...

    def example(self, id: str, neighbours: int) -> StoredExample | None:
        """One training example, on any thread; None where the id is not known."""
        ...

    def examples(self, order: Order, offset: int, limit: int) -> ExampleList:
        """A page of examples, on any thread; descending for self_influence and loss."""
        ...

    def damage(self, told: Callable[[int], None]) -> list[tuple[str, str]]:
        """(file, what is wrong) of every file that differs from the manifest, on any thread; empty too where this generation is no longer the store's.

        told: called with the bytes of each slice read; what it raises ends the check. Raises EogpError where the store cannot be read at all.
        """
        ...

    def reload(self) -> Backend | None:
        """The store's current generation; None where it is this one. Raises EogpError where it cannot be served."""
        ...
