"""A load generator over loopback: a bare HTTP/1.1 client, so that its own cost stays small beside the server's on the same two cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np


class Connection:
    """One keep-alive connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def send(self, body: bytes, path: str = "/v1/influence") -> None:
        """Write one POST without waiting for its answer."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=16 * 1024 * 1024)
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """(status, body) of the next answer. Raises ConnectionError where the server closed."""
        assert self.reader is not None
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("closed without an answer") from None
        status = int(head.split(" ", 2)[1])
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection", "").lower() == "close":
            await self.close()
        return status, body

    async def ask(self, body: bytes) -> tuple[int, bytes]:
        """One request and its answer; connects again once where an idle connection was closed."""
        try:
            await self.send(body)
            return await self.receive()
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            await self.send(body)
            return await self.receive()

    async def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.reader = self.writer = None


@dataclass
class Outcome:
    """What one run of load saw. seconds: latency of each answered request; wrong: descriptions of answers that do not fit."""

    duration: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answered requests per second."""
        return self.statuses[200] / self.duration if self.duration else 0.0

    def percentile(self, q: float) -> float:
        """Latency in milliseconds."""
        return float(np.percentile(self.seconds, q)) * 1000 if self.seconds else float("nan")


Check = Callable[[int, dict[str, Any]], str | None]


async def closed_loop(
    url: str, bodies: Sequence[bytes], clients: int, *, seconds: float | None = None, requests: int | None = None, check: Check | None = None
) -> Outcome:
    """`clients` clients that each ask again as soon as they are answered, for a time or a number of requests. check(index of body, answer) -> what is wrong."""
    outcome = Outcome()
    started = time.perf_counter()
    issued = 0

    async def client(c: int) -> None:
        nonlocal issued
        connection = Connection(url)
        i = c
        while (seconds is None or time.perf_counter() - started < seconds) and (requests is None or issued < requests):
            issued += 1
            at = time.perf_counter()
            index = i % len(bodies)
            status, body = await connection.ask(bodies[index])
            outcome.statuses[status] += 1
            if status == 200:
                outcome.seconds.append(time.perf_counter() - at)
                wrong = check(index, json.loads(body)) if check else None
                if wrong:
                    outcome.wrong.append(wrong)
            i += clients
        await connection.close()

    await asyncio.gather(*(client(c) for c in range(clients)))
    outcome.duration = time.perf_counter() - started
    return outcome


async def open_loop(url: str, bodies: Sequence[bytes], rate: float, seconds: float) -> Outcome:
    """Requests sent at a fixed rate, whatever becomes of them; each on its own connection, at most 1,500 at a time."""
    outcome = Outcome()
    started = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()

    async def one(i: int) -> None:
        connection = Connection(url)
        at = time.perf_counter()
        try:
            await connection.send(bodies[i % len(bodies)])
            status, _ = await connection.receive()
            outcome.statuses[status] += 1
            if status == 200:
                outcome.seconds.append(time.perf_counter() - at)
        except OSError as e:
            outcome.wrong.append(repr(e))
        finally:
            await connection.close()

    i = 0
    while time.perf_counter() - started < seconds:
        due = int((time.perf_counter() - started) * rate)
        while i < due:
            if len(tasks) < 1500:
                task = asyncio.create_task(one(i))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            i += 1
        await asyncio.sleep(0.005)
    outcome.duration = time.perf_counter() - started
    await asyncio.gather(*tasks)
    return outcome


async def leaving(url: str, bodies: Sequence[bytes], clients: int, requests: int, share: float, seed: int = 0) -> Outcome:
    """As closed_loop, but a share of the requests is abandoned by closing the connection before the answer."""
    outcome = Outcome()
    rng = np.random.default_rng(seed)
    started = time.perf_counter()
    issued = 0

    async def client(c: int) -> None:
        nonlocal issued
        connection = Connection(url)
        i = c
        while issued < requests:
            issued += 1
            if rng.random() < share:
                await connection.send(bodies[i % len(bodies)])
                await asyncio.sleep(rng.random() * 0.02)
                await connection.close()
                outcome.statuses[0] += 1
            else:
                status, _ = await connection.ask(bodies[i % len(bodies)])
                outcome.statuses[status] += 1
            i += clients
        await connection.close()

    await asyncio.gather(*(client(c) for c in range(clients)))
    outcome.duration = time.perf_counter() - started
    return outcome


def scores(answer: dict[str, Any]) -> list[dict[str, float]]:
    """{id: score} of each ranking in an answer."""
    return [{h["id"]: h["score"] for h in r[side] or ()} for r in answer["results"] for side in ("proponents", "opponents")]


def disagreement(got: list[dict[str, float]], alone: list[dict[str, float]], rtol: float = 1e-3) -> str | None:
    """What differs between two answers beyond the tolerance, relative to the largest score; where two scores are that close, either may be left out."""
    for a, b in zip(got, alone, strict=True):
        scale = max((abs(v) for v in b.values()), default=0.0)
        edge = min((abs(v) for v in b.values()), default=0.0)
        for i in set(a) & set(b):
            if abs(a[i] - b[i]) > rtol * scale:
                return f"{i}: {a[i]} instead of {b[i]}"
        for i in set(a) ^ set(b):
            if abs(abs((a | b)[i]) - edge) > 2 * rtol * scale:
                return f"{i}: in one ranking only"
    return None
