"""The table of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zoo.judge import Run, Verdict
from zoo.kinds import Architecture

Results = Sequence[tuple[Architecture, Verdict]]
HEAD = (
    "| architecture | kind | inputs | parameters | units | loop | `train_batch` | loop, tiny | `train_batch`, tiny "
    "| torch's AdamW | result |"
)
BEGIN, END = "<!-- drawn: zoo -->", "<!-- end -->"


def _cell(run: Run) -> str:
    if run.problem:
        return run.problem.replace("|", "/")
    is_vertical = run.way == "train_batch" and not run.order
    text = "same bits" if run.verdict == "equal" else _differences(run.loss, run.parameters)
    return text + (", vertical" if is_vertical and run.setting == "tiny" else "")


def _quoted(reason: str) -> str:
    """Return the beginning of `reason`, which holds messages of torch and transformers, as code in a table."""
    return f"`{reason.replace('|', '/').replace('`', chr(39))[:200].strip()}`"


def _differences(loss: float, parameters: float) -> str:
    return f"{loss:.0e}, {parameters:.0e}"


def line(architecture: Architecture, verdict: Verdict) -> str:
    """Return the row of an architecture."""
    head = f"| {architecture.name} | {architecture.kind} |"
    if not verdict.runs:
        return f"{head} | | | | | | | | {verdict.kind}: {_quoted(verdict.reason)} |"
    units = "/".join(dict.fromkeys(str(run.units) for run in verdict.runs if not run.problem))
    cells = " | ".join(map(_cell, verdict.runs))
    losses, parameters = zip(*(run.adam for run in verdict.runs), strict=True)
    cells += f" | {_differences(max(losses), max(parameters))}"
    return f"{head} {verdict.takes} | {verdict.size:,} | {units} | {cells} | {verdict.kind} |"


def write(page: Path, results: Results) -> None:
    """Put the rows of `results` into the table of `page`, in place of earlier ones of the same architectures."""
    before, _, rest = page.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {row.split(" | ")[0]: row for row in table.strip().splitlines()[2:]}
    rows |= {row.split(" | ")[0]: row for row in (line(*each) for each in results)}
    body = "\n".join([HEAD, "|---" * HEAD.count("|", 1) + "|", *(rows[name] for name in sorted(rows))])
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}")
