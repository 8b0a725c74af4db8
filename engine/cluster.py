"""Joining a Ray cluster, for jobs and servers that outgrow one process. Ray is imported here, when it was asked for, and nowhere before."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import Field

from engine.errors import EogpError, SettingError
from engine.settings import Settings

REACH_SECONDS = 5.0  # Ray itself keeps trying for over a minute, and then ends the process
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[^\s:/]+):(?P<port>\d{1,5})")


class ClusterSettings(Settings):
    """Cluster."""

    ray: str | None = Field(
        None,
        description="Run on a Ray cluster: host:port of its head, auto for the one this machine belongs to, or local to start one here. The package ray must be installed.",
    )


def parse_address(address: str) -> tuple[str, int] | None:
    """(host, port) of an address, None for `auto` and `local`. Raises SettingError for anything else."""
    if address in ("auto", "local"):
        return None
    if address.startswith("ray://"):
        raise SettingError(f"--ray {address}: Ray's remote client is not supported; run the command on a machine of the cluster, with --ray auto", field="ray")
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65_536:
        raise SettingError(f"--ray {address!r} is not an address; give host:port, auto, or local", field="ray")
    return found["host"].strip("[]"), int(found["port"])


def require_ray() -> None:
    """Raises SettingError where Ray is not installed."""
    try:
        version("ray")
    except PackageNotFoundError:
        raise SettingError("--ray needs the package ray, which is not installed: pip install 'eogp[ray]'", field="ray") from None


@contextmanager
def joined(address: str) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at `address`; left again with the block.

    Inside a process that is connected already, that connection is used and kept. Raises SettingError where Ray is not installed or nothing answers.
    """
    require_ray()
    place = parse_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do by default, and warns about until then
    import ray

    if ray.is_initialized():
        yield ray
        return
    if place is not None:
        _probe(address, *place)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **({"include_dashboard": False} if address == "local" else {}))
    except (ConnectionError, ValueError, RuntimeError) as e:
        raise SettingError(
            f"--ray {address}: no Ray cluster answers ({_first_line(e)}); start one with `ray start --head`, or use --ray local", field="ray"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _probe(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=REACH_SECONDS).close()
    except OSError as e:
        raise SettingError(f"--ray {address}: nothing listens there ({(e.strerror or str(e)).lower()}); is the head node up?", field="ray") from None


def cause_of(error: Any) -> EogpError | None:
    """What went wrong inside a remote call, where it was one of our own errors; None for anything else."""
    found = getattr(error, "cause", None)
    return found if isinstance(found, EogpError) else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
