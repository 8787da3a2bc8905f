"""Fill the table of predictions in docs/gpu.md with the figures of `gpu_check.sh`.

python bench/gpu_predictions.py                          # from bench/results/gpu
python bench/gpu_predictions.py --figures headline/      # from an unpacked tarball; prints the table only
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import harness
from gpu_kit.predictions import table
from gpu_kit.summary import figures_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
FIGURES = harness.RESULTS / "gpu"
BLOCK = re.compile(r"<!-- predictions -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, figures: Path) -> str:
    """Return the page with the table of the figures in a folder. Without the folder, no figure is filled in."""
    text = f"<!-- predictions -->\n\n{table(figures_of(figures))}\n\n<!-- end -->"
    return BLOCK.sub(lambda match: text, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="print the table of these figures")
    args = parser.parse_args()
    if args.figures is not None:
        print(table(figures_of(args.figures)))
        return
    harness.replace_text(PAGE, filled(PAGE.read_text(encoding="utf-8"), FIGURES))


if __name__ == "__main__":
    main()
