"""Forks indexing jobs from one process that has imported everything, and kills them when told. One JSON order per line in, one JSON result per line out.

Order: {"command": "index" | "append" | "delete" | "compact", "store": ..., "settings": {...}, "signal": 9 | 15 | null, "after": seconds | null, "when": path | null}:
the signal is sent after so many seconds, or when the path exists. Result: {"code": exit code, or minus the signal, "seconds": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import indexer.append
import indexer.compact
import indexer.index
from engine.errors import EogpError
from indexer.settings import AppendSettings, IndexSettings


def run(order: dict[str, Any]) -> None:
    store = Path(order["store"])
    if order["command"] == "index":
        indexer.index.index(store, IndexSettings(**order["settings"]))
    elif order["command"] == "append":
        indexer.append.append(store, AppendSettings(**order["settings"]))
    else:
        indexer.compact.compact(store, **order["settings"])


def child(order: dict[str, Any]) -> None:
    log = os.open(order.get("log", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        run(order)
        code = 0
    except EogpError as e:
        print(e.message, flush=True)
        code = e.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def attend(pid: int, order: dict[str, Any], started: float) -> int:
    """Wait for the child, sending its signal once when its time has come."""
    number = order.get("signal")
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        due = order.get("after") is not None and time.monotonic() - started >= order["after"]
        if number and (due or (order.get("when") and Path(order["when"]).exists())):
            os.kill(pid, number)
            number = None
        time.sleep(0.0005)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(order)
        print(json.dumps({"code": attend(pid, order, started), "seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    main()
