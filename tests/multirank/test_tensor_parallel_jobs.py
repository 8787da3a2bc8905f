"""Jobs of four processes under tensor parallelism, one of which fails: messages and exit statuses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from infinity.comm.liveness.processes import EXIT_STATUS
from support.jobs import run_job

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import infinity
from infinity.tiers.device import CpuDevice
from multirank.mesh_cases import divided
from support.configs import engine_config
from support.models import token_batches

folder, how = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model, config = divided(mesh["tp"]), engine_config(folder=folder, rank_timeout=2)
engine = infinity.initialize(model, config, device=CpuDevice(), process_group=mesh["dp"])[0]
for number, batch in enumerate(token_batches(6)):
    if os.environ["RANK"] == "3" and number == 2:
        if how == "raises":
            raise ValueError("the user's own")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    engine.backward(engine(*batch))
    engine.step()
"""


@pytest.mark.campaign(few=1)
@pytest.mark.parametrize("how", ["killed", "raises", "stopped"])
def test_one_of_four_tensor_parallel_processes(how: str, tmp_path: Path) -> None:
    """All others end soon. Ranks 1 and 2 share a heartbeat with rank 3; rank 0 has the cause from them."""
    causes = {"killed": "is lost: it was killed by", "raises": "failed: ValueError", "stopped": "has not responded"}
    *others, last = run_job(SCRIPT, 4, str(tmp_path), how, stopped=3 if how == "stopped" else None)
    for each in others:
        assert each.status in (1, EXIT_STATUS), each.said
        assert re.search(rf"rank 3 \(host .+, pid {last.pid}\) {causes[how]}", each.said), each.said
    assert os.listdir(tmp_path) == []
