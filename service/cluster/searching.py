"""The replicas' side of the shards: every search asks all of them, and fails with 503 where one does not answer in time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from engine.cluster import cause_of
from engine.search import Searcher
from engine.search.sharded import ShardedSearcher
from engine.store import Store
from engine.store.manifest import MANIFEST_HASH
from service.errors import ApiError

OPEN_SECONDS = 120.0  # a shard may still be starting, or compile its scan


@dataclass
class Searching:
    """Makes the searcher of a generation. handles: one per shard, in order; seconds: the longest wait for a search."""

    handles: Sequence[Any]
    seconds: float

    def __call__(self, store: Store) -> Searcher:
        version = (store.path / "generations" / store.generation / MANIFEST_HASH).read_bytes()

        def ask(method: str, arguments: Sequence[tuple[Any, ...]], seconds: float = self.seconds) -> list[Any]:
            return self.ask([(store.generation, version, method, own) for own in arguments], seconds)

        held = self.ask([(store.generation, version, "held", ()) for _ in self.handles], OPEN_SECONDS)
        return ShardedSearcher(store.layout, held, ask, excluded=store.excluded, calibration=store.recall)

    def ask(self, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """One call of every shard. Raises ApiError shard-unavailable, or the shard's own error."""
        end = time.monotonic() + seconds
        sent = [handle.ask.remote(*own) for handle, own in zip(self.handles, arguments, strict=True)]
        try:
            return [response.result(timeout_s=max(end - time.monotonic(), 0.001)) for response in sent]
        except RayTaskError as e:  # it has answered, with an error
            raise (cause_of(e) or e) from None
        except (RayError, RayServeException, TimeoutError) as e:
            raise ApiError("shard-unavailable", "A part of the index does not answer; retry in 2 s.", headers={"Retry-After": "2"}) from e
        finally:
            for response in sent:
                response.cancel()  # of no effect where it is done
