"""Pages: prose written by a person around fragments drawn from a result.

A fragment stands between two comments, and only what is between them is replaced:

    <!-- drawn: table -->
    | step, s | 2.52 |
    <!-- end -->

A page holds the fragments that its author wants, in any order. A result without a page gets one with all of them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import RESULTS, Result, replace_text, spread

FRAGMENT = re.compile(r"<!-- drawn: (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def no_figures(result: Result) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Report:
    """How the results of one benchmark are shown. All functions take the result, as it is in its JSON."""

    title: Callable[[Result], str]
    fragments: Callable[[Result], dict[str, str]]
    """Markdown by the fragment's name, in the order of a new page."""
    figures: Callable[[Result], dict[str, float]] = no_figures
    """Figures by name, for `bench/limits.json`."""
    plot: Callable[[Result, Path], None] | None = None
    """Writes a PNG."""
    caption: str = ""


def report_of(result: Result) -> Report:
    """The report of the benchmark that wrote `result`."""
    report: Report = importlib.import_module(f"report.{result['bench']}").REPORT
    return report


def load(path: Path) -> Result:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def results() -> list[Path]:
    """The JSON files of bench/results."""
    return sorted(RESULTS.glob("*.json"))


# -- pages -------------------------------------------------------------------------------------------------------------


def enclosed(name: str, text: str) -> str:
    return f"<!-- drawn: {name} -->\n\n{text.strip()}\n\n<!-- end -->"


def fill(page: str, fragments: Mapping[str, str]) -> str:
    """The page with its fragments replaced. ValueError for one that is unknown, or if there is none."""
    names = [match["name"] for match in FRAGMENT.finditer(page)]
    if unknown := sorted(set(names) - set(fragments)):
        raise ValueError(f"unknown fragments: {', '.join(unknown)}. Known are {', '.join(fragments)}.")
    if not names:
        example = enclosed(next(iter(fragments)), "…")
        raise ValueError(f"the page has no fragments. Insert one of {', '.join(fragments)}:\n\n{example}")
    return FRAGMENT.sub(lambda match: enclosed(match["name"], fragments[match["name"]]), page)


def new_page(report: Report, result: Result, name: str) -> str:
    """A title and all fragments, and the plot if there is one."""
    parts = [f"# {report.title(result)}", *(enclosed(*item) for item in report.fragments(result).items())]
    if report.plot is not None:
        parts.append(f"![{report.caption}]({name}.png)")
    return "\n\n".join(parts) + "\n"


def drawn_page(path: Path) -> str:
    """The page of the result in `path`, with its fragments as the result has them."""
    result, page = load(path), path.with_suffix(".md")
    report = report_of(result)
    if not page.exists():
        return new_page(report, result, path.stem)
    try:
        return fill(page.read_text(encoding="utf-8"), report.fragments(result))
    except ValueError as error:
        raise SystemExit(f"{page}: {error}") from None


def publish(path: Path) -> None:
    """Write the page and the plot of the result in `path`, and print the fragments."""
    result = load(path)
    report = report_of(result)
    print("\n\n".join(report.fragments(result).values()))
    replace_text(path.with_suffix(".md"), drawn_page(path))
    if report.plot is not None:
        try:
            report.plot(result, path.with_suffix(".png"))
        except ImportError as error:
            print(f"{path.stem}.png was not drawn: {error}. Install matplotlib, then run bench/draw.py {path.stem}.")


# -- Markdown ----------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown. Rows have as many cells as the header."""
    lines = [list(header), *map(list, rows)]
    assert all(len(line) == len(header) for line in lines), "rows and header differ in length"
    first, *others = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, "|" + "---|" * len(header), *others])


RATIOS = """\
Ratios are quotients of the table's figures.
In brackets: the lowest and the highest of the rounds' ratios; they need not enclose a quotient of medians."""


def ratio(above: str, below: str, rounds: Iterable[float]) -> str:
    """`2.32 (1.87 to 2.41)`: the quotient of two cells, as a reader computes it, and the range of single rounds.

    The quotient is a dash where `below` is rounded to 0, as in runs of tiny models.
    """
    found = spread(rounds)
    quotient = f"{float(above) / float(below):.2f}" if float(below) else "–"
    return f"{quotient} ({found.low:.2f} to {found.high:.2f})"


def setup(result: Result, *sentences: str) -> str:
    """Command and machine of the result, its note and its remark: a sentence a line."""
    lines = [f"`{result['command']}` on {result['machine']}.", result.get("note", ""), *sentences]
    return "\n".join(line for line in [*lines, result.get("remark", "")] if line)
