"""Compare figures of results with bench/limits.json; exit with code 1 if one misses its limit.

    python bench/check.py                # all results
    python bench/check.py step /tmp/trial.json

A limit names a figure of a benchmark, `*` standing for any text, and `at_least` or `at_most`. `any` lists limits of
which one is enough. Figures without a limit are not shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness import result_path
from report.page import load, report_of, results

LIMITS = Path(__file__).resolve().parent / "limits.json"
Limit = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Figures beside their limits, in words, and whether the limits are met."""

    text: str
    met: bool


def compare(limit: Limit, figures: Mapping[str, float]) -> list[Verdict]:
    """A verdict for each figure that the limit is about; none if it was not measured."""
    if "any" in limit:
        found = [verdict for one in limit["any"] for verdict in compare(one, figures)]
        text = " or ".join(verdict.text for verdict in found)
        return [Verdict(text, any(verdict.met for verdict in found))] if found else []
    names = [name for name in figures if fnmatchcase(name, limit["figure"])]
    return [within(name, figures[name], limit) for name in names]


def within(name: str, value: float, limit: Limit) -> Verdict:
    if "at_least" in limit:
        return Verdict(f"{name}: {value:.2f} (at least {limit['at_least']:g})", value >= limit["at_least"])
    return Verdict(f"{name}: {value:.2f} (at most {limit['at_most']:g})", value <= limit["at_most"])


def verdicts(limits: Iterable[Limit], figures: Mapping[str, float]) -> list[Verdict]:
    return [verdict for limit in limits for verdict in compare(limit, figures)]


def check(paths: Sequence[Path], limits: Mapping[str, Sequence[Limit]]) -> bool:
    """Print every figure that has a limit; whether all limits are met."""
    is_met = True
    for path in paths:
        result = load(path)
        for one in verdicts(limits.get(result["bench"], ()), report_of(result).figures(result)):
            print(f"{'met   ' if one.met else 'MISSED'}  {path.stem}  {one.text}")
            is_met = is_met and one.met
    return is_met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a result of bench/results, or the path of a JSON")
    args = parser.parse_args()
    paths = [result_path(name) for name in args.names] or results()
    for path in paths:
        if not path.exists():
            parser.error(f"{path} is missing. Run the benchmark first.")
    sys.exit(not check(paths, json.loads(LIMITS.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
