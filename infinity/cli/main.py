"""The `infinity` command.

Commands import what they need when they run, so that `infinity --help` is quick and `infinity report` runs where torch
or a native part does not load.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core


class _Commands(typer.core.TyperGroup):
    """Commands whose help cannot be written end with one line, too."""

    def main(self, *arguments: Any, **how: Any) -> Any:
        try:
            return super().main(*arguments, **how)
        except OSError as error:
            from infinity.cli.console import stdout_failed

            try:
                stdout_failed(error)
            except typer.Exit as ended:
                sys.exit(ended.exit_code)


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Paths = Annotated[
    list[Path],
    typer.Option("--path", help="Folder on the drive; give it again for each further drive, to stripe over all."),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")]
EngineName = Annotated[str, typer.Option("--engine", help="auto, libaio or io_uring.")]


def _version(wanted: bool) -> None:
    if wanted:
        from infinity import __version__
        from infinity.cli.console import say

        say(f"infinity {__version__}")
        raise typer.Exit()


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def infinity(version: Version = False) -> None:
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
    from infinity.cli.console import one_line_errors, say, say_json, warnings_as_notes
    from infinity.cli.report import broken, collect, lines

    with one_line_errors(), warnings_as_notes():
        facts = collect(path)
        if as_json:
            say_json(facts)
        else:
            say("\n".join(lines(facts)))
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
    """Measure a drive through the engine that training uses, and check every byte read (elsewhere: ds_io).

    A run moves whole requests, of a block or 2 MiB. The file is anonymous: nothing is left on disk,
    however the command ends.
    """
    from infinity.cli.drive.bench import run

    run(path, op, size, block_size, queue_depth, threads, engine, runs, as_json)


@app.command()
def tune(
    path: Paths,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the section aio to.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG or other picture to draw the sweep to; needs matplotlib.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 60,
    size: Annotated[str, typer.Option(help="Of the file that is measured with.")] = "1GiB",
    engine: EngineName = "auto",
    as_json: Json = False,
) -> None:
    """Find the section aio of the configuration that suits a drive (elsewhere: ds_nvme_tune).

    Sweeps block size, queue depth, threads and engine, and prefers the cheapest setting of those that are as fast as
    the fastest. The file is anonymous: nothing is left on disk, however the command ends.
    """
    from infinity.cli.drive.tune import run

    run(path, out, plot, seconds, size, engine, as_json)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="The folder that checkpoints were saved to, or one of them.")],
    out: Annotated[Path, typer.Argument(help="The new folder to write.")],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint; by default the last one saved.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32; by default what each parameter computes in.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file; a larger tensor has a file of its own.")] = "5GB",
    config_from: Annotated[
        Path | None, typer.Option(help="Hugging Face folder to copy config.json, tokenizer and the like from.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Read all of the checkpoint before, to compare its checksums.")] = True,
) -> None:
    """Write a checkpoint as safetensors that Hugging Face's from_pretrained reads (elsewhere: zero_to_fp32).

    Memory holds a part of one parameter, however large the model. OUT appears whole or not at all.
    """
    from infinity.cli.export import run

    run(checkpoint, out, tag, dtype, max_shard_size, config_from, verify)


if __name__ == "__main__":
    app()
