"""Draw pages and plots of results that are there: bench/results/NAME.md and NAME.png from NAME.json.

    python bench/draw.py                 # all of them
    python bench/draw.py step zero_bf16 /tmp/trial.json

Replaces what stands between `<!-- drawn: … -->` and `<!-- end -->`, and leaves the rest of a page as it is.
"""

from __future__ import annotations

import argparse

from harness import result_path
from report.page import publish, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [path.stem for path in results()]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a path, or of {', '.join(known)}")
    args = parser.parse_args()
    for name in args.names or known:
        if not result_path(name).exists():
            parser.error(f"{result_path(name)} is missing. Run the benchmark first.")
        publish(result_path(name))


if __name__ == "__main__":
    main()
