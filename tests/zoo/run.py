"""Command that trains each architecture of transformers by the engine and by plain PyTorch, and compares.

.venv/bin/python tests/zoo/run.py --jobs 2
.venv/bin/python tests/zoo/run.py --only Reformer --only PhimoeForCausalLM
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from zoo.kinds import architectures
from zoo.table import line, write
from zoo.workers import judge_all, quiet

FAILURES = "differs", "failed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="architectures with NAME in class or kind")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", type=Path, help="page whose table the results replace")
    asked = parser.parse_args()
    quiet()
    chosen = [
        each
        for each in architectures()
        if asked.only is None or any(name in (each.kind, each.model_type) or name in each.name for name in asked.only)
    ]
    if not chosen:
        parser.error(f"no architecture has {' or '.join(asked.only)} in its name")
    began, results = time.monotonic(), []
    for architecture, verdict in judge_all(chosen, asked.jobs):
        results.append((architecture, verdict))
        print(line(architecture, verdict), flush=True)
    counts = Counter(verdict.kind for _, verdict in results)
    print(f"{len(results)} architectures in {time.monotonic() - began:.0f} s: {dict(counts)}")
    if asked.page is not None:
        write(asked.page, results)
    return int(any(counts[kind] for kind in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
