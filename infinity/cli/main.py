"""The `infinity` command.

Commands import what they need when they run, so that `infinity --help` is quick and `infinity report` runs where torch
or a native part does not load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Paths = Annotated[
    list[Path],
    typer.Option("--path", help="Folder on the drive; give it again for each further drive, to stripe over all."),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")]
EngineName = Annotated[str, typer.Option("--engine", help="auto, libaio or io_uring.")]


@app.callback()
def infinity() -> None:
    """Train and run PyTorch models that are larger than memory."""


@app.command()
def report(
    path: Annotated[
        list[Path] | None,
        typer.Option("--path", help="Folder to look at; by default, the one for temporary files and the current one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what this installation finds: versions, native parts, limits, CUDA, folders (elsewhere: ds_report).

    Exits with 1 if a part that training needs does not work.
    """
    from infinity.cli.report import broken, collect, lines

    facts = collect(path)
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(lines(facts)))
    raise typer.Exit(1 if broken(facts) else 0)


@app.command("aio-bench")
def aio_bench(
    path: Paths,
    op: Annotated[str, typer.Option(help="read, write or mixed.")] = "read",
    size: Annotated[str, typer.Option(help="Of the file, and of what a run moves.")] = "1GiB",
    block_size: Annotated[str, typer.Option(help="Of one request to the drive, a multiple of 4096 bytes.")] = "1MiB",
    queue_depth: Annotated[int, typer.Option(help="Blocks in flight, for each thread.")] = 32,
    threads: Annotated[int, typer.Option(help="Threads that submit, for each folder.")] = 1,
    engine: EngineName = "auto",
    runs: Annotated[int, typer.Option(help="How often it is measured.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure a drive through the engine that training uses, and check every byte (elsewhere: ds_io).

    The file is anonymous: nothing is left on disk, however the command ends.
    """
    from infinity.cli.aio_bench import run

    run(path, op, size, block_size, queue_depth, threads, engine, runs, as_json)


@app.command()
def tune(
    path: Paths,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the section aio to.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw the sweep to; needs matplotlib.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 60,
    size: Annotated[str, typer.Option(help="Of the file that is measured with.")] = "1GiB",
    engine: EngineName = "auto",
    as_json: Json = False,
) -> None:
    """Find the section aio of the configuration that suits a drive (elsewhere: ds_nvme_tune).

    Sweeps block size, queue depth, threads and engine, and prefers the cheapest setting of those that are as fast as
    the fastest. The file is anonymous: nothing is left on disk, however the command ends.
    """
    from infinity.cli.tune import run

    run(path, out, plot, seconds, size, engine, as_json)


if __name__ == "__main__":
    app()
