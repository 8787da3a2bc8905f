"""`infinity tune`: finds the best section `aio` of the configuration for a drive."""

from __future__ import annotations

import itertools
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
from rich.text import Text

from infinity.cli.console import (
    USAGE,
    Step,
    check_folders,
    check_one_of,
    check_output,
    check_range,
    fail,
    note,
    note_memory_folders,
    one_line_errors,
    picture_formats,
    printable,
    progress,
    say,
    say_json,
    size_of,
    warnings_as_notes,
    write_out,
)
from infinity.cli.drive.heatmap import plot_sweep
from infinity.cli.drive.measure import OPS, SMALLEST_FILE, Bench, Op, Sample
from infinity.cli.drive.pattern import PAGE
from infinity.cli.drive.search import TOLERANCE, Outcome, Result, Setting, Space, Stage, in_flight_limit, search, unrest
from infinity.config import Config
from infinity.errors import StorageError
from infinity.native import _aio
from infinity.sizes import format_size, show_bytes
from infinity.tiers.io import AUTO, ENGINES, open_engine

_ROWS = 12
_UNREST = 0.35
_ENOUGH_ROUNDS = 3
_THREADS = (1, 2, 4)
_WIDE = 80


def run(
    paths: Sequence[Path],
    out: Path | None,
    plot: Path | None,
    seconds: float,
    size: str,
    engine: str,
    as_json: bool,
) -> None:
    """Run the command; see its help."""
    with one_line_errors(), warnings_as_notes():
        nbytes = _checked(paths, out, plot, seconds, size, engine)
        where = space(engine, len(os.sched_getaffinity(0)), len(paths))
        note_memory_folders(paths)
        with progress(shown=not as_json) as step:
            outcome, verified = sweep(paths, nbytes, seconds, where, step)
        if unrest(outcome.results) > _UNREST:
            note(
                f"the same setting varied by {unrest(outcome.results):.0%} between rounds: the drive is busy or "
                "unsteady; run this again while nothing else uses it, or with more --seconds"
            )
        rounds = next(result.rounds for result in outcome.results if result.setting == outcome.best)
        if rounds < _ENOUGH_ROUNDS:
            note(
                f"the best setting was measured only {'once' if rounds == 1 else f'{rounds} times'}, and the table and "
                "the picture show different measurements; give more --seconds for a reliable choice"
            )
        section = aio_section(outcome.best)
        try:
            if as_json:
                say_json({**section, "sweep": [_row(result) for result in outcome.results], "verified_bytes": verified})
            else:
                _show(outcome, verified, section)
        finally:  # write the files even if stdout fails
            problems = [
                write_out(out, json.dumps(section, indent=2) + "\n") if out else "",
                _draw(plot, paths, outcome) if plot else "",
            ]
            if any(problems):
                fail("; ".join(filter(None, problems)))


def _checked(paths: Sequence[Path], out: Path | None, plot: Path | None, seconds: float, size: str, engine: str) -> int:
    """Return the size of the file in bytes; exit with an error if an option is invalid."""
    check_one_of("--engine", engine, ENGINES)
    check_range("--seconds", seconds, 0.1, 86_400)
    nbytes = size_of("--size", size, least=SMALLEST_FILE)
    if len(paths) > _aio.MOST_THREADS:
        fail(f"--path lists {len(paths)} folders, but an engine serves at most {_aio.MOST_THREADS}: pass fewer", USAGE)
    check_folders(paths)
    check_output("--out", out)
    check_output("--plot", plot)
    if plot is not None:
        formats = picture_formats()
        if formats and plot.suffix[1:].lower() not in formats:
            fail(f"--plot {plot} must end in one of {', '.join('.' + each for each in formats)}", USAGE)
        if out is not None and out.resolve() == plot.resolve():
            fail(f"--out and --plot are both {out}: pass two different files", USAGE)
    return nbytes


