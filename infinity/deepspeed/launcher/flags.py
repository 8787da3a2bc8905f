"""Flags of DeepSpeed's launcher, each with its verdict: translated, no effect or refused.

python -m infinity.deepspeed.launcher.flags    # the table of docs/launch.md

Commands: torchrun or a single rank, their arguments and environment variables, and their form for a shell.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


class Verdict(enum.Enum):
    TRANSLATED = "translated"
    """Has the effect that it has in DeepSpeed."""
    NO_EFFECT = "no effect"
    """Accepted and ignored: there is nothing for it to change."""
    REFUSED = "refused"
    """Ends `infinity run` with the reason."""


@dataclass(frozen=True)
class Flag:
    """A flag with all its names. text: its effect; of a refused flag, the reason and what to use instead."""

    names: tuple[str, ...]
    verdict: Verdict
    text: str


_START = "Start the printed commands with pdsh, srun, mpirun or ssh"

_TEXTS = {
    Verdict.TRANSLATED: {
        "-H --hostfile": (
            "File with one host per line, such as `worker-0 slots=4`. Default: `/job/hostfile` if it exists, as in "
            "DeepSpeed. A named file that does not exist is an error; DeepSpeed would train on this machine alone."
        ),
        "-i --include": "Hosts and slots to use, such as `worker-0@worker-1:0,2`. Default: all.",
        "-e --exclude": "Hosts and slots to leave out, in the same syntax. Default: none.",
        "--num_nodes": (
            "Use the first N hosts of the hostfile. Default: all. N above their number is an error; DeepSpeed would "
            "use all."
        ),
        "--num_gpus --num_accelerators": (
            "Use the first N GPUs of each host. Default: all. N above their number is an error. Without GPUs: N ranks "
            "on the CPU, by default 1."
        ),
        "--master_addr": (
            "Address of rank 0. Default on one host: 127.0.0.1; on several: the first host's name. DeepSpeed asks "
            "the first host by ssh."
        ),
        "--master_port": (
            "Port of rank 0. Default on one host: a free port; on several: 29500. DeepSpeed's default is 29500."
        ),
        "--node_rank": "Start the ranks of host number N, counted from 0, on this machine.",
        "--no_ssh": "Needs `--node_rank` on several hosts, as in DeepSpeed. `--node_rank` implies it.",
        "--force_multi": "Print the command of the hostfile's only host instead of starting its ranks here.",
        "--module": "SCRIPT is a module, as in `python -m`. Short form: `-m`.",
        "--no_python": "SCRIPT is an executable, run without `python`. In its Python children `deepspeed` is replaced.",
        "--no_local_rank": "Do not pass `--local_rank=N` as the script's first argument.",
        "--enable_each_rank_log": (
            "Write each rank's output to this folder, in torchrun's layout (`--log-dir`, `--redirects 3`)."
        ),
        "--bind_cores_to_rank": (
            "Bind each rank to an equal part of the machine's cores, one processor of each, and set `OMP_NUM_THREADS` "
            "to their number. Ranks of NVIDIA GPUs divide the cores of their GPU's NUMA node; DeepSpeed ignores GPUs. "
            "Memory lies on the rank's node while there is room, where DeepSpeed's `numactl -m` fails without room."
        ),
        "--bind_core_list": (
            "Processors that `--bind_cores_to_rank` divides, in this order, such as `0,2-5`. Default: all that the "
            "process may use. An error without `--bind_cores_to_rank`, where DeepSpeed ignores it."
        ),
        "--log_level": "`warning` and above do not print the command. Default: `info`.",
        "-q --quiet": "Same as `--log_level error`.",
    },
    Verdict.NO_EFFECT: {"--no_ssh_check": "No ssh is used."},
    Verdict.REFUSED: {
        "--launcher": f"torchrun is the only launcher. {_START}.",
        "--launcher_args": f"They are arguments of pdsh, mpirun or srun, none of which is started. {_START}.",
        "--ssh_port": f"No ssh is used. {_START}.",
        "--venv_script": "Activate the environment on each host before the printed command.",
        "--save_pid": "Signal the process of `infinity run` itself: it passes SIGINT and SIGTERM on to all ranks.",
        "--autotuning": (
            "There is no autotuner. `infinity tune` finds the best section `aio` for a drive; buffer sizes follow from "
            "the model."
        ),
        "--elastic_training": (
            "Elastic training is not supported. Checkpoints load on any number of ranks: save, and restart with "
            "another number."
        ),
        "--min_elastic_nodes": "Elastic training is not supported; see `--elastic_training`.",
        "--max_elastic_nodes": "Elastic training is not supported; see `--elastic_training`.",
    },
}
"""Verdict → names of a flag → its effect; of a refused flag, the reason and what to use instead."""

FLAGS = [
    Flag(tuple(names.split()), verdict, text) for verdict, texts in _TEXTS.items() for names, text in texts.items()
]


def refusal(name: str) -> str | None:
    """Return why the flag `name` is refused and what to use instead; None if it is not one of DeepSpeed's."""
    for flag in FLAGS:
        if name in flag.names and flag.verdict is Verdict.REFUSED:
            return flag.text.replace("`", "")
    return None


