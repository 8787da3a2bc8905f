"""`infinity export` writes a checkpoint as a Hugging Face folder; `infinity import-deepspeed` reads DeepSpeed's."""

from __future__ import annotations

from pathlib import Path

from infinity.cli.console import USAGE, check_one_of, fail, one_line_errors, printable, progress, say, size_of


def run_export(
    checkpoint: Path,
    out: Path,
    tag: str | None,
    dtype: str | None,
    max_shard_size: str,
    config_from: Path | None,
    verify: bool,
) -> None:
    """Run the command; see its help."""
    limit = size_of("--max-shard-size", max_shard_size)
    if limit == 0:
        fail("--max-shard-size must be more than 0 bytes", USAGE)
    with one_line_errors():
        from infinity.checkpoint.export import DTYPES, export
        from infinity.observe.units import counted, show_bytes

        if dtype is not None:
            check_one_of("--dtype", dtype, list(DTYPES))
        with progress(shown=True) as step:
            export(
                checkpoint,
                out,
                tag=tag,
                dtype=dtype,
                max_shard_size=limit,
                config_from=config_from,
                verify=verify,
                step=step,
            )
        files = sorted(out.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        say(f"{printable(out)}: {counted(len(files), 'file')}, {show_bytes(size)}")


def run_import(checkpoint: Path, out: Path, tag: str | None, optimizer: str | None) -> None:
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
