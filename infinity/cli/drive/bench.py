"""`infinity aio-bench`: measures a drive through training's I/O engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from infinity.cli.console import (
    USAGE,
    Step,
    check_folders,
    check_one_of,
    check_range,
    fail,
    note,
    note_memory_folders,
    one_line_errors,
    printable,
    progress,
    say,
    say_json,
    size_of,
    warnings_as_notes,
)
from infinity.cli.drive.measure import OPS, Bench, Op, Sample, Workload, percentile
from infinity.cli.drive.pattern import PAGE
from infinity.native import _aio
from infinity.plan.io import stripe_chunk
from infinity.sizes import format_size, show_bytes
from infinity.tiers.io import ENGINES, open_engine


@dataclass(frozen=True)
class Task:
    """A measurement: the command's options, validated."""

    paths: Sequence[Path]
    size: int
    runs: int
    workload: Workload


def run(
    paths: Sequence[Path],
    op: str,
    size: str,
    block_size: str,
    queue_depth: int,
    threads: int,
    engine: str,
    runs: int,
    as_json: bool,
) -> None:
    """Run the command; see its help."""
    with one_line_errors(), warnings_as_notes():
        task = _checked(paths, op, size, block_size, queue_depth, threads, engine, runs)
        note_memory_folders(task.paths)
        with progress(shown=not as_json) as step:
            facts = measure(task, step)
        if as_json:
            say_json(facts)
        else:
            say(*shown(facts))


def measure(task: Task, step: Step) -> dict[str, Any]:
    """Perform all runs of `task`, verify the file, and return the results in JSON types."""
    work = granted(task.workload, len(task.paths))
    chunk = stripe_chunk(work.block_size)
    steps = task.runs + 2
    step(0, f"laying out {format_size(task.size)}")
    with Bench(task.paths, task.size, [work], chunk=chunk) as bench:
        samples: list[Sample] = []
        for number in range(task.runs):
            last = f"; {samples[-1].gb_per_s:.2f} GB/s" if samples else ""
            step((number + 1) / steps, f"measuring{last}")
            samples.append(bench.run(work, nbytes=task.size))
        step((task.runs + 1) / steps, "verifying")
        bench.verify()
        return _facts(task, samples, bench)


def granted(work: Workload, folders: int) -> Workload:
    """Return `work` with the queue depth that the system grants, with a note if it is smaller.

    An engine that does not work thus fails before a file is laid out.
    """
    threads = work.threads * folders
    with open_engine(work.engine, block_size=work.block_size, queue_depth=work.queue_depth, threads=threads) as engine:
        depth = engine.queue_depth
    if depth < work.queue_depth:
        note(
            f"the system granted a queue depth of {depth} instead of {work.queue_depth}, which all runs use: raise "
            "fs.aio-max-nr with sysctl"
        )
    return replace(work, queue_depth=depth)


def shown(facts: dict[str, Any]) -> list[RenderableType]:
    """Return `facts` as tables and text for the terminal."""
    threads, runs, paths = facts["threads"], facts["runs"], facts["paths"]
    where = f"on each of {threads} threads" if threads > 1 else "on 1 thread"
    where += " for each folder" if len(paths) > 1 else ""
    asked = f" ({facts['queue_depth_asked']} requested)" if "queue_depth_asked" in facts else ""
    title = Text(f"{facts['op']}, {format_size(facts['size'])} in {printable(', '.join(paths))}", style="bold")
    how = Text(
        f"blocks of {format_size(facts['block_size'])}, {facts['queue_depth']} in flight{asked} {where}\n"
        f"{facts['engine']}, {'direct' if facts['direct'] else 'buffered'}, {runs} run{'s' * (runs > 1)}\n"
    )
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(no_wrap=True)
    speed, latency = facts["gb_per_s"], facts["latency_ms"]
    rows.add_row(
        "GB/s median", f"{speed['median']:.2f}", f"{speed['min']:.2f} to {speed['max']:.2f}", style="bold cyan"
    )
    rows.add_row("IOPS", f"{facts['iops']:,.0f}")
    rows.add_row("CPU s per GB", f"{facts['cpu_s_per_gb']:.3f}")
    for name in ("p50", "p99"):
        milliseconds = latency[name]
        rows.add_row(f"{name} of a block", f"{milliseconds:.3g} ms" if milliseconds is not None else "–")
    verified = Text("\nverified", style="green")
    verified.append(f": {show_bytes(facts['verified_bytes'])} read back and compared, byte by byte", style="default")
    return [title, how, rows, verified]


def _facts(task: Task, samples: Sequence[Sample], bench: Bench) -> dict[str, Any]:
    work, speeds = task.workload, [sample.gb_per_s for sample in samples]
    latencies = [bucket for sample in samples for bucket in sample.latencies]
    percentiles = {name: percentile(latencies, fraction) for name, fraction in (("p50", 0.5), ("p99", 0.99))}
    granted = min(sample.queue_depth for sample in samples)
    return {
        "op": work.op,
        "size": task.size,
        "block_size": work.block_size,
        "queue_depth": granted,
        **({"queue_depth_asked": work.queue_depth} if granted != work.queue_depth else {}),
        "threads": work.threads,
        "engine": samples[0].backend,
        "gb_per_s": {"min": min(speeds), "median": median(speeds), "max": max(speeds)},
        "iops": median(sample.iops for sample in samples),
        "cpu_s_per_gb": median(sample.cpu_s_per_gb for sample in samples),
        "latency_ms": {name: None if value != value else value for name, value in percentiles.items()},
        "paths": [str(path) for path in task.paths],
        "runs": task.runs,
        "direct": bench.direct,
        "verified_bytes": bench.verified_bytes,
    }


def _checked(
    paths: Sequence[Path], op: str, size: str, block_size: str, depth: int, threads: int, engine: str, runs: int
) -> Task:
    check_one_of("--op", op, OPS)
    check_one_of("--engine", engine, ENGINES)
    total, block = size_of("--size", size), size_of("--block-size", block_size)
    if block <= 0 or block % PAGE:
        fail(f"--block-size must be a multiple of {PAGE}, such as {max(1, block // PAGE) * PAGE}, not {block}", USAGE)
    if block > _aio.LARGEST_BLOCK:
        fail(f"--block-size must be at most {format_size(_aio.LARGEST_BLOCK)}, not {format_size(block)}", USAGE)
    smallest = 2 * block
    if total < smallest:
        fail(f"--size must be at least two blocks ({format_size(smallest)}), not {format_size(total)}", USAGE)
    check_range("--queue-depth", depth, 1, 65536)
    check_range("--threads", threads, 1, 64)
    if threads * len(paths) > _aio.MOST_THREADS:
        fail(
            f"--threads {threads} for each of {len(paths)} folders are {threads * len(paths)}, and an engine has at "
            f"most {_aio.MOST_THREADS}: lower --threads, or pass fewer folders",
            USAGE,
        )
    check_range("--runs", runs, 1, 10_000)
    check_folders(paths)
    return Task(paths, total, runs, Workload(cast(Op, op), block, depth, threads, engine))
