"""What the numbers depend on beside the settings."""

from __future__ import annotations

from importlib.metadata import version


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {name: version(name) for name in ("eogp", "numpy", "torch", "transformers", "tokenizers")}
