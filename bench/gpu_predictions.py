"""Fill the table of predictions in docs/gpu.md with the figures of `gpu_check.sh`.

python bench/gpu_predictions.py                          # from bench/results/gpu, with tarballs unpacked in it
python bench/gpu_predictions.py --figures headline/      # from one unpacked tarball; prints the table only

Files of two calls may have one name: those of the call that `gpu_check.py` lists first count.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import harness
from gpu_kit.calls import CALLS
from gpu_kit.predictions import table
from gpu_kit.summary import figures_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
FIGURES = harness.RESULTS / "gpu"
BLOCK = re.compile(r"<!-- predictions -->\n.*?<!-- end -->", re.DOTALL)


def figures_in(folder: Path) -> dict[str, Any]:
    """Return the figures of a folder, and of the calls' folders in it."""
    found: dict[str, Any] = {}
    for call in reversed(CALLS):
        found |= figures_of(folder / call)
    return found | figures_of(folder)


def filled(page: str, figures: Path) -> str:
    """Return the page with the table of the figures in a folder. Without the folder, no figure is filled in."""
    text = f"<!-- predictions -->\n\n{table(figures_in(figures))}\n\n<!-- end -->"
    return BLOCK.sub(lambda match: text, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="print the table of these figures")
    args = parser.parse_args()
    if args.figures is not None:
        print(table(figures_in(args.figures)))
        return
    harness.replace_text(PAGE, filled(PAGE.read_text(encoding="utf-8"), FIGURES))


if __name__ == "__main__":
    main()