def sweep(paths: Sequence[Path], nbytes: int, seconds: float, where: Space, step: Step) -> tuple[Outcome, int]:
    """Search `where` and return (outcome, number of verified bytes)."""
    begin = time.perf_counter()
    default = _default(where)
    step(0, f"laying out {format_size(nbytes)}")
    largest = in_flight_limit(float("inf"), nbytes)
    everything = [default, *where.settings(largest)]
    with Bench(paths, nbytes, [setting.workload(op) for setting in everything for op in OPS]) as bench:

        def measure(setting: Setting, op: Op, window: float) -> Sample:
            return bench.run(setting.workload(op), seconds=window)

        def follow(stage: Stage, settings: int, results: Sequence[Result]) -> None:
            fastest = f"; {max(result.speed for result in results):.2f} GB/s" if results else ""
            done = (time.perf_counter() - begin) / seconds
            step(min(1.0, done), f"{stage.name} ({settings}){fastest}")

        outcome = search(
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
        return outcome, bench.verified_bytes


def space(engine: str, cores: int, folders: int) -> Space:
    """Return the space to sweep: the given engine, or all that work; threads up to the number of cores; queue depths as
    the system grants them, with a note if they are smaller. Raises StorageError if no engine works."""
    tried = reversed(AUTO) if engine == "auto" else (engine,)
    engines = tuple(kind for kind in tried if _granted(kind, 1, folders))
    if not engines:
        open_engine(engine, block_size=PAGE, queue_depth=1, threads=folders).close()  # raises the engine's error
    threads = tuple(n for n in _THREADS if n == 1 or (n <= cores and n * folders <= _aio.MOST_THREADS))
    ungranted = Space(threads=threads, engines=engines)
    depths = sorted({*ungranted.depths, Config().aio.queue_depth}, reverse=True)
    grants, short = dict[tuple[str, int, int], int](), list[str]()
    for kind, count in itertools.product(engines, threads):
        for depth in depths:
            granted = _granted(kind, depth, count * folders)
            if granted == depth:
                break  # smaller depths are granted, too
            grants[kind, count, depth] = granted
            if depth == depths[0]:
                short.append(f"{kind}: {granted} of {depth} on {count} thread{'s' * (count > 1)}")
    if short:
        note(
            f"the system grants less queue depth than requested ({'; '.join(short)}), and settings that become equal "
            "are measured once: raise fs.aio-max-nr with sysctl"
        )
    return Space(threads=threads, engines=engines, grants=grants)


def _granted(engine: str, depth: int, threads: int) -> int:
    """Return the queue depth that the system grants to an engine; 0 if the engine does not work."""
    try:
        with open_engine(engine, block_size=PAGE, queue_depth=depth, threads=threads) as opened:
            return opened.queue_depth
    except StorageError:
        return 0


def aio_section(best: Setting) -> dict[str, Any]:
    """Return the section `aio` for `best`, validated as a configuration."""
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


def sweep_table(outcome: Outcome, rows: int = _ROWS, width: int = 80) -> Table:
    """Return a table of the first `rows` results, and always of the best, which is marked, and the default.

    width: columns of the terminal; below `_WIDE`, headings are shorter and the column of runs is omitted.
    """
    wide = width >= _WIDE
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1 if wide else 0))
    names = ["block", "depth", "threads" if wide else "thr", "engine", "mixed", "read", "write"]
    names += ["CPU s/GB", "runs", ""] if wide else ["CPU", ""]
    for name in names:
        shown.add_column(name, justify="left" if name in ("engine", "") else "right", no_wrap=True)
    best = outcome.best
    for number, result in enumerate(outcome.results):
        setting = result.setting
        default = setting == outcome.baseline
        if number >= rows and setting != best and not default:
            continue
        cells = [format_size(setting.block_size), str(setting.queue_depth), str(setting.threads), setting.engine]
        speeds = (result.gb_per_s(op) for op in ("mixed", "read", "write"))
        cells += ["" if speed is None else f"{speed:.2f}" for speed in speeds]
        cells += [f"{result.cpu_s_per_gb:.3f}", *([str(result.rounds)] if wide else [])]
        cells += ["← best" if setting == best else "default" if default else ""]
        shown.add_row(*cells, style="bold green" if setting == best else "")
    return shown


def _default(where: Space) -> Setting:
    """Return the configuration's defaults, with the engine that "auto" selects."""
    aio = Config().aio
    engine = next(kind for kind in AUTO if kind in where.engines)
    return where.granted(Setting(aio.threads, aio.queue_depth, aio.block_size, engine))


def _show(outcome: Outcome, verified: int, section: dict[str, Any]) -> None:
    legend = Text(
        f"GB/s of {len(outcome.results)} settings, finalists first\n"
        "mixed: sum of half reads and half writes; CPU: seconds per GB\n"
        f"best: the cheapest setting within {TOLERANCE:.0%} of the fastest\n"
    )
    legend.append("verified", style="green")
    legend.append(f": {show_bytes(verified)} read back and compared, byte by byte\n")
    say(sweep_table(outcome, width=Console().width), legend, json.dumps(section, indent=2))


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


def _draw(path: Path, paths: Sequence[Path], outcome: Outcome) -> str:
    """Draw the sweep. Return the error text, or "" on success or without matplotlib."""
    best = outcome.best
    figures = {result.setting: result.gb_per_s("mixed") or 0.0 for result in outcome.first}
    chosen = (
        f"chosen from the finalists: {format_size(best.block_size)} × {best.queue_depth}, "
        f"{best.threads} thread{'s' * (best.threads > 1)}, {best.engine}"
    )
    title = "Mixed reads and writes of 10 MiB, GB/s"
    subtitle = f"{printable(', '.join(map(str, paths)))}; {chosen}"
    try:
        plot_sweep(path, figures, best=best, title=title, subtitle=subtitle)
    except ImportError:
        note("no picture, since matplotlib is missing: pip install matplotlib")
    except Exception as error:  # noqa: BLE001 - no error of a picture library may lose the result
        return f"--plot {path} was not drawn: {getattr(error, 'strerror', None) or error}"
    else:
        typer.echo(f"drawn to {printable(path)}", err=True)
    return ""
