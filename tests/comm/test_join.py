"""Under torchrun, `initialize` and `init_inference` join the process group if the script has not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import infinity
from infinity.errors import UsageError
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.models import Stack, seeded

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
import infinity
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.models import Stack, seeded, token_batches

def run(how, required):
    given = {"dist_init_required": required, "device": CpuDevice()}
    if how == "inference":
        engine = infinity.init_inference(seeded(Stack, rank), engine_config(folder=folder), **given)
        found = [engine.ranks.size]
    else:
        engine = infinity.initialize(seeded(Stack, rank), engine_config(folder=folder), **given)[0]
        found = [engine.ranks.size]
        for batch in token_batches(3):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    engine.close()
    found.append(dist.get_backend())
    return found

torch.set_num_threads(1)
folder = sys.argv[1]
rank = int(os.environ["RANK"])
found = [run(*case) for case in json.loads(sys.argv[2])]
with open(f"{folder}/rank{rank}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""
CASES = [("training", None), ("training", True), ("training", False), ("inference", None)]
"""The first case joins the group; the others find it open."""


@pytest.mark.campaign
def test_ranks_run_one_model(tmp_path: Path) -> None:
    """Both ranks train rank 0's values and get the same losses, though rank 1 builds other values."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(script), str(tmp_path), json.dumps(CASES)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150)
    files = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), run.stdout + run.stderr
    one, other = (json.loads(file.read_text()) for file in files)
    assert one == other
    for found in one[:-1]:
        assert found == one[0]
        assert [found[0], len(found), found[-1]] == [2, 5, "gloo"]
    assert one[-1] == [2, "gloo"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """launched(RANK="0", …) sets a launcher's environment to exactly these variables. Groups end with the test."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def launch(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield launch
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("required", [None, True, False])
def test_one_rank_joins_only_where_that_is_required(
    required: bool | None, launched: Callable[..., None], tmp_path: Path
) -> None:
    """One rank joins a group only with dist_init_required=True; the group outlives the engine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launched(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config = engine_config(folder=tmp_path)
    infinity.initialize(seeded(Stack), config, device=CpuDevice(), dist_init_required=required)[0].close()
    assert dist.is_initialized() == bool(required)
    infinity.initialize(seeded(Stack), config, device=CpuDevice(), dist_init_required=required)[0].close()


@pytest.mark.parametrize("begin", [infinity.initialize, infinity.init_inference])
@pytest.mark.parametrize(
    ("environment", "required", "said"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, None, r"WORLD_SIZE is 2, but .* lacks MASTER_ADDR, MASTER_PORT.*torchrun"),
        ({}, True, r"dist_init_required is True, but .* lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            False,
            r"WORLD_SIZE is 2, but torch.distributed is not initialised and dist_init_required is False",
        ),
        ({"WORLD_SIZE": "two"}, None, r"WORLD_SIZE is 'two', not a number"),
    ],
)
def test_ranks_that_cannot_join(
    begin: Any,
    environment: dict[str, str],
    required: bool | None,
    said: str,
    launched: Callable[..., None],
    tmp_path: Path,
) -> None:
    launched(**environment)
    with pytest.raises(UsageError, match=said):
        begin(seeded(Stack), engine_config(folder=tmp_path), device=CpuDevice(), dist_init_required=required)
