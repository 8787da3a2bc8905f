"""The `infinity` command.

Commands import their modules when they run, so that `infinity --help` is fast and `infinity report` works even if torch
or a native module fails to load.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from infinity.rules import RULES, in_words


class _Commands(typer.core.TyperGroup):
    """Command group that reports in one line that the help text could not be written."""

    def main(self, *arguments: Any, **how: Any) -> Any:
        try:
            return super().main(*arguments, **how)
        except OSError as error:
            from infinity.cli.console import stdout_failed

            try:
                stdout_failed(error)
            except typer.Exit as ended:
                sys.exit(ended.exit_code)


class _Command(typer.core.TyperCommand):
    """Command that reports all unknown options and all invalid values in one start."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [*args]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption and BadParameter, which Typer does not export
            if not (hasattr(error, "option_name") or hasattr(error, "param")):
                raise
            problems = dict(self._problems(ctx, given))
            self._refuse(ctx, problems)
            raise

    def _refuse(self, ctx: Any, problems: Mapping[str, str]) -> None:
        """Exit with the problems, by option, if there are any."""
        if problems:
            ctx.fail("\n".join(problems.values()))

    def _problems(self, ctx: Any, given: list[str]) -> Iterator[tuple[str, str]]:
        """Yield (option, text) of each problem of the command line."""
        while True:
            try:
                values, *_ = self.make_parser(ctx).parse_args(args=[*given])
                break
            except Exception as error:  # noqa: BLE001 - parse_args raises what is not reported here
                name = str(getattr(error, "option_name", ""))
                at = next((at for at, word in enumerate(given) if f"{word}=".startswith(f"{name}=")), None)
                if name:
                    yield name, _text(error)
                if not name or at is None:  # such as a short option in a group
                    return
                del given[at]
        for param in self.get_params(ctx):
            if not param.is_eager:
                try:
                    param.handle_parse_result(ctx, values, [])
                except Exception as error:
                    if not hasattr(error, "param"):
                        raise
                    yield str(param.name), _text(error, values.get(param.name))


def _text(error: Any, value: Any = None) -> str:
    """Return the message, with the value that it refuses. Shortens pydantic's, as Typer passes them on."""
    text = str(error.format_message())
    values = ", ".join(map(repr, value if isinstance(value, (list, tuple)) else [value]))
    if value is None or values in text:
        return text
    return f"{text.partition(', unable to parse')[0]}, not {values}"


class _RunCommand(_Command):
    """Command that refuses flags of DeepSpeed's launcher by name, with the reason."""

    def _refuse(self, ctx: Any, problems: Mapping[str, str]) -> None:
        from infinity.cli.console import USAGE, fail_with_all
        from infinity.deepspeed.launcher.flags import refusal

        reasons = [f"{name} is refused. {reason}" for name in problems if (reason := refusal(name)) is not None]
        if reasons:
            fail_with_all(reasons, USAGE)
        super()._refuse(ctx, problems)


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
command = partial(app.command, cls=_Command)

