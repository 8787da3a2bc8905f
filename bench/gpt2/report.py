"""The closing table of a training run. Every number in it was measured, or is the size of something allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from gpt2.duration import show_seconds
from gpt2.meter import Totals
from infinity.sizes import show_bytes, show_count


def closing_table(
    totals: Totals,
    *,
    parameters: int,
    tier_bytes: Mapping[str, int],
    losses: Mapping[str, float],
    job_seconds: float | None = None,
    sample_seconds: float = 0.0,
    plain_bytes: int | None = None,
) -> Table:
    """Return the closing table of a run.

    `tier_bytes` is the size of each tier by name; `losses` are the ones worth naming ("held-out": 1.9); `job_seconds`
    is the duration of the whole job, if the caller knows it; `sample_seconds` is that of its sample; `plain_bytes` is
    the host memory that a plain loop needs, if the caller knows it.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("figure", justify="right", no_wrap=True)
    table.add_column("remark", style="dim")
    for title, rows in (
        ("learning", _learning(totals, parameters, losses)),
        ("memory", _memory(totals, parameters, tier_bytes, plain_bytes)),
        ("NVMe traffic", _traffic(totals, parameters)),
        ("time", _time(totals, job_seconds, sample_seconds)),
    ):
        table.add_row(Text(title, "bold cyan"))
        for what, figure, remark in rows:
            table.add_row(f"  {what}", figure, remark)
    return table


def output_lines(outputs: Sequence[tuple[str, str]]) -> list[str]:
    """A title, then one line for each (what, path) of the files left. Outside the table, which would break paths."""
    width = max((len(what) for what, _ in outputs), default=0)
    return ["left on disk", *(f"  {what:<{width}}  {path}" for what, path in outputs)] if outputs else []


Row = tuple[str, str, str]


def _learning(totals: Totals, parameters: int, losses: Mapping[str, float]) -> list[Row]:
    rows = [("parameters", show_count(parameters), f"{parameters:,}")]
    rows += [("tokens", show_count(totals.tokens), f"{totals.steps:,} steps")]
    return rows + [(f"loss, {name}", f"{loss:.3f}", "nats a token") for name, loss in losses.items()]


def _memory(totals: Totals, parameters: int, tier_bytes: Mapping[str, int], plain_bytes: int | None) -> list[Row]:
    rows = [
        (f"{tier} tier", show_bytes(count), f"{count / parameters:.2f} bytes a parameter")
        for tier, count in tier_bytes.items()
    ]
    rows += [("peak host memory", show_bytes(totals.host_peak_bytes), "resident, with Python and torch")]
    if plain_bytes is not None:
        share = totals.host_peak_bytes / plain_bytes
        rows += [("a plain loop's need", show_bytes(plain_bytes), f"in host memory; this run took {share:.0%} of it")]
    if totals.device_peak_bytes:
        rows += [("peak device memory", show_bytes(totals.device_peak_bytes), "allocated")]
    return rows


def _traffic(totals: Totals, parameters: int) -> list[Row]:
    rows = []
    for what, count in (("read", totals.nvme_bytes_read), ("written", totals.nvme_bytes_written)):
        a_step = count / max(1, totals.steps)
        speed = count / totals.seconds if totals.seconds else 0.0
        rows += [(f"{what} per parameter and step", f"{a_step / parameters:.2f} B", f"{show_bytes(a_step)} a step")]
        rows += [(f"{what} in all", show_bytes(count), f"{show_bytes(speed)}/s on average")]
    return rows


def _time(totals: Totals, job_seconds: float | None, sample_seconds: float) -> list[Row]:
    steps, seconds = max(1, totals.steps), totals.seconds or 1e-9

    def row(what: str, spent: float, remark: str) -> Row:
        return what, f"{spent / seconds:.0%}", f"{spent / steps * 1e3:,.0f} ms a step, {show_seconds(spent)}{remark}"

    whole = [("whole job", show_seconds(job_seconds), "start-up, evaluation and saving too")] if job_seconds else []
    whole += [("sample", show_seconds(sample_seconds), "")] if sample_seconds else []
    return [
        *whole,
        (
            "steps",
            f"{seconds / steps:.3f} s",
            f"a step; {totals.tokens / seconds:,.0f} tokens/s, {show_seconds(seconds)} in all",
        ),
        row("compute", seconds - totals.wait_seconds, ", Python too"),
        row("I/O waited for", totals.wait_seconds, ""),
        row("update", totals.update_seconds, ", in parallel"),
    ]
