"""Every flag of DeepSpeed's launcher with its verdict here.

python -m infinity.deepspeed.launcher.flags    # the table of docs/launch.md
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    TRANSLATED = "translated"
    """Has the effect that it has in DeepSpeed."""
    NO_EFFECT = "no effect"
    """Is accepted, since there is nothing for it to change."""
    REFUSED = "refused"
    """Ends `infinity run` with the reason."""


@dataclass(frozen=True)
class Flag:
    """A flag with all its names, and a sentence: its effect, or the reason and the replacement."""

    names: tuple[str, ...]
    verdict: Verdict
    text: str


_START = "Start the printed commands with pdsh, srun, mpirun or ssh"

FLAGS = (
    Flag(
        ("-H", "--hostfile"),
        Verdict.TRANSLATED,
        "Hosts, one a line as in `worker-0 slots=4`. Default: `/job/hostfile` if it exists, as in DeepSpeed. "
        "A named file that does not exist is an error, where DeepSpeed would train on this machine alone.",
    ),
    Flag(("-i", "--include"), Verdict.TRANSLATED, "Hosts and slots to use, as in `worker-0@worker-1:0,2`."),
    Flag(("-e", "--exclude"), Verdict.TRANSLATED, "Hosts and slots to leave out, in the same syntax."),
    Flag(
        ("--num_nodes",),
        Verdict.TRANSLATED,
        "The first N hosts of the hostfile. More than it has are an error; DeepSpeed would use fewer.",
    ),
    Flag(
        ("--num_gpus", "--num_accelerators"),
        Verdict.TRANSLATED,
        "The first N GPUs of each host; more than it has are an error. Without GPUs: N ranks on the CPU.",
    ),
    Flag(
        ("--master_addr",),
        Verdict.TRANSLATED,
        "Address of rank 0. Default on several hosts: the first host's name, where DeepSpeed asks the host by ssh.",
    ),
    Flag(
        ("--master_port",),
        Verdict.TRANSLATED,
        "Port of rank 0. Default on one host: a free port, where DeepSpeed uses 29500; on several: 29500.",
    ),
    Flag(("--node_rank",), Verdict.TRANSLATED, "Run the command of host number N on this machine."),
    Flag(("--no_ssh",), Verdict.TRANSLATED, "With `--node_rank`, as in DeepSpeed; it is implied by it."),
    Flag(
        ("--force_multi",),
        Verdict.TRANSLATED,
        "Print the command of a single host of the hostfile instead of running it here.",
    ),
    Flag(("--module",), Verdict.TRANSLATED, "SCRIPT is a module, as in `python -m`. Also `-m`."),
    Flag(("--no_python",), Verdict.TRANSLATED, "SCRIPT is a program of its own; its Python children get `deepspeed`."),
    Flag(("--no_local_rank",), Verdict.TRANSLATED, "Do not pass `--local_rank=N` as the script's first argument."),
    Flag(
        ("--enable_each_rank_log",),
        Verdict.TRANSLATED,
        "Folder for the output of each rank, in torchrun's layout (`--log-dir`, `--redirects 3`).",
    ),
    Flag(("--log_level",), Verdict.TRANSLATED, "`warning` and above do not print the command."),
    Flag(("-q", "--quiet"), Verdict.TRANSLATED, "As `--log_level error`."),
    Flag(("--no_ssh_check",), Verdict.NO_EFFECT, "No ssh is used."),
    Flag(("--launcher",), Verdict.REFUSED, f"There is one launcher, torchrun. {_START}."),
    Flag(("--launcher_args",), Verdict.REFUSED, f"They belong to the launcher of several hosts. {_START}."),
    Flag(("--ssh_port",), Verdict.REFUSED, f"No ssh is used. {_START}."),
    Flag(("--venv_script",), Verdict.REFUSED, "Activate the environment on each host before the printed command."),
    Flag(
        ("--save_pid",),
        Verdict.REFUSED,
        "The process id of `infinity run` is the one to signal: it passes SIGINT and SIGTERM on to all ranks.",
    ),
    Flag(
        ("--autotuning",),
        Verdict.REFUSED,
        "There is no autotuner. `infinity tune` finds the section aio of a drive; buffer sizes follow from the model.",
    ),
    Flag(
        ("--bind_cores_to_rank",),
        Verdict.REFUSED,
        "Start ranks under taskset or numactl by `--no_python`, or run the printed command with torchrun's "
        "`--numa-binding`. The engine takes its threads from the rank's affinity.",
    ),
    Flag(("--bind_core_list",), Verdict.REFUSED, "Start `infinity run` under `taskset --cpu-list LIST`."),
    Flag(
        ("--elastic_training",),
        Verdict.REFUSED,
        "Elastic training is not here. Checkpoints load on any number of ranks: save, and start again with another.",
    ),
    Flag(("--min_elastic_nodes",), Verdict.REFUSED, "Elastic training is not here; see `--elastic_training`."),
    Flag(("--max_elastic_nodes",), Verdict.REFUSED, "Elastic training is not here; see `--elastic_training`."),
)


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


if __name__ == "__main__":
    print("\n".join(table()))