def table() -> list[str]:
    """Return the lines of the table in Markdown."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in flag.names)} | {flag.verdict.value} | {flag.text} |" for flag in FLAGS
    ]
    return ["| flag | verdict | here |", "|---|---|---|", *rows]


DEFAULT_PORT = 29500
"""Port of rank 0 on several hosts, as in DeepSpeed and torchrun."""


class Kind(enum.Enum):
    """How a program is started; the value is the flag of `python -m infinity.deepspeed`."""

    SCRIPT = ""
    MODULE = "-m"
    EXECUTABLE = "--no_python"


BIND = "--bind_cores_to_rank"
"""Flag of `infinity run`, and of `python -m infinity.deepspeed`, where it may have a list of processors."""


@dataclass(frozen=True)
class Program:
    """The user's program. local_rank: pass --local_rank=N as its first argument, as DeepSpeed's launcher does.

    bind: the argument that binds ranks to processors, or none.
    """

    name: str
    arguments: tuple[str, ...] = ()
    kind: Kind = Kind.SCRIPT
    local_rank: bool = True
    bind: tuple[str, ...] = ()

    def rank_arguments(self, local_rank: str) -> list[str]:
        """Return the arguments with which Python runs the program as a rank."""
        rank = [f"--local_rank={local_rank}"] if self.local_rank else []
        kind = [self.kind.value] if self.kind.value else []
        return ["-m", "infinity.deepspeed", *self.bind, *kind, self.name, *rank, *self.arguments]

    def torchrun_arguments(self) -> list[str]:
        """Return the arguments that follow torchrun's own options."""
        # torchrun expands ${local_rank} in every argument and turns $$ into $, so the user's dollars are doubled.
        name, *arguments = (text.replace("$", "$$") for text in (self.name, *self.arguments))
        return replace(self, name=name, arguments=tuple(arguments)).rank_arguments("${local_rank}")


def meeting(address: str | None, port: int | None, node: int = 0, nodes: int = 1) -> list[str]:
    """Return torchrun's arguments for rank 0's address. On one host without address and port: a free port of it."""
    if nodes == 1 and address is None and port is None:
        return ["--standalone", "--local-addr=127.0.0.1"]
    of_node = [f"--nnodes={nodes}", f"--node-rank={node}"] if nodes > 1 else []
    return [*of_node, f"--master-addr={address or '127.0.0.1'}", f"--master-port={port or DEFAULT_PORT}"]


TORCHRUN = "torchrun"


@dataclass(frozen=True)
class Command:
    """A command line: torchrun, or the Python of a single rank.

    environment: variables that it sets. unset: names of those that it must not inherit. host: the machine to run it on;
    None: this one.
    """

    program: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    host: str | None = None

    def shown(self) -> str:
        """Return the command as a line for a POSIX shell."""
        without = ["env", *(f"-u {name}" for name in self.unset)] if self.unset else []
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*without, *variables, shlex.join([self.program, *self.arguments])])


def torchrun_command(
    program: Program,
    ranks: int,
    meeting: Sequence[str],
    environment: Mapping[str, str],
    logs: str | None = None,
    host: str | None = None,
) -> Command:
    """Return the torchrun command of `ranks` ranks on one host. logs: folder for a log of each rank."""
    logging = [f"--log-dir={logs}", "--redirects=3"] if logs else []
    arguments = (*meeting, f"--nproc-per-node={ranks}", *logging, *program.torchrun_arguments())
    return Command(TORCHRUN, arguments, dict(environment), host=host)


def single_rank_command(
    program: Program, python: str, address: str, environment: Mapping[str, str], inherited: Iterable[str]
) -> Command:
    """Return the command of the only rank of one host, with the variables that torchrun sets for scripts.

    python: the interpreter. address: HOST:PORT of rank 0, which is this rank. inherited: names of the variables in the
    environment; TORCHELASTIC_* describe an agent that started this process, and would make the rank wait for its store.
    """
    host, _, port = address.rpartition(":")
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    group = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": host, "MASTER_PORT": port}
    unset = tuple(sorted(name for name in inherited if name.startswith("TORCHELASTIC_")))
    arguments = ("-u", *program.rank_arguments("0"))  # unbuffered, as torchrun starts ranks
    return Command(python, arguments, {**environment, **rank, **group}, unset)


if __name__ == "__main__":
    print("\n".join(table()))
