"""examples/slurm/train.sbatch, run on two machines that are namespaces of this one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from support.slurm import NODES, Cluster, refusal

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
ON_DRIVE = ("--host-memory", "45MiB")
"""Too little host memory for the states, so that most are on the drive."""
PATIENCE = 120.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if why := refusal():
        pytest.skip(why)
    made = Cluster(tmp_path / "cluster")
    yield made
    for process in made.processes():
        os.kill(process, signal.SIGKILL)


def start(cluster: Cluster, script: Path, arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    variables = {"SCRIPT": str(script), "LOCAL_DRIVE": str(cluster.drive)}
    return cluster.start(EXAMPLES / "train.sbatch", [*arguments, *ON_DRIVE], variables, output)


def until(condition: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def losses(text: str) -> list[str]:
    return re.findall(r"^(step \d+: loss .+)$", text, re.MULTILINE)


def check_nothing_is_left(cluster: Cluster) -> None:
    assert cluster.processes() == []
    assert [file for name in NODES for file in (cluster.folder / name).iterdir()] == []
    assert list(cluster.folder.glob("stop-*")) == []


@pytest.mark.campaign
def test_a_job_that_is_stopped_and_requeued_trains_as_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    """SIGUSR1 saves and requeues; the next start goes on, with the losses of one machine in memory, bit for bit."""
    output, checkpoints = tmp_path / "output", ("--checkpoints", str(tmp_path / "checkpoints"))
    job = start(cluster, EXAMPLES / "train.py", [*checkpoints, "--steps", "1000000"], output)
    until(lambda: "step 3:" in output.read_text() or job.poll() is not None, output)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(PATIENCE) == 0, output.read_text()
    assert cluster.requeues() == 1
    check_nothing_is_left(cluster)
    steps = str(len(losses(output.read_text())) + 3)
    job = start(cluster, EXAMPLES / "train.py", [*checkpoints, "--steps", steps], output)
    assert job.wait(PATIENCE) == 0, output.read_text()
    assert cluster.requeues() == 1
    check_nothing_is_left(cluster)
    assert " 0 B on nvme" not in output.read_text()

    here = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--checkpoints", str(tmp_path / "others"), "--nvme-path", str(tmp_path), "--steps", steps]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*here, str(EXAMPLES / "train.py"), *arguments]
    reference = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=PATIENCE)
    assert reference.returncode == 0, reference.stderr
    assert len(losses(reference.stdout)) == int(steps)
    assert losses(output.read_text()) == losses(reference.stdout)


@pytest.mark.campaign
def test_a_failing_rank_ends_the_job_on_both_machines(cluster: Cluster, tmp_path: Path) -> None:
    """The other machine's rank names the error; the status is not 0, and the job is not requeued."""
    output, script = tmp_path / "output", tmp_path / "script.py"
    text = (EXAMPLES / "train.py").read_text()
    fault = 'if rank == 1 and step == 3:\n                raise ValueError("the data of step 4 is damaged")\n'
    script.write_text(text.replace("            if rank == 0:\n", f"            {fault}            if rank == 0:\n"))
    job = start(cluster, script, ["--checkpoints", str(tmp_path / "checkpoints")], output)
    assert job.wait(PATIENCE) != 0
    said = output.read_text()
    failures = re.findall(r"rank \d \(host \w+, pid \d+\) (?:failed|is lost).*?: .+?(?=\. Fix|$)", said, re.MULTILINE)
    assert failures, said
    assert {re.sub(r"pid \d+", "pid", failure) for failure in failures} == {
        "rank 1 (host node1, pid) failed: ValueError: the data of step 4 is damaged"
    }
    assert len(losses(said)) == 3
    assert cluster.requeues() == 0
    check_nothing_is_left(cluster)
