"""One part of the index, without a cluster: which rows it answers for, and of which generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import StoreError
from engine.search import Searcher, SearchRequest
from engine.search.sharded import ShardedSearcher
from engine.store import Store
from engine.store.manifest import MANIFEST_HASH
from indexer.compact import compact
from indexer.delete import delete
from service.cluster.shard import KEPT, Shard

MakeStore = Callable[..., Path]


def version(path: Path, generation: str) -> bytes:
    return (path / "generations" / generation / MANIFEST_HASH).read_bytes()


def searcher(path: Path, shards: Sequence[Shard]) -> ShardedSearcher:
    store = Store.open(path)
    of = store.generation, version(path, store.generation)

    def ask(method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [shard.ask(*of, method, own) for shard, own in zip(shards, arguments, strict=True)]

    return ShardedSearcher(store.layout, ask("held", [()] * len(shards)), ask, excluded=store.excluded, calibration=None)


def positions(path: Path, shards: Sequence[Shard]) -> tuple[list[int], list[int]]:
    """The best 30 rows by the shards, and by one searcher."""
    store = Store.open(path)
    request = SearchRequest(np.random.default_rng(1).standard_normal((1, store.layout.total_k)).astype(np.float32), 30, direction="proponents")
    whole = Searcher(store.segments, store.layout, store.c, excluded=store.excluded)
    found = [each.search(request).proponents for each in (searcher(path, shards), whole)]
    assert found[0] is not None and found[1] is not None
    return found[0].positions[0].tolist(), found[1].positions[0].tolist()


@pytest.mark.parametrize("n", [1, 3, 7])
def test_shards_answer_for_each_generation_without_its_deleted_rows(make_store: MakeStore, n: int) -> None:
    path = make_store(230, shard_rows=50, flagged=0.1)
    shards = [Shard(path, i, n) for i in range(n)]
    first, wanted = positions(path, shards)
    assert first == wanted and len(first) == 30
    delete(path, ids=[f"row-{p}" for p in first[:3]], where=None)
    second, wanted = positions(path, shards)
    assert second == wanted and not set(second) & set(first[:3])
    old = shards[0].ask("000001", version(path, "000001"), "held", ())  # whoever began with the first generation may end with it
    assert old.first == 0
    compact(path)
    third, wanted = positions(path, shards)
    assert third == wanted and len(third) == 30


def test_a_generation_that_is_gone_or_another_is_refused(make_store: MakeStore) -> None:
    path = make_store(40, shard_rows=20)
    shard = Shard(path, 0, 2)
    with pytest.raises(StoreError, match="generation 000001 was built anew"):
        shard.ask("000001", b"another", "held", ())
    with pytest.raises(StoreError):
        shard.ask("000009", b"", "held", ())
    assert shard.ask("000001", version(path, "000001"), "held", ()).end == 20


def test_few_generations_are_held(make_store: MakeStore) -> None:
    path = make_store(40, shard_rows=20)
    shard = Shard(path, 0, 1)
    for i in range(4):
        shard.ask(f"{i + 1:06d}", version(path, f"{i + 1:06d}"), "held", ())
        delete(path, ids=[f"row-{i}"], where=None)
    assert [generation for generation, _ in shard._held] == ["000003", "000004"] and len(shard._held) == KEPT


class Response:
    def __init__(self, outcome: Any) -> None:
        self.outcome, self.cancelled = outcome, False

    def result(self, timeout_s: float) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Stands for a Serve handle whose calls end as told."""

    def __init__(self, outcome: Any) -> None:
        self.ask, self.sent = self, Response(outcome)

    def remote(self, *arguments: Any) -> Response:
        return self.sent


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # Ray Serve's own settings
def test_one_silent_shard_is_503_and_everyone_is_let_go() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'eogp[ray]'")
    from ray.exceptions import ActorDiedError, RayTaskError

    from service.cluster.searching import Searching
    from service.errors import ApiError

    for failure in (TimeoutError(), ActorDiedError()):
        handles = [Handle(1), Handle(failure), Handle(3)]
        with pytest.raises(ApiError) as e:
            Searching(handles, 1.0).ask([(), (), ()], 1.0)
        assert e.value.code == "shard-unavailable" and e.value.status == 503 and e.value.headers["Retry-After"]
        assert all(h.sent.cancelled for h in handles)
    assert Searching([Handle(1), Handle(2)], 1.0).ask([(), ()], 1.0) == [1, 2]
    for mistake, kind in ((StoreError("gone"), StoreError), (ZeroDivisionError(), RayTaskError)):  # what a shard answers with is not taken for its absence
        with pytest.raises(kind):
            Searching([Handle(RayTaskError("ask", "Traceback", mistake))], 1.0).ask([()], 1.0)