Paths = Annotated[
    list[Path],
    typer.Option("--path", help="Folder on the drive; repeat for further drives, to stripe over all of them."),
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


@command()
def report(
    path: Annotated[
        list[Path] | None,
        typer.Option("--path", help="Folder to check; by default, the temporary folder and the current one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show versions, native modules, limits, CUDA and folders (DeepSpeed: ds_report).

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


_SEVERAL_HOSTS = "Several hosts"


@command("run", cls=_RunCommand, context_settings={"allow_interspersed_args": False})
def run_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script that each rank runs.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments, passed as they are.")
    ] = None,
    num_gpus: Annotated[
        int,
        typer.Option(
            "--num_gpus",
            "--num_accelerators",
            metavar="N",
            show_default="all",
            help="GPUs per host, one rank each. Without GPUs: N ranks on the CPU, by default 1.",
        ),
    ] = -1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no_python", help="SCRIPT is an executable, run without python.")
    ] = False,
    no_local_rank: Annotated[
        bool, typer.Option("--no_local_rank", help="Do not pass --local_rank=N as the script's first argument.")
    ] = False,
    each_rank_log: Annotated[
        str,
        typer.Option(
            "--enable_each_rank_log",
            metavar="FOLDER",
            show_default=False,
            help="Write each rank's output to this folder.",
        ),
    ] = "None",
    log_level: Annotated[
        str,
        typer.Option("--log_level", metavar="LEVEL", help="warning, error and critical do not print the command."),
    ] = "info",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the command.")] = False,
    include: Annotated[
        str,
        typer.Option(
            "--include",
            "-i",
            metavar="HOSTS",
            help="Hosts and GPUs to use, such as worker-0@worker-1:0,2; by default all.",
        ),
    ] = "",
    exclude: Annotated[
        str, typer.Option("--exclude", "-e", metavar="HOSTS", help="Hosts and GPUs to leave out, such as localhost:0.")
    ] = "",
    master_addr: Annotated[
        str,
        typer.Option(
            "--master_addr", metavar="ADDRESS", help="Address of rank 0; by default the first host of the hostfile."
        ),
    ] = "",
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master_port",
            metavar="PORT",
            min=1,
            max=65535,
            help="Port of rank 0; by default a free one, or 29500 with several hosts.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile",
            "-H",
            metavar="FILE",
            rich_help_panel=_SEVERAL_HOSTS,
            help="File with one host per line, such as worker-0 slots=4; by default /job/hostfile if it exists.",
        ),
    ] = None,
    num_nodes: Annotated[
        int,
        typer.Option(
            "--num_nodes",
            metavar="N",
            show_default="all",
            rich_help_panel=_SEVERAL_HOSTS,
            help="Use the first N hosts of the hostfile.",
        ),
    ] = -1,
    node_rank: Annotated[
        int,
        typer.Option(
            "--node_rank",
            metavar="N",
            show_default=False,
            rich_help_panel=_SEVERAL_HOSTS,
            help="Start the ranks of host N of the hostfile, counted from 0, on this machine.",
        ),
    ] = -1,
    no_ssh: Annotated[bool, typer.Option("--no_ssh", hidden=True, help="Implied by --node_rank.")] = False,
    no_ssh_check: Annotated[bool, typer.Option("--no_ssh_check", hidden=True)] = False,
    force_multi: Annotated[
        bool,
        typer.Option(
            "--force_multi",
            rich_help_panel=_SEVERAL_HOSTS,
            help="Print the command of the hostfile's only host instead of running it.",
        ),
    ] = False,
    bind_cores_to_rank: Annotated[
        bool,
        typer.Option(
            "--bind_cores_to_rank", help="Bind each rank to its part of the cores, near its GPU if that is known."
        ),
    ] = False,
    bind_core_list: Annotated[
        str,
        typer.Option(
            "--bind_core_list",
            metavar="LIST",
            help="Processors for --bind_cores_to_rank, such as 0,2-5; by default all.",
        ),
    ] = "",
) -> None:
    """Run an unchanged DeepSpeed script on Infinity, one rank per GPU (DeepSpeed: deepspeed).

    In the script and its children, import deepspeed returns infinity.deepspeed.
    Options stand before SCRIPT. The command that starts the ranks is printed to stderr.
    With several hosts, one command per host is printed and none is started.
    """
    options = dict(locals())
    from infinity.cli.run import Flags, run

    run(Flags(**options))


@command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run: NVME_PATH/RUN.")],
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Read the files of the last committed step, and show whether they are intact. Starts nothing.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: write one JSON object.")] = False,
) -> None:
    """Resume a durable run: execute the command line that trained it last, in its working directory.

    The command is printed to stderr first. It has to call engine.resume(). A folder is refused that belongs to another
    user or that others may write.

    \b
    --check --json writes {run, step, ranks, intact}: the run's name, its last
    committed step, its number of ranks, and whether the record of each rank
    matches its states. It exits with 0 if so, and with 1 otherwise.
    """
    from infinity.cli.convert import run

    run(folder, check, as_json)


