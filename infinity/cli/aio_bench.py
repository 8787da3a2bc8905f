"""`infinity aio-bench`: how fast a drive is through the engine that training uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from infinity.cli.console import (
    USAGE,
    Step,
    check_folders,
    check_one_of,
    check_range,
    fail,
    one_line_errors,
    progress,
    size_of,
    warnings_as_notes,
)
from infinity.observe.units import show_bytes
from infinity.sizes import format_size
from infinity.tiers.io import ENGINES
from infinity.tiers.measure import OPS, Bench, Op, Sample, Workload, percentile
from infinity.tiers.pattern import PAGE
from infinity.tiers.stripe import stripe_chunk


@dataclass(frozen=True)
class Task:
    """What is to be measured; the options as they were given, checked."""

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
    """The command, as its help describes it."""
    task = _checked(paths, op, size, block_size, queue_depth, threads, engine, runs)
    with one_line_errors(), warnings_as_notes():
        with progress(shown=not as_json) as step:
            facts = measure(task, step)
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
        else:
            Console().print(table(facts), _verified(facts), sep="")


def measure(task: Task, step: Step) -> dict[str, Any]:
    """All runs of `task`, and a look at every byte of the file after them; of JSON types."""
    work = task.workload
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


def table(facts: dict[str, Any]) -> Table:
    """`facts` for people."""
    threads, runs, paths = facts["threads"], facts["runs"], facts["paths"]
    where = f"on each of {threads} threads" if threads > 1 else "on 1 thread"
    where += " for each folder" if len(paths) > 1 else ""
    title = (
        f"[bold]{facts['op']}, {format_size(facts['size'])} in {', '.join(paths)}[/bold]\n"
        f"blocks of {format_size(facts['block_size'])}, {facts['queue_depth']} in flight {where}\n"
        f"{facts['engine']}, {'direct' if facts['direct'] else 'buffered'}, "
        f"{runs} run{'s' * (runs > 1)}"
    )
    shown = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("GB/s median", "min", "max", "IOPS", "CPU s per GB", "p50 of a block", "p99")
    for name in names:
        shown.add_column(name, justify="right", style="bold cyan" if name == names[0] else "", no_wrap=True)
    speed, latency = facts["gb_per_s"], facts["latency_ms"]
    cells = [f"{speed[key]:.2f}" for key in ("median", "min", "max")]
    cells += [f"{facts['iops']:,.0f}", f"{facts['cpu_s_per_gb']:.3f}"]
    cells += [f"{latency[key]:.3g} ms" if latency[key] is not None else "–" for key in ("p50", "p99")]
    shown.add_row(*cells)
    return shown


def _verified(facts: dict[str, Any]) -> str:
    return f"[green]verified[/green]: {show_bytes(facts['verified_bytes'])} read back, each byte as it was written"


def _facts(task: Task, samples: Sequence[Sample], bench: Bench) -> dict[str, Any]:
    work, speeds = task.workload, [sample.gb_per_s for sample in samples]
    latencies = [bucket for sample in samples for bucket in sample.latencies]
    found = {name: percentile(latencies, fraction) for name, fraction in (("p50", 0.5), ("p99", 0.99))}
    return {
        "op": work.op,
        "size": task.size,
        "block_size": work.block_size,
        "queue_depth": work.queue_depth,
        "threads": work.threads,
        "engine": samples[0].backend,
        "gb_per_s": {"min": min(speeds), "median": median(speeds), "max": max(speeds)},
        "iops": median(sample.iops for sample in samples),
        "cpu_s_per_gb": median(sample.cpu_s_per_gb for sample in samples),
        "latency_ms": {name: None if value != value else value for name, value in found.items()},
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
    least = 2 * block
    if total < least:
        fail(f"--size must be two blocks at least ({format_size(least)}), not {format_size(total)}", USAGE)
    check_range("--queue-depth", depth, 1, 65536)
    check_range("--threads", threads, 1, 64)
    check_range("--runs", runs, 1, 10_000)
    check_folders(paths)
    return Task(paths, total, runs, Workload(cast(Op, op), block, depth, threads, engine))
