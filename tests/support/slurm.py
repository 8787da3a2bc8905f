"""A stand-in for SLURM with two machines: namespaces of network, host name and mounts, on one cable.

No root is needed, but user namespaces and iproute2 are. In a batch script, `srun` starts one task on each machine, and
`scontrol` knows `show hostnames` and `requeue`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

NODES = ("node0", "node1")
_ADDRESSES = ("10.213.78.1", "10.213.78.2")
_OWN = ("--net", "--uts", "--mount")
_AS_ROOT = ("unshare", "--user", "--map-root-user", *_OWN)
_FOLDER, _SECOND = "SLURM_SUBMIT_DIR", "INFINITY_TEST_SECOND_NODE"


def refusal() -> str:
    """Return why this machine can't make the two machines; empty if it can."""
    command = [*_AS_ROOT, "ip", "link", "add", "cable0", "type", "veth"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"there is no command `{error.filename}`"
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(command)}` failed: {error.stderr.strip()}"
    return ""


class Cluster:
    """Two machines, with a local drive each. folder: for their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drive = folder / "drive"
        """Path of the local drive on each machine."""
        for path in (self.drive, *(folder / name for name in NODES), folder / "bin"):
            path.mkdir(parents=True)
        for name in ("srun", "scontrol"):
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
            program.chmod(0o755)

    def start(
        self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path
    ) -> subprocess.Popen[bytes]:
        """Start a batch script on the first machine, as sbatch would. SIGUSR1 is passed to the script."""
        paths = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        variables = {
            "SLURM_JOB_ID": "77",
            "SLURM_NNODES": str(len(NODES)),
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_CPUS_PER_TASK": "1",
            _FOLDER: str(self.folder),
            "PATH": os.pathsep.join(paths),
        }
        command = [*_AS_ROOT, sys.executable, __file__, "batch", "bash", str(script), *arguments]
        with open(output, "ab") as written:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **variables, **environment},
                stdout=written,
                stderr=written,
            )

    def requeues(self) -> int:
        """Return how often a job has called `scontrol requeue`."""
        file = self.folder / "requeues"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def processes(self, node: int | None = None) -> list[int]:
        """Return the processes of the job's tasks, or of one node's."""
        return _processes(self.folder, node)


def _processes(folder: Path, node: int | None) -> list[int]:
    wanted = {f"{_FOLDER}={folder}".encode()} | ({f"SLURM_NODEID={node}".encode()} if node is not None else set())
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if wanted <= set(variables) and any(each.startswith(b"SLURM_NODEID=") for each in variables):
            found.append(int(path.parent.name))
    return found


def _batch(*command: str) -> int:
    """Become the first machine, make the second one, and run `command`. Return its status."""
    folder = os.environ[_FOLDER]
    hosts = Path(folder, "hosts")
    hosts.write_text("127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, _ADDRESSES, NODES)))
    _call("mount", "--bind", hosts, "/etc/hosts")
    become = 'hostname "$1" && mount --bind "$2/$1" "$2/drive" && ip link set lo up'
    _call("sh", "-c", become, "sh", NODES[0], folder)
    # `cat` holds the namespaces until its input is closed, by this process's end at the latest.
    holder = ["unshare", *_OWN, "sh", "-c", f"{become} && echo made && exec cat", "sh", NODES[1], folder]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "made\n"
        _call("ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", second.pid)
        for number, enter in enumerate(([], ["nsenter", "--target", second.pid, "--net"])):
            _call(*enter, "ip", "address", "add", f"{_ADDRESSES[number]}/24", "dev", f"cable{number}")
            _call(*enter, "ip", "link", "set", f"cable{number}", "up")
        job = subprocess.Popen(command, env={**os.environ, _SECOND: str(second.pid)})
        signal.signal(signal.SIGUSR1, lambda number, _: job.send_signal(number))
        return job.wait()


def _srun(*arguments: str) -> int:
    """Run the command after the options on each node. A task that fails ends the others (--kill-on-bad-exit)."""
    first = next(number for number, argument in enumerate(arguments) if not argument.startswith("-"))
    enter = ["nsenter", "--target", os.environ[_SECOND], *_OWN, f"--wd={os.getcwd()}"]
    tasks = []
    for node, prefix in enumerate(([], enter)):
        variables = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}
        tasks.append(subprocess.Popen([*prefix, *arguments[first:]], env={**os.environ, **variables}))
    running, ended_others = dict(enumerate(tasks)), False
    while running:
        for node, task in list(running.items()):
            if task.poll() is not None:
                del running[node]
                if task.returncode and not ended_others:
                    ended_others = True
                    for process in (process for other in running for process in _processes(_folder(), other)):
                        os.kill(process, signal.SIGTERM)
        time.sleep(0.05)
    # As a shell, SLURM reports 128 + N for signal N.
    return max(status if (status := task.returncode) >= 0 else 128 - status for task in tasks)


def _scontrol(*arguments: str) -> int:
    """`show hostnames LIST`, with a list such as node[0-1]; `requeue JOB`."""
    if arguments[:2] == ("show", "hostnames"):
        match = re.fullmatch(r"(\w+)\[(\d+)-(\d+)\]", arguments[2])
        assert match is not None
        print("\n".join(f"{match[1]}{number}" for number in range(int(match[2]), int(match[3]) + 1)))
    else:
        assert arguments == ("requeue", os.environ["SLURM_JOB_ID"])
        with open(_folder() / "requeues", "a") as requeues:
            requeues.write("requeued\n")
    return 0


def _folder() -> Path:
    return Path(os.environ[_FOLDER])


def _call(*command: object) -> None:
    subprocess.run([str(argument) for argument in command], check=True)


if __name__ == "__main__":
    sys.exit({"batch": _batch, "srun": _srun, "scontrol": _scontrol}[sys.argv[1]](*sys.argv[2:]))
