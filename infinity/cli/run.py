"""`infinity run`: DeepSpeed's launcher, with infinity.deepspeed in place of deepspeed.

A single rank replaces this process. Several ranks are started by torchrun, in this process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import typer

from infinity.cli.console import FAILED, USAGE, check_one_of, fail, note, one_line_errors
from infinity.deepspeed.launcher.flags import BIND, TORCHRUN, Command, Kind, Program
from infinity.deepspeed.launcher.runner import (
    DEEPSPEED_ENVIRONMENT_NAME,
    DEEPSPEED_ENVIRONMENT_PATHS,
    DLTS_HOSTFILE,
    read_exports,
)
from infinity.deepspeed.launcher.translate import Host, Launch, Machine, Request, parse_hostfile, translate
from infinity.durable.command import as_replaced
from infinity.errors import ConfigError

ALL = -1
"""Default of --num_nodes, --num_gpus and --node_rank, as in DeepSpeed."""

_SHOWING = ("debug", "info")
_LOG_LEVELS = (*_SHOWING, "warning", "error", "critical")
_SIGNALLED = 128
"""A shell reports a command that signal N ended with exit status 128 + N."""


@dataclass(frozen=True)
class Flags:
    """The command's options and arguments, under their names in `infinity.cli.main`; see its help."""

    script: str
    arguments: list[str] | None
    num_gpus: int
    dry_run: bool
    module: bool
    no_python: bool
    no_local_rank: bool
    each_rank_log: str
    log_level: str
    quiet: bool
    include: str
    exclude: str
    master_addr: str
    master_port: int | None
    hostfile: Path | None
    num_nodes: int
    node_rank: int
    no_ssh: bool
    no_ssh_check: bool
    force_multi: bool
    bind_cores_to_rank: bool
    bind_core_list: str


def run(flags: Flags) -> None:
    """Run the command; see its help. Becomes a single rank; with several, returns if all ended with status 0."""
    level = "error" if flags.quiet else flags.log_level
    check_one_of("--log_level", level, _LOG_LEVELS)
    with one_line_errors():
        try:
            request = _request(flags)
            launch = translate(request, _this_machine())
            if launch.here is not None and request.program.kind is Kind.SCRIPT:
                _check_script(request.program.name)
        except ConfigError as error:
            fail("; ".join(error.problems), USAGE)
        if flags.dry_run or launch.here is None or level in _SHOWING:
            _show(launch)
        if flags.dry_run:
            return
        if launch.here is None:
            last = len(launch.commands) - 1
            fail(
                f"nothing was started: run each command on its host, or infinity run there with --node_rank 0 to {last}"
            )
        command = launch.commands[launch.here]
        if command.program == TORCHRUN:
            os.environ.update(command.environment)
            _start(list(command.arguments))
        else:
            _become(command)


def _show(launch: Launch) -> None:
    """Print notes and commands to stderr; stdout belongs to the script."""
    for text in launch.notes:
        note(text)
    for command in launch.commands:
        if command.host is not None:
            note(f"on {command.host}:")
        typer.echo(command.shown(), err=True)


def _request(flags: Flags) -> Request:
    """Read the files that the flags name."""
    if flags.module and flags.no_python:
        raise ConfigError("--module and --no_python cannot be combined: remove one of them")
    kind = Kind.MODULE if flags.module else Kind.EXECUTABLE if flags.no_python else Kind.SCRIPT
    if flags.bind_core_list and not flags.bind_cores_to_rank:
        raise ConfigError(f"--bind_core_list has no effect without {BIND}: add it")
    bind = (f"{BIND}={flags.bind_core_list}" if flags.bind_core_list else BIND,) if flags.bind_cores_to_rank else ()
    request = Request(
        Program(flags.script, tuple(flags.arguments or ()), kind, not flags.no_local_rank, bind),
        hosts=_read_hosts(flags.hostfile),
        include=flags.include,
        exclude=flags.exclude,
        num_nodes=None if flags.num_nodes == ALL else flags.num_nodes,
        num_gpus=None if flags.num_gpus == ALL else flags.num_gpus,
        master_addr=flags.master_addr or None,
        master_port=flags.master_port,
        node_rank=None if flags.node_rank == ALL else flags.node_rank,
        no_ssh=flags.no_ssh,
        force_multi=flags.force_multi,
        logs=None if flags.each_rank_log == "None" else flags.each_rank_log,
    )
    if request.hosts is None:
        return request
    folders = map(Path, DEEPSPEED_ENVIRONMENT_PATHS)
    return replace(request, exports=read_exports(folder / DEEPSPEED_ENVIRONMENT_NAME for folder in folders))


