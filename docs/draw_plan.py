"""Runs the examples of docs/plan.md, and writes what they print into the page.

python docs/draw_plan.py            # rewrites the page; two minutes
python docs/draw_plan.py --check    # ends with 1 if a number of the page differs

The bandwidths are assumed, not measured: docs/links.json.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plan.md"
EXAMPLE = re.compile(
    r"^```\n\$ (?P<command>infinity plan(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*?)^```$", re.DOTALL | re.MULTILINE
)


def printed(command: str) -> str:
    """Return what the command of an example prints, from the repository's root; notes and errors too."""
    words = shlex.split(command.replace("\\\n", " "))
    ended = subprocess.run(
        [sys.executable, "-m", "infinity.cli.main", *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "110", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
    )
    return "\n".join(line.rstrip() for line in ended.stdout.splitlines()).strip("\n") + "\n"


def drawn(page: str) -> str:
    """Return the page with the present output of each example."""

    def example(match: re.Match[str]) -> str:
        return f"```\n$ {match['command']}\n{printed(match['command'])}```"

    return EXAMPLE.sub(example, page)


def main() -> None:
    before = PAGE.read_text()
    after = drawn(before)
    if "--check" in sys.argv:
        sys.exit(f"{PAGE} differs from what its examples print: run docs/draw_plan.py" if after != before else 0)
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
