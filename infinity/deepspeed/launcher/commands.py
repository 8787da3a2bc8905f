"""torchrun commands: arguments, environment variables, and their form for a shell."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_PORT = 29500
"""Port of rank 0 on several hosts, as in DeepSpeed and torchrun."""


class Kind(enum.Enum):
    """How a program is started; the value is the flag of `python -m infinity.deepspeed`."""

    SCRIPT = ""
    MODULE = "-m"
    EXECUTABLE = "--no_python"


@dataclass(frozen=True)
class Program:
    """The user's program. local_rank: pass --local_rank=N as its first argument, as DeepSpeed's launcher does."""

    name: str
    arguments: tuple[str, ...] = ()
    kind: Kind = Kind.SCRIPT
    local_rank: bool = True

    def torchrun_arguments(self) -> list[str]:
        """Return the arguments that follow torchrun's own options."""
        # torchrun expands ${local_rank} in every argument and turns $$ into $, so the user's dollars are doubled.
        name, *arguments = (text.replace("$", "$$") for text in (self.name, *self.arguments))
        rank = ["--local_rank=${local_rank}"] if self.local_rank else []
        kind = [self.kind.value] if self.kind.value else []
        return ["-m", "infinity.deepspeed", *kind, name, *rank, *arguments]


@dataclass(frozen=True)
class Meeting:
    """Address and port of rank 0. On one host without both: a free port of this machine."""

    address: str | None = None
    port: int | None = None
    node: int = 0
    nodes: int = 1

    def torchrun_arguments(self) -> list[str]:
        if self.nodes == 1 and self.address is None and self.port is None:
            return ["--standalone", "--local-addr=127.0.0.1"]
        nodes = [f"--nnodes={self.nodes}", f"--node-rank={self.node}"] if self.nodes > 1 else []
        return [
            *nodes,
            f"--master-addr={self.address or '127.0.0.1'}",
            f"--master-port={self.port or DEFAULT_PORT}",
        ]


@dataclass(frozen=True)
class Command:
    """torchrun's arguments and environment variables. host: the machine to run it on; None: this one."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None

    def shown(self) -> str:
        """Return the command as a line for a POSIX shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(["torchrun", *self.arguments])])


def make_command(
    program: Program,
    ranks: int,
    meeting: Meeting,
    environment: Mapping[str, str],
    logs: str | None = None,
    host: str | None = None,
) -> Command:
    """Return the command that starts `ranks` ranks on one host. logs: folder for a log of each rank."""
    logging = [f"--log-dir={logs}", "--redirects=3"] if logs else []
    arguments = [
        *meeting.torchrun_arguments(),
        f"--nproc-per-node={ranks}",
        *logging,
        *program.torchrun_arguments(),
    ]
    return Command(tuple(arguments), dict(environment), host)
