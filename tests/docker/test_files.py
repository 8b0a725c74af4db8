"""What the deployment's files promise, read without an engine; docker/check.sh resolves them with Compose, docker/verify.sh runs them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
OURS = ("indexer", "indexer-gpu", "server", "server-gpu")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return found


@pytest.mark.parametrize("name", OURS)
def test_services_are_hardened(services: dict[str, Any], name: str) -> None:
    own = services[name]
    assert own["init"] and own["read_only"] and own["cap_drop"] == ["ALL"] and own["security_opt"] == ["no-new-privileges:true"]
    assert own["profiles"] == ["gpu" if name.endswith("-gpu") else "cpu"]
    assert "memory" in own["deploy"]["resources"]["limits"]
    assert all(volume.endswith(":ro") for volume in own["volumes"] if name.startswith("server") or not volume.startswith("store:"))


@pytest.mark.parametrize("name", ["server", "server-gpu"])
def test_server_is_published_on_loopback_with_keys_and_comes_back(services: dict[str, Any], name: str) -> None:
    own = services[name]
    assert own["ports"] == ["${PUBLISH:-127.0.0.1:8000}:8000"]
    assert own["secrets"] == ["api_keys"] and own["environment"]["EOGP_API_KEYS"] == "/run/secrets/api_keys"
    assert own["restart"] == "unless-stopped" and own["stop_grace_period"]


def test_gpu_is_reserved(services: dict[str, Any]) -> None:
    for name in ("indexer-gpu", "server-gpu"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_images_run_as_a_user_with_a_health_check_and_pinned_versions() -> None:
    stages = re.split(r"^FROM ", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    by_name = {stage.splitlines()[0].split(" AS ")[1]: stage for stage in stages}
    assert by_name.keys() == {"build-cpu", "cpu", "build-gpu", "gpu"}
    for name in ("cpu", "gpu"):
        assert "USER 10001" in by_name[name] and "HEALTHCHECK" in by_name[name] and f"COPY --from=build-{name} /opt/eogp" in by_name[name]
        installed = re.findall(r"pip install .*", by_name[f"build-{name}"])
        assert len(installed) == 2 and "--constraint" in installed[0] and "--no-deps" in installed[1]


def test_every_variable_of_compose_is_in_the_example() -> None:
    used = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    named = set(re.findall(r"^(\w+)=", (DOCKER / ".env.example").read_text(), re.MULTILINE))
    assert used - named == {"BASE"}, "a registry's name for the base image, which the Dockerfile has as well"
    assert named <= used


def test_scripts_parse() -> None:
    for script in (*DOCKER.glob("*.sh"), ROOT / ".ci/run"):
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0, script
        assert script.stat().st_mode & 0o100, f"{script.name} cannot be executed"


def test_build_context_holds_no_more_than_the_build_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE) for word in line.split()}
    assert allowed == copied
