"""Measures what `import infinity` adds to `import torch`, step by step in new interpreters.

    python bench/import_time.py --rounds 9

The least time of all rounds counts, since other processes only add to it. Published in bench/results/import.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

STEPS = ("import torch", "import infinity", "from pydantic import BaseModel, Field", "infinity.initialize")
"""Executed in this order: each step's time excludes what an earlier one has imported."""
_SCRIPT = """
from time import perf_counter
for step in {steps!r}:
    begin = perf_counter()
    exec(step)
    print(perf_counter() - begin)
"""


def seconds() -> list[float]:
    """Return the time of each step in a new interpreter."""
    script = _SCRIPT.format(steps=STEPS)
    result = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    return [float(line) for line in result.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()

    rounds = [seconds() for _ in range(args.rounds)]
    least = {step: min(taken) for step, taken in zip(STEPS, zip(*rounds, strict=True), strict=True)}
    for step, taken in least.items():
        print(f"{step:38} {taken:.4f} s")
    if args.json:
        machine = {"python": platform.python_version(), "system": platform.platform()}
        args.json.write_text(json.dumps({"rounds": args.rounds, "machine": machine, "seconds": least}, indent=2) + "\n")


if __name__ == "__main__":
    main()
