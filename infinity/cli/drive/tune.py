"""`infinity tune`: finds the section `aio` of the configuration that suits a drive."""

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
    check_one_of,
    check_range,
    fail,
    note,
    one_line_errors,
    printable,
    progress,
    say,
    say_json,
    size_of,
    warnings_as_notes,
)
from infinity.cli.drive.heatmap import Cell, picture_formats, plot_sweep
from infinity.cli.drive.measure import OPS, Bench, Op, Sample
from infinity.cli.drive.pattern import PAGE
from infinity.cli.drive.search import TOLERANCE, Outcome, Result, Setting, Space, Stage, in_flight_limit, search, unrest
from infinity.cli.paths import check_folders, check_output, note_what_is_memory
from infinity.config import Config
from infinity.errors import StorageError
from infinity.native import _aio
from infinity.observe.units import show_bytes
from infinity.sizes import format_size
from infinity.tiers.io import AUTO, ENGINES, open_engine

_SMALLEST_SIZE = 16 << 20
_ROWS = 12
_UNREST = 0.35
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
    """The command, as its help describes it."""
    with one_line_errors(), warnings_as_notes():
        nbytes = _checked(paths, out, plot, seconds, size, engine)
        where = space(engine, cores(), len(paths))
        note_what_is_memory(paths)
        with progress(shown=not as_json) as step:
            found, verified = sweep(paths, nbytes, seconds, where, step)
        if unrest(found.results) > _UNREST:
            note(
                f"one and the same setting varied by {unrest(found.results):.0%} from round to round: the drive "
                "was busy, or is unsteady; run this again while nothing else uses it, or for more --seconds"
            )
        section = aio_section(found.best)
        try:
            if as_json:
                say_json({**section, "sweep": [_row(result) for result in found.results], "verified_bytes": verified})
            else:
                _show(found, verified, section)
        finally:  # a result that cannot be printed can be written all the same
            problems = [_write(out, section) if out else "", _draw(plot, paths, found) if plot else ""]
            if any(problems):
                fail("; ".join(filter(None, problems)))


def _checked(paths: Sequence[Path], out: Path | None, plot: Path | None, seconds: float, size: str, engine: str) -> int:
    """The bytes of the file; ends the command where an option makes no sense or cannot be followed."""
    check_one_of("--engine", engine, ENGINES)
    check_range("--seconds", seconds, 0.1, 86_400)
    nbytes = size_of("--size", size)
    if nbytes < _SMALLEST_SIZE:
        fail(f"--size must be {format_size(_SMALLEST_SIZE)} at least, not {format_size(nbytes)}", USAGE)
    if len(paths) > _aio.MOST_THREADS:
        fail(f"--path is given {len(paths)} times, and an engine serves {_aio.MOST_THREADS} folders at most", USAGE)
    check_folders(paths)
    if out is not None:
        check_output("--out", out)
    if plot is not None:
        check_output("--plot", plot)
        formats = picture_formats()
        if formats and plot.suffix[1:].lower() not in formats:
            fail(f"--plot {plot} must end in one of {', '.join('.' + each for each in formats)}", USAGE)
        if out is not None and out.resolve() == plot.resolve():
            fail(f"--out and --plot are both {out}: name two files", USAGE)
    return nbytes


def sweep(paths: Sequence[Path], nbytes: int, seconds: float, where: Space, step: Step) -> tuple[Outcome, int]:
    """What a search of `where` finds, and how many bytes were verified."""
    begin = time.perf_counter()
    default = _default(where)
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


