"""The `infinity` command.

Commands import what they need when they run, so that `infinity --help` is quick and `infinity report` runs where torch
or a native part does not load.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def infinity() -> None:
    """Train and run PyTorch models that are larger than memory."""


@app.command()
def report(
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False,
) -> None:
    """Show versions, native parts, memory limits and CUDA as this installation finds them; exit with 1 if one fails."""
    from infinity.cli.report import broken, collect, lines

    facts = collect()
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(lines(facts)))
    raise typer.Exit(1 if broken(facts) else 0)


if __name__ == "__main__":
    app()
