"""What this process holds in memory."""

from __future__ import annotations

from pathlib import Path


def resident() -> dict[str, int]:
    """Bytes resident: anonymous (heap and private), mapped (files, shared with the page cache), peak (the most ever, both together). Linux only."""
    values = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            values[name] = 1024 * int(value.split()[0])
    return {"anonymous": values["RssAnon"], "mapped": values["RssFile"], "peak": values["VmHWM"]}
