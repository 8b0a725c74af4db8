"""schemathesis against the OpenAPI schema, a short run; the long one is in tests/integration."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from service.app import create_app
from service.settings import ServeSettings


@pytest.fixture
def address(fake: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(create_app(fake(), ServeSettings(reload_seconds=0)), port=0, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join(10)


def test_no_case_breaks_the_server_or_its_documentation(address: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "st"), "--config-file", str(Path(__file__).parent / "schemathesis.toml"), "run", f"{address}/openapi.json"]
    done = subprocess.run(
        [*command, "--checks", "all", "--phases", "fuzzing", "--max-examples", "15", "--seed", "1", "--no-color"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