@command("aio-bench")
def aio_bench(
    path: Paths,
    op: Annotated[str, typer.Option(help="read, write or mixed.")] = "read",
    size: Annotated[str, typer.Option(help="Bytes of the file, and of one run.")] = "1GiB",
    block_size: Annotated[str, typer.Option(help="Bytes of one request to the drive, a multiple of 4096.")] = "1MiB",
    queue_depth: Annotated[int, typer.Option(help="Blocks in flight per thread.")] = 32,
    threads: Annotated[int, typer.Option(help="Submitting threads per folder.")] = 1,
    engine: EngineName = "auto",
    runs: Annotated[int, typer.Option(help="Number of runs.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure a drive through training's I/O engine, and verify every byte read (DeepSpeed: ds_io).

    A run issues whole requests, of the larger of a block and 2 MiB. The file is anonymous, so nothing is left
    on disk, even if the command is killed.
    """
    from infinity.cli.drive.bench import run

    run(path, op, size, block_size, queue_depth, threads, engine, runs, as_json)


@command()
def tune(
    path: Paths,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the section aio to.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture file to draw the sweep to, such as a PNG; needs matplotlib.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Duration of the search.")] = 60,
    size: Annotated[str, typer.Option(help="Bytes of the file.")] = "1GiB",
    engine: EngineName = "auto",
    as_json: Json = False,
) -> None:
    """Find the best section aio of the config for a drive (DeepSpeed: ds_nvme_tune).

    Sweeps block size, queue depth, threads and engine, and selects the cheapest of the settings within 3% of the
    fastest. The file is anonymous, so nothing is left on disk, even if the command is killed.
    """
    from infinity.cli.drive.tune import run

    run(path, out, plot, seconds, size, engine, as_json)


@command("bench-links")
def bench_links(
    path: Paths,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, for infinity plan --bandwidths.")] = None,
    seconds: Annotated[float, typer.Option(help="Duration, about.")] = 40,
    size: Annotated[str, typer.Option(help="Bytes of the file on the drive.")] = "1GiB",
    as_json: Json = False,
) -> None:
    """Measure the bandwidths of this machine through the engine's own code, for infinity plan.

    The JSON has bytes per second, FLOP per second and bytes. Absent hardware is null.

    \b
    nvme_read, nvme_write  the drive of --path
    nvme_mixed             reads and writes at once, half each: their sum
    memory                 bytes the native Adam reads and writes, all cores
    host_to_device         pinned, asynchronous copies to the accelerator
    device_to_host         and back
    collective             output of an all-gather, on each rank
    flops                  a transformer block's matmul, by dtype:
                           float32, bfloat16, float16
    weights                bytes/s at which a matmul of 16 rows reads
                           its weight, by dtype
    baseline_rss           memory of a process that trained one small
                           layer with torch, and imported transformers'
                           Trainer if it is installed
    machine, measurement   what was measured, and how

    For collective, start it on several ranks: torchrun --nproc-per-node 2 -m infinity.cli.main bench-links …
    The file on the drive is anonymous, so nothing is left, even if the command is killed.
    """
    from infinity.cli.links.bench import run

    run(path, out, seconds, size, as_json)


@command("plan")
def plan(
    num_layers: Annotated[int | None, typer.Option(min=1, help="GPT-2: transformer blocks; by default 12.")] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, help="GPT-2: width of the model; by default 768.")] = None,
    num_attention_heads: Annotated[
        int | None, typer.Option(min=1, help="GPT-2: heads of a block; by default 12.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="GPT-2: rows of the embedding; by default 50257.")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; by default 1024, or the model's most.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences of a step, of all ranks; by default the config's, or 8 a rank."),
    ] = None,
    untie_embeddings_and_output_weights: Annotated[
        bool, typer.Option("--untie-embeddings-and-output-weights", help="GPT-2: the head has a weight of its own.")
    ] = False,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Recompute each block in backward.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="Folder with a config.json of transformers, instead of GPT-2's flags.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Instead, a function that returns (module, inputs): your nn.Module, and batch → arguments of a "
            "forward that returns the loss. Runs the file.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Engine's configuration; by default bf16 with all states on nvme.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value of a key, as bf16.enabled=true; repeatable."),
    ] = None,
    train_batch: Annotated[
        bool, typer.Option("--train-batch", help="Steps are calls of engine.train_batch(blocks=...).")
    ] = False,
    bandwidths: Annotated[
        Path | None, typer.Option(help="JSON of infinity bench-links; without it, no step time.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a node; 0: the host computes.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    device_memory: Annotated[str | None, typer.Option(help="Bytes of a GPU's memory, such as 32GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Bytes of a node's memory; by default as here.")] = None,
    nvme: Annotated[str | None, typer.Option(help="Bytes of a node's drives; by default the free space here.")] = None,
    endurance: Annotated[
        str | None, typer.Option(help="Bytes that the drives of a node are rated for, such as 1.2PB (TBW).")
    ] = None,
    tile: Annotated[
        str | None, typer.Option(help="Largest fp32 weight of a linear layer; larger ones run in tiles.")
    ] = None,
    this_machine: Annotated[
        bool,
        typer.Option("--this-machine", help="Plan for this machine; with --bandwidths, time operations here."),
    ] = False,
    max_model: Annotated[
        bool, typer.Option("--max-model", help="GPT-2: print the most layers that fit, and predict nothing else.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="File for the simulated step, for Perfetto.")] = None,
    as_json: Json = False,
) -> None:
    """Predict whether a model fits a machine, how long a step takes, and what bounds it.

    Runs the engine's own code on a virtual clock, without values. Needs neither the machine nor its memory.
    Exits with 1 if the model does not fit.

    \b
    infinity plan --num-layers 50 --hidden-size 4096 --num-attention-heads 32 --checkpoint-activations \\
        --gpus 1 --device-memory 32GiB --host-memory 192GiB --nvme 1TB
    """
    options = dict(locals())
    from infinity.cli.plan import Flags, run

    run(Flags(**options | {"changes": changes or []}))


@command("timeline")
def timeline(
    file: Annotated[Path, typer.Argument(help="Trace of engine.profile() or of infinity plan --trace.")],
    png: Annotated[Path | None, typer.Option(help="Picture file to draw the lanes to; needs matplotlib.")] = None,
    as_json: Json = False,
) -> None:
    """Show how long each lane of a profiled step worked, and for how long the model waited for it.

    \b
    busy     seconds in which the lane worked, and their share of the steps
    exposed  seconds in which the model waited for the lane
    moved    bytes, and GB/s while the lane was busy
    """
    from infinity.cli.timeline import run

    run(file, png, as_json)


@command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder passed to save_checkpoint, or one checkpoint in it.")],
    out: Annotated[Path, typer.Argument(help="New folder to write.")],
    tag: Annotated[str | None, typer.Option(help="Tag of the checkpoint; by default the last one saved.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32; by default the dtype each parameter computes in.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of a file; a larger tensor gets a file of its own.")
    ] = "5GB",
    config_from: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder to copy config.json, tokenizer and the like from; by default that of a Trainer's "
            "checkpoint."
        ),
    ] = None,
    verify: Annotated[bool, typer.Option(help="First read the whole checkpoint and compare its checksums.")] = True,
) -> None:
    """Write a checkpoint as safetensors that Hugging Face's from_pretrained reads (DeepSpeed: zero_to_fp32).

    Memory holds a part of one parameter at a time. OUT appears complete or not at all.
    """
    from infinity.cli.convert import run_export

    run_export(checkpoint, out, tag, dtype, max_shard_size, config_from, verify)


@command("import-deepspeed")
def import_deepspeed(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder passed to DeepSpeed's save_checkpoint, or one checkpoint in it.")
    ],
    out: Annotated[Path, typer.Argument(help="New folder to write, for engine.load_checkpoint.")],
    tag: Annotated[str | None, typer.Option(help="Tag of the checkpoint; by default the last one saved.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help=f"{in_words(RULES.values())}; needed only if the checkpoint does not show it."),
    ] = None,
) -> None:
    """Convert a DeepSpeed checkpoint to one of Infinity: ZeRO stages 0 to 3 or universal, of any number of ranks.

    Imports parameters, fp32 masters, moments and step counts bit for bit. Runs no code of the checkpoint. Memory holds
    a part of one parameter at a time. OUT appears complete or not at all.
    """
    from infinity.cli.convert import run_import

    run_import(checkpoint, out, tag, optimizer)


if __name__ == "__main__":
    app()