def _read_hosts(hostfile: Path | None) -> tuple[Host, ...] | None:
    """Return the hosts of `hostfile`, by default DeepSpeed's; None without one."""
    if hostfile is None:
        hostfile = Path(DLTS_HOSTFILE)
        if not hostfile.is_file():
            return None
        note(f"hosts: from {hostfile}")
    try:
        text = hostfile.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        fail(f"--hostfile {hostfile}: {error.strerror}: name a readable file with lines such as worker-0 slots=4")
    return parse_hostfile(text, str(hostfile))


_GPU_DRIVERS = ("libcuda.so.1", "libnvidia-ml.so.1")
_ROCM_DEVICE = Path("/dev/kfd")


def _this_machine() -> Machine:
    name = socket.gethostname()
    with socket.socket() as chosen:
        chosen.bind(("", 0))
        port = chosen.getsockname()[1]
    return Machine(
        gpus=_count_gpus(),
        cores=len(os.sched_getaffinity(0)),
        names=frozenset({name, name.partition(".")[0], socket.getfqdn(), "localhost", "127.0.0.1"}),
        environ=os.environ,
        python="python" if shutil.which("python") == sys.executable else sys.executable,
        port=port,
    )


def _count_gpus() -> int:
    """Return the number of GPUs visible to torch, which is imported only if the machine has a driver for one."""
    if not _ROCM_DEVICE.exists() and not any(map(_can_load, _GPU_DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count()


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _check_script(name: str) -> None:
    """Refuse a script that does not exist before ranks are started."""
    if not Path(name).exists():
        raise ConfigError(f"the script {name} does not exist: pass an existing file, after all options of infinity run")


def _become(command: Command) -> NoReturn:
    """Replace this process by `command`, so that signals, exit status and memory are those of the rank."""
    kept = {name: value for name, value in os.environ.items() if name not in command.unset}
    environment = {**kept, **command.environment, **as_replaced()}
    os.execvpe(command.program, [command.program, *command.arguments], environment)


def _start(arguments: list[str]) -> None:
    """Run torchrun in this process, so that signals reach it. Exits with the status of the first rank that failed."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main

    try:
        main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        exit_as_rank(rank, failure.exitcode)
    except Exception as error:
        received = _signal_behind(error)
        if received is not None:
            fail(f"stopped by {received.name}; all ranks have ended", _SIGNALLED + received)
        if not isinstance(error, DistError | RendezvousError):
            raise
        reason = str(error).partition("\n")[0]
        fail(f"ranks cannot connect: {reason} Choose another --master_addr or --master_port.")


def _signal_behind(error: BaseException | None) -> signal.Signals | None:
    """Return the signal that torchrun received, from its exception or from one that was raised while it passed.

    torch 2.13 raises UnboundLocalError if the signal arrives as one of its timers begins.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    while error is not None and not isinstance(error, SignalException):
        error = error.__cause__ or error.__context__
    return None if error is None else signal.Signals(error.sigval)


def exit_as_rank(rank: int, status: int) -> NoReturn:
    """Exit with a failed rank's status. status: negative if a signal ended the rank."""
    if status >= 0:
        fail(f"rank {rank} ended with exit status {status}: see its output", status or FAILED)
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    fail(f"rank {rank} was ended by {name}", _SIGNALLED - status)
