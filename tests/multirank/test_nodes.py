"""A node of two disappears: the network between them is cut, without a connection that closes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.nodes import Node, refusal, two_nodes

TIMEOUT = 3
"""infinity.rank_timeout of the job, in seconds."""
PATIENCE = 90.0
SCRIPT = """
import os, sys
import torch
import infinity
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.models import Stack, seeded, token_batches

torch.set_num_threads(1)
folder, rank = sys.argv[1], os.environ["RANK"]
config = engine_config(folder=folder, rank_timeout=float(sys.argv[2]))
engine = infinity.initialize(seeded(Stack), config, device=CpuDevice())[0]
print("pid", os.getpid(), flush=True)
(batch,) = token_batches(1)
try:
    with engine:
        while True:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            if engine.global_steps == 3:
                open(f"{folder}/trains{rank}", "x").close()
except infinity.errors.RanksError as error:
    print(f"RanksError: {error}", flush=True)
    sys.exit(17)
"""


def launch(node: Node, number: int, master: Node, folder: Path, script: Path) -> None:
    """Start one rank on `node` by torchrun, which writes to the file `said` and its number beside the script."""
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": node.interface,
    }
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
    options += ["--master-addr", master.address, "--master-port", "29512"]
    command = node.command(sys.executable, "-m", "torch.distributed.run", *options, str(script))
    with open(script.with_name(f"said{number}"), "w") as said:
        subprocess.Popen([*command, str(folder), str(TIMEOUT)], stdout=said, stderr=said, env=environment)


def until(condition: Callable[[], bool], outputs: list[Path]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "\n".join(output.read_text() for output in outputs)
        time.sleep(0.05)


@pytest.mark.campaign(few=1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_disappears(lost: int, tmp_path: Path) -> None:
    """Both ranks end with the other's name, node and the time of its silence, and leave no file."""
    if why := refusal():
        pytest.skip(why)
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    script.write_text(SCRIPT)
    folder.mkdir()
    outputs = [tmp_path / f"said{number}" for number in range(2)]
    with two_nodes() as nodes:
        for number, node in enumerate(nodes):
            launch(node, number, nodes[0], folder, script)
        until(lambda: all((folder / f"trains{rank}").exists() for rank in range(2)), outputs)
        nodes[lost].unplug()
        until(lambda: all(re.search(r"exitcode *: ", output.read_text()) for output in outputs), outputs)
    for rank, text in enumerate(output.read_text() for output in outputs):
        found = rf"RanksError: rank {1 - rank} \(host .+, pid \d+\) has not responded for {TIMEOUT} s"
        assert re.search(found, text), text
        assert re.search(r"exitcode *: 17", text), text
    assert sorted(os.listdir(folder)) == ["trains0", "trains1"]
