"""Tasks over a pool of Ray actors of which any may die: its task goes to another, and Ray places a new actor where there is room."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from engine.cluster import cause_of
from engine.errors import EogpError

T = TypeVar("T")
ATTEMPTS = 5  # a task that has cost so many workers is to blame itself
WAIT_SECONDS = 1.0
QUIET_SECONDS = 20.0  # without any worker, before it is said


class LostTaskError(EogpError):
    """A task whose workers die one after the other."""

    code = "workers-lost"


@dataclass
class _Task(Generic[T]):
    item: T
    attempts: int = 0


class Pool:
    """`size` actors, made by `create` and prepared by `start`, whose failures are their user's to see.

    Ray could restart an actor in its place and retry its tasks, but then the task of an actor on a lost node waits for a node like it to come back; here
    another worker takes it over at once.
    """

    def __init__(self, size: int, create: Callable[[], Any], start: Callable[[Any], Any], say: Callable[[str], None]) -> None:
        self.create, self.start, self.say = create, start, say
        self.starting: dict[Any, tuple[Any, int]] = {}  # reference -> (actor, how often it has been tried)
        self.idle: list[Any] = []
        self.lost = 0
        for _ in range(size):
            self._replace(0)

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.idle, *(actor for actor, _ in self.starting.values())]:
            ray.kill(actor)
        self.idle, self.starting = [], {}

    def map(self, items: Iterable[T], submit: Callable[[Any, T], Any], check: Callable[[], None]) -> Iterator[tuple[T, Any]]:
        """(item, result) as they are done, in any order; an item is taken when a worker is free for it.

        check: called about once a second, and may raise to end the work. Raises the first error of our own that a task raises; the pool is then of no further use.
        """
        source = iter(items)
        again: deque[_Task[T]] = deque()
        running: dict[Any, tuple[Any, _Task[T]]] = {}
        exhausted, seen = False, time.monotonic()
        try:
            while True:
                while self.idle and not (exhausted and not again):
                    task = again.popleft() if again else None
                    if task is None:
                        try:
                            task = _Task(next(source))
                        except StopIteration:
                            exhausted = True
                            break
                    actor = self.idle.pop()
                    running[submit(actor, task.item)] = (actor, task)
                if exhausted and not again and not running:
                    return
                done, _ = ray.wait([*running, *self.starting], timeout=WAIT_SECONDS)
                check()
                seen = self._remind(seen, bool(running or done))
                for reference in done:
                    if reference in self.starting:
                        self._started(reference)
                        continue
                    actor, task = running.pop(reference)
                    try:
                        result = ray.get(reference)
                    except (RayActorError, ObjectLostError) as e:
                        self._failed(actor, task, e)
                        again.append(task)
                    except RayError as e:
                        self.idle.append(actor)
                        raise (cause_of(e) or e) from None
                    else:
                        self.idle.append(actor)
                        del reference
                        yield task.item, result
        finally:
            self._abandon(running)

    def _started(self, reference: Any) -> None:
        actor, tries = self.starting.pop(reference)
        try:
            ray.get(reference)
        except (RayActorError, ObjectLostError) as e:
            if tries + 1 >= ATTEMPTS:
                raise LostTaskError(
                    f"a worker died {ATTEMPTS} times before it was ready ({_reason(e)}); is there memory for the model on every node?"
                ) from None
            self._replace(tries + 1)
        except RayError as e:
            raise (cause_of(e) or e) from None
        else:
            self.idle.append(actor)

    def _failed(self, actor: Any, task: _Task[T], error: Exception) -> None:
        task.attempts += 1
        self.lost += 1
        if task.attempts >= ATTEMPTS:
            raise LostTaskError(f"{ATTEMPTS} workers have died over the same piece of work ({_reason(error)}); lower --batch-tokens or --ray-workers") from None
        self.say("a worker was lost; its work goes to another")
        ray.kill(actor)  # a result may be lost while its actor lives on
        self._replace(0)

    def _replace(self, tries: int) -> None:
        actor = self.create()
        self.starting[self.start(actor)] = (actor, tries)

    def _abandon(self, running: dict[Any, tuple[Any, _Task[T]]]) -> None:
        """End whoever works on something that nobody will fetch."""
        for actor, _ in running.values():
            ray.kill(actor)

    def _remind(self, seen: float, alive: bool) -> float:
        now = time.monotonic()
        if alive or self.idle:
            return now
        if now - seen > QUIET_SECONDS:
            self.say("no worker yet: the cluster has no room for one now; going on as soon as it has")
            return now
        return seen


def _reason(error: Exception) -> str:
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()  # Ray colours its messages
    return text.splitlines()[0][:200] if text else type(error).__name__
