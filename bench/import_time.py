"""Measures what `import infinity` adds to `import torch`, step by step in new interpreters.

    python bench/import_time.py --rounds 15
    python bench/import_time.py --rounds 15 --trees ../before .    # two checkouts, in turns

Prints medians of the processor time, which other processes change less than the time on the clock. Published in
bench/results/import.md. Bytecode is cached in a temporary folder before the first round, as an installation caches it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

TORCH = "import torch"
LOAD = 'import infinity; infinity.Config.load({"train_batch_size": 1})'
PROGRAMS = (
    (TORCH, "import infinity", "infinity.initialize", LOAD),
    (TORCH, "import infinity.deepspeed as deepspeed", "deepspeed.initialize", LOAD),
    (TORCH, "from pydantic import BaseModel, Field"),
)
"""Each is executed in an interpreter of its own: a step's time excludes what an earlier one has imported."""
_SCRIPT = """
import gc
from time import process_time
if {no_gc}:
    gc.disable()
for step in {steps!r}:
    begin = process_time()
    exec(step)
    print(process_time() - begin)
"""


def seconds(steps: tuple[str, ...], tree: Path, bytecode: str, no_gc: bool) -> list[float]:
    """Return the processor time of each step in a new interpreter, which imports infinity from `tree`."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", _SCRIPT.format(steps=steps, no_gc=no_gc)]  # -c: the working directory comes first
    result = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(line) for line in result.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path.cwd()], help="checkouts with built modules")
    parser.add_argument("--no-gc", action="store_true", help="without Python's garbage collector")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()

    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as bytecode:
        for number in range(args.rounds + 1):
            for steps in PROGRAMS:
                for tree in args.trees:
                    found = seconds(steps, tree, bytecode, args.no_gc)
                    if number:  # the first one compiles
                        for step, time in zip(steps, found, strict=True):
                            taken[str(tree), f"{steps[1]}: {step}" if step == LOAD else step].append(time)
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, step), times in taken.items():
        medians[name][step] = median(times)
        print(f"{name:12} {step:105} {medians[name][step]:.4f} s")
    if args.json:
        machine = {"python": platform.python_version(), "system": platform.platform()}
        args.json.write_text(
            json.dumps({"rounds": args.rounds, "machine": machine, "seconds": medians}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
