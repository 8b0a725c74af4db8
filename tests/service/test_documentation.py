"""docs/http.md says what the code says; every setting and error is described."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from service.errors import CODES, MEDIA_TYPE
from service.settings import QuerySettings, ServeSettings

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("generate_http", ROOT / "docs" / "generate_http.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.render()
    assert (ROOT / "docs" / "http.md").read_text(encoding="utf-8") == text, "run python docs/generate_http.py"
    for code in CODES:
        assert f"| `{code}` |" in text
    assert MEDIA_TYPE in text and "eogp_queue_requests" in text and "--max-query-tokens" in text


@pytest.mark.parametrize("settings", [ServeSettings, QuerySettings])
def test_every_setting_is_described(settings: type[ServeSettings]) -> None:
    for name, field in settings.model_fields.items():
        assert field.description and field.description.endswith((".", ")")), name


def test_every_code_the_engine_raises_is_known_or_hidden() -> None:
    """A code that queries can meet is in the table; those of indexing never reach HTTP, or only as bad-store and bad-model."""
    import re

    indexing = {"disk-full", "no-store", "damaged-store", "not-writable", "store-locked", "store-version", "nothing-tracked", "unknown-id"}
    used = {c for path in (ROOT / "engine").rglob("*.py") for c in re.findall(r'code="([a-z-]+)"', path.read_text(encoding="utf-8"))}
    assert used - indexing <= set(CODES), sorted(used - indexing - set(CODES))
