"""Put the last demo's measured tables into README.md, between its markers: python examples/demo/readme.py demo"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def main(folder: Path) -> None:
    report = (folder / "report.md").read_text(encoding="utf-8").strip()
    text, count = re.subn(r"(<!-- demo -->\n).*?(<!-- /demo -->)", lambda m: f"{m[1]}\n{report}\n\n{m[2]}", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    if count != 1:
        raise SystemExit("README.md has no <!-- demo --> ... <!-- /demo --> block")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