def space(engine: str, cores: int, folders: int) -> Space:
    """What is swept: the engine that was asked for, or all that work; threads as far as there are cores; and what queue
    depths the system grants, with a note where these are less.  Raises StorageError where no engine works."""
    tried = reversed(AUTO) if engine == "auto" else (engine,)
    engines = tuple(kind for kind in tried if _granted(kind, 1, folders))
    if not engines:
        open_engine(engine, block_size=PAGE, queue_depth=1, threads=folders).close()  # its error says why
    threads = tuple(n for n in _THREADS if n == 1 or (n <= cores and n * folders <= _aio.MOST_THREADS))
    found = Space(threads=threads, engines=engines)
    depths = sorted({*found.depths, Config().aio.queue_depth}, reverse=True)
    grants, short = dict[tuple[str, int, int], int](), list[str]()
    for kind, count in itertools.product(engines, threads):
        for depth in depths:
            granted = _granted(kind, depth, count * folders)
            if granted == depth:
                break  # so are all that are less deep
            grants[kind, count, depth] = granted
            if depth == depths[0]:
                short.append(f"{kind}: {granted} of {depth} on {count} thread{'s' * (count > 1)}")
    if short:
        note(
            f"the system grants less queue depth than is swept ({'; '.join(short)}); settings that come to the same "
            "are measured once: raise fs.aio-max-nr with sysctl"
        )
    return Space(threads=threads, engines=engines, grants=grants)


def _granted(engine: str, depth: int, threads: int) -> int:
    """The queue depth that an engine gets of the system; 0 where there is none to be had."""
    try:
        with open_engine(engine, block_size=PAGE, queue_depth=depth, threads=threads) as opened:
            return opened.queue_depth
    except StorageError:
        return 0


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


def sweep_table(found: Outcome, rows: int = _ROWS, width: int = 80) -> Table:
    """The first `rows` of the results, the best of them marked; it and the default are shown in any case.

    In less than `_WIDE` of `width` columns with shorter headings, and without how many runs there were."""
    wide = width >= _WIDE
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1 if wide else 0))
    names = ["block", "depth", "threads" if wide else "thr", "engine", "mixed", "read", "write"]
    names += ["CPU s/GB", "runs", ""] if wide else ["CPU", ""]
    for name in names:
        shown.add_column(name, justify="left" if name in ("engine", "") else "right", no_wrap=True)
    best = found.best
    for number, result in enumerate(found.results):
        setting = result.setting
        default = setting == found.baseline
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
    """The configuration's own values, on the engine that its "auto" comes to."""
    aio = Config().aio
    engine = next(kind for kind in AUTO if kind in where.engines)
    return where.granted(Setting(aio.threads, aio.queue_depth, aio.block_size, engine))


def _show(found: Outcome, verified: int, section: dict[str, Any]) -> None:
    words = Text(
        f"GB/s of {len(found.results)} settings, finalists first\n"
        "mixed: half reads, half writes, in sum; CPU: seconds per GB\n"
        f"best: the cheapest of those within {TOLERANCE:.0%} of the fastest\n"
    )
    words.append("verified", style="green")
    words.append(f": {show_bytes(verified)} read back, each byte as it was written\n")
    say(sweep_table(found, width=Console().width), words, json.dumps(section, indent=2))


def _write(path: Path, section: dict[str, Any]) -> str:
    """What went wrong."""
    try:
        path.write_text(json.dumps(section, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return f"--out {path} was not written: {error.strerror or error}"
    typer.echo(f"written to {printable(path)}", err=True)
    return ""


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


def _draw(path: Path, paths: Sequence[Path], found: Outcome) -> str:
    """What went wrong."""
    best = found.best
    figures = {_cell(result.setting): result.gb_per_s("mixed") or 0.0 for result in found.first}
    chosen = (
        f"chosen of the finalists: {format_size(best.block_size)} × {best.queue_depth}, "
        f"{best.threads} thread{'s' * (best.threads > 1)}, {best.engine}"
    )
    title = "Mixed reads and writes of 10 MiB, GB/s"
    subtitle = f"{printable(', '.join(map(str, paths)))}; {chosen}"
    try:
        plot_sweep(path, figures, best=_cell(best), title=title, subtitle=subtitle)
    except ImportError:
        note("no picture, since matplotlib is missing: pip install matplotlib")
    except Exception as error:  # noqa: BLE001 - whatever a format's own library raises, the result is not lost for it
        return f"--plot {path} was not drawn: {getattr(error, 'strerror', None) or error}"
    else:
        typer.echo(f"drawn to {printable(path)}", err=True)
    return ""


def _cell(setting: Setting) -> Cell:
    return Cell(setting.engine, setting.threads, setting.queue_depth, setting.block_size)
