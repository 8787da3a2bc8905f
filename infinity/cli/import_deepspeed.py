"""`infinity import-deepspeed`: converts a DeepSpeed checkpoint to one of Infinity."""

from __future__ import annotations

from pathlib import Path

from infinity.cli.console import check_one_of, one_line_errors, printable, progress, say


def run(checkpoint: Path, out: Path, tag: str | None, optimizer: str | None) -> None:
    """Run the command; see its help."""
    with one_line_errors():
        from infinity.deepspeed.importer.convert import import_deepspeed
        from infinity.observe.units import counted, show_bytes
        from infinity.rules import RULES

        if optimizer is not None:
            check_one_of("--optimizer", optimizer, [rule.type for rule in RULES.values()])
        with progress(shown=True) as step:
            folder = import_deepspeed(checkpoint, out, tag=tag, optimizer=optimizer, step=step)
        files = [file for file in folder.iterdir() if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        say(f"{printable(folder)}: {counted(len(files), 'file')}, {show_bytes(size)}")
