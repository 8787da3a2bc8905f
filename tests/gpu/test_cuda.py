"""The engine on an accelerator, beside a plain loop on the same device; its updates and norms beside the host's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infinity.optim.cpu_adam import split_master, update_flat
from infinity.plan.layout import Part
from infinity.rules import Hyper
from infinity.update.kernels import squared_norm, update_run
from support.accelerator import accelerator, device, engine_device
from support.configs import PLACEMENTS, engine_config
from support.loops import Batches, Result, assert_close, assert_same, plain, trained
from support.models import Stack, token_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(accelerator() is None, reason="there is no accelerator here"),
]


def batches(count: int) -> Batches:
    return [tuple(part.to(device()) for part in batch) for batch in token_batches(count)]


def model() -> Stack:
    torch.manual_seed(0)
    return Stack()


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("param", "optim"), PLACEMENTS)
def test_every_placement_matches_a_plain_loop_on_the_same_device(param: str, optim: str, clip: float) -> None:
    config = engine_config(param, optim, clip=clip)
    ours = trained(model(), batches(8), config, engine_device())
    assert_close(ours, plain(model().to(device()), batches(8), config), loss=1e-5, parameters=1e-4)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_where_host_and_nvme_states_live_changes_no_bit(clip: float, accumulation: int) -> None:
    """States on host and nvme are updated by the same native kernel, so their bits agree."""
    results: list[Result] = []
    for param, optim in [(p, o) for p, o in PLACEMENTS if o != "none"]:
        config = engine_config(param, optim, bf16=True, clip=clip, accumulation=accumulation)
        results.append(trained(model(), batches(6), config, engine_device()))
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.parametrize("schedule", ["during_backward", "next_forward"])
def test_update_schedules_agree(schedule: str) -> None:
    ours, expected = (
        trained(model(), batches(6), engine_config(bf16=True, update=one), engine_device())
        for one in (schedule, "after_backward")
    )
    assert_same(ours, expected)


@pytest.mark.parametrize("kept", ["remainder", "master"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_fused_update_on_the_device_follows_the_native_one(kept: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    n = 100_003
    master = torch.randn(n, generator=generator)
    param, remainder = split_master(master)
    host = {
        "exp_avg": torch.randn(n, generator=generator) * 1e-3,
        "exp_avg_sq": torch.rand(n, generator=generator) * 1e-6,
        kept: remainder if kept == "remainder" else master,
    }
    grad = torch.randn(n, generator=generator).bfloat16()
    there = {name: state.to(device()) for name, state in host.items()}
    param_there = param.to(device())
    hyper = Hyper(lr=1e-3, weight_decay=0.1)
    update_flat(param, host[kept], grad, [host["exp_avg"], host["exp_avg_sq"]], [], hyper, 7, grad_scale=scale)
    update_run(there, param_there, grad.to(device()), hyper, 7, scale, 0)
    torch.testing.assert_close(param_there.cpu(), param, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(there["exp_avg"].cpu(), host["exp_avg"], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(there["exp_avg_sq"].cpu(), host["exp_avg_sq"], rtol=1e-5, atol=1e-12)


def test_the_norm_on_the_device_is_the_norm_on_the_host() -> None:
    values = torch.randn(10_000_019, generator=torch.Generator().manual_seed(5))
    parts = [Part(0, 7), Part(256, 5_000_000), Part(5_000_192, values.numel(), copies=2)]
    assert squared_norm(values.to(device()), parts) == pytest.approx(squared_norm(values, parts), rel=1e-12)
    values[77] = float("nan")
    assert not squared_norm(values.to(device()), [Part(0, 7), Part(70, 80)]) >= 0


def test_one_rank_runs_the_collectives(tmp_path: Path) -> None:
    """Over NCCL; on "late", over a group whose collectives are as late."""
    config, backend = engine_config(bf16=True, clip=0.5), "nccl"
    alone = trained(model(), batches(4), config, engine_device())
    if device().type == "late":
        from late import queued

        backend = queued.register("copied", factor=1)
    dist.init_process_group(backend, init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        assert_same(trained(model(), batches(4), config, engine_device()), alone)
    finally:
        dist.destroy_process_group()
