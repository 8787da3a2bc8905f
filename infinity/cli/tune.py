"""`infinity tune`: finds the section `aio` of the configuration that suits a drive."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from infinity.cli.search import TOLERANCE, Outcome, Result, Setting, Space, Stage, in_flight_limit, search, unrest
from infinity.config import Config
from infinity.observe.heatmap import Cell, plot_sweep
from infinity.observe.units import show_bytes
from infinity.sizes import format_size
from infinity.tiers.io import ENGINES, io_uring_state
from infinity.tiers.measure import OPS, Bench, Op, Sample

_SMALLEST_SIZE = 16 << 20
_ROWS = 12
_UNREST = 0.35
_THREADS = (1, 2, 4)


def run(
    paths: Sequence[Path],
    out: Path | None,
    plot: Path | None,
    seconds: float,
    size: str,
    engine: str,
    as_json: bool,
) -> None:
    """The command, as its help describes it."""
    check_one_of("--engine", engine, ENGINES)
    check_range("--seconds", seconds, 0.1, 86_400)
    nbytes = size_of("--size", size)
    if nbytes < _SMALLEST_SIZE:
        fail(f"--size must be {format_size(_SMALLEST_SIZE)} at least, not {format_size(nbytes)}", USAGE)
    check_folders(paths)
    for file in (out, plot):
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            fail(f"{file} cannot be written: name a file in a folder that exists and is writable", USAGE)

    with one_line_errors(), warnings_as_notes():
        with progress(shown=not as_json) as step:
            found, verified = sweep(paths, nbytes, seconds, space(engine, cores()), step)
        section = aio_section(found.best)
        if unrest(found.results) > _UNREST:
            typer.echo(
                f"note: one and the same setting varied by {unrest(found.results):.0%} from round to round: the drive "
                "was busy, or is unsteady; run this again while nothing else uses it, or for more --seconds",
                err=True,
            )
        if out is not None:
            out.write_text(json.dumps(section, indent=2) + "\n", encoding="utf-8")
        if plot is not None:
            _plot(plot, paths, found)
        if as_json:
            sweep_rows = [_row(result) for result in found.results]
            typer.echo(json.dumps({**section, "sweep": sweep_rows, "verified_bytes": verified}, indent=2))
        else:
            _show(found, verified, section, out)


def sweep(paths: Sequence[Path], nbytes: int, seconds: float, where: Space, step: Step) -> tuple[Outcome, int]:
    """What a search of `where` finds, and how many bytes were verified."""
    begin = time.perf_counter()
    default = _default(where.engines)
    step(0, f"laying out {format_size(nbytes)}")
    largest = in_flight_limit(float("inf"), nbytes)
    everything = [default, *where.settings(largest)]
    with Bench(paths, nbytes, [setting.workload(op) for setting in everything for op in OPS]) as bench:

        def measure(setting: Setting, op: Op, window: float) -> Sample:
            return bench.run(setting.workload(op), seconds=window)

        def follow(stage: Stage, settings: int, found: Sequence[Result]) -> None:
            fastest = f"; {max(result.speed for result in found):.2f} GB/s" if found else ""
            done = (time.perf_counter() - begin) / seconds
            step(min(1.0, done), f"{stage.name} ({settings}){fastest}")

        found = search(
            where,
            measure,
            baseline=default,
            limit=in_flight_limit(bench.layout.gb_per_s, nbytes),
            seconds=seconds - (time.perf_counter() - begin),
            clock=time.perf_counter,
            follow=follow,
        )
        step(1, "verifying")
        bench.verify()
        return found, bench.verified_bytes


def space(engine: str, cores: int) -> Space:
    """What is swept: the engine that was asked for, or all that work; threads as far as there are cores."""
    if engine == "auto":
        engines: tuple[str, ...] = ("libaio",) if io_uring_state() else ("libaio", "io_uring")
    else:
        engines = (engine,)
    return Space(threads=tuple(count for count in _THREADS if count == 1 or count <= cores), engines=engines)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def aio_section(best: Setting) -> dict[str, Any]:
    """The part of a configuration that says `best`; checked by the configuration itself."""
    section = {
        "aio": {
            "block_size": best.block_size,
            "queue_depth": best.queue_depth,
            "intra_op_parallelism": best.threads,
            "engine": best.engine,
        }
    }
    Config.load(section)
    return section


def sweep_table(found: Outcome, rows: int = _ROWS) -> Table:
    """The first `rows` of the results, the best of them marked; it and the default are shown in any case."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("block", "depth", "threads", "engine", "mixed", "read", "write", "CPU s/GB", "runs", ""):
        shown.add_column(name, justify="left" if name in ("engine", "") else "right", no_wrap=True)
    best = found.best
    for number, result in enumerate(found.results):
        setting = result.setting
        default = setting == _default((setting.engine,))
        if number >= rows and setting != best and not default:
            continue
        cells = [format_size(setting.block_size), str(setting.queue_depth), str(setting.threads), setting.engine]
        speeds = (result.gb_per_s(op) for op in ("mixed", "read", "write"))
        cells += ["" if speed is None else f"{speed:.2f}" for speed in speeds]
        note = "← best" if setting == best else "default" if default else ""
        cells += [f"{result.cpu_s_per_gb:.3f}", str(result.rounds), note]
        shown.add_row(*cells, style="bold green" if setting == best else "")
    return shown


def _default(engines: Sequence[str]) -> Setting:
    """The configuration's own values, on the first of `engines`."""
    aio = Config().aio
    return Setting(aio.intra_op_parallelism, aio.queue_depth, aio.block_size, engines[0])


def _show(found: Outcome, verified: int, section: dict[str, Any], out: Path | None) -> None:
    console = Console()
    console.print(sweep_table(found))
    console.print(
        f"GB/s of {len(found.results)} settings, finalists first; mixed: half reads, half writes, in sum\n"
        f"best: the cheapest of those within {TOLERANCE:.0%} of the fastest\n"
        f"[green]verified[/green]: {show_bytes(verified)} read back, each byte as it was written\n"
    )
    typer.echo(json.dumps(section, indent=2))
    if out is not None:
        typer.echo(f"written to {out}", err=True)


def _row(result: Result) -> dict[str, Any]:
    setting = result.setting
    return {
        "block_size": setting.block_size,
        "queue_depth": setting.queue_depth,
        "intra_op_parallelism": setting.threads,
        "engine": setting.engine,
        "gb_per_s": {op: result.gb_per_s(op) for op in OPS},
        "cpu_s_per_gb": result.cpu_s_per_gb,
        "rounds": result.rounds,
    }


def _plot(path: Path, paths: Sequence[Path], found: Outcome) -> None:
    best = found.best
    figures = {_cell(result.setting): result.gb_per_s("mixed") or 0.0 for result in found.first}
    chosen = (
        f"chosen of the finalists: {format_size(best.block_size)} × {best.queue_depth}, "
        f"{best.threads} thread{'s' * (best.threads > 1)}, {best.engine}"
    )
    title, subtitle = "Mixed reads and writes of 10 MiB, GB/s", f"{', '.join(map(str, paths))}; {chosen}"
    try:
        plot_sweep(path, figures, best=_cell(best), title=title, subtitle=subtitle)
    except ImportError:
        typer.echo("note: no picture, since matplotlib is missing: pip install matplotlib", err=True)
    else:
        typer.echo(f"drawn to {path}", err=True)


def _cell(setting: Setting) -> Cell:
    return Cell(setting.engine, setting.threads, setting.queue_depth, setting.block_size)
