"""The pool alone: what is done again, what is not, and what ends it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import DataError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"), pytest.mark.filterwarnings("ignore::ResourceWarning")]


class Counter:
    """Doubles numbers; dies over a number the first `deaths` times, which it counts in a file."""

    def __init__(self, folder: Path, deaths: dict[int, int]) -> None:
        self.folder, self.deaths = folder, deaths

    def start(self) -> str:
        if (self.folder / "refuse").exists():
            raise DataError("not today")
        return "ready"

    def double(self, n: int) -> int:
        log = self.folder / f"{n}.log"
        with log.open("a") as file:
            file.write(".")
        if log.stat().st_size <= self.deaths.get(n, 0):
            os._exit(1)
        if n < 0:
            raise DataError("negative")
        return 2 * n


@pytest.fixture(scope="module")
def connected(two_nodes: Any) -> Iterator[Any]:
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
    ray.init(address=two_nodes.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def pool(connected: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """pool(deaths): two workers."""
    from indexer.cluster.pool import Pool

    made: list[Pool] = []

    def make(deaths: dict[int, int], say: Callable[[str], None] = lambda text: None) -> Pool:
        remote = connected.remote(Counter).options(num_cpus=0.5)
        made.append(Pool(2, lambda: remote.remote(tmp_path, deaths), lambda actor: actor.start.remote(), say))
        return made[-1]

    yield make
    for each in made:
        each.close()


def double(actor: Any, n: int) -> Any:
    return actor.double.remote(n)


def attempts(folder: Path, n: int) -> int:
    return (folder / f"{n}.log").stat().st_size


def test_everything_is_done_once_and_what_is_lost_again(pool: Callable[..., Any], tmp_path: Path) -> None:
    said: list[str] = []
    workers = pool({3: 2, 7: 1}, said.append)
    found = dict(workers.map(range(10), double, lambda: None))
    assert found == {n: 2 * n for n in range(10)}
    assert [attempts(tmp_path, n) for n in range(10)] == [1, 1, 1, 3, 1, 1, 1, 2, 1, 1]
    assert len(said) == 3 and workers.lost == 3
    assert dict(workers.map([20], double, lambda: None)) == {20: 40}  # the pool is whole again


def test_a_task_that_kills_everyone_ends_the_work(pool: Callable[..., Any], tmp_path: Path) -> None:
    from indexer.cluster.pool import LostTaskError

    with pytest.raises(LostTaskError, match="5 workers have died over the same piece of work"):
        list(pool({2: 99}).map([1, 2], double, lambda: None))
    assert attempts(tmp_path, 2) == 5


def test_an_error_of_ours_is_raised_as_it_is(pool: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^negative$"):
        list(pool({}).map([1, -1], double, lambda: None))
    assert attempts(tmp_path, -1) == 1
    (tmp_path / "refuse").touch()
    with pytest.raises(DataError, match=r"^not today$"):
        list(pool({}).map([1], double, lambda: None))


def test_a_stop_ends_it_between_results(pool: Callable[..., Any]) -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(pool({}).map(range(1000), double, check))
