"""The engine on an accelerator under other streams, delays and sizes than those of a plain run: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from infinity.config import Config
from support.accelerator import accelerator, delay, device, engine_device, new_stream
from support.configs import engine_config
from support.loops import Batches, Result, assert_same, open_engine, parameters_of, trained
from support.models import Stack, token_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(accelerator() is None, reason="there is no accelerator here"),
]

HOST_PLACEMENTS = [("none", "cpu"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme")]
"""Placements whose updates run on the host."""
PLACEMENTS = [("none", "none"), ("cpu", "none"), *HOST_PLACEMENTS]
SCHEDULES = ["during_backward", "after_backward", "next_forward"]


def delayed(model: nn.Module) -> nn.Module:
    """Let the stream that computes be late at the begin and the end of each module, in both directions."""
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: delay())
        module.register_forward_hook(lambda *_: delay())
        module.register_full_backward_hook(lambda *_: delay())
    return model


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def run(
    config: Config,
    *,
    make: Callable[[], nn.Module] = stack,
    batches: Batches | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    around_step: Callable[[], AbstractContextManager[object]] | None = None,
) -> Result:
    """Train with batches in host memory. around: entered for forward and backward, and for `step`, unless
    `around_step` is given."""
    losses = []
    with open_engine(make(), config, engine_device()) as engine:
        for batch in token_batches(6) if batches is None else batches:
            with around():
                loss = engine(*batch)
                engine.backward(loss)
            with (around_step or around)():
                engine.step()
            losses.append(loss.detach())
        parameters = parameters_of(engine)
        torch.accelerator.synchronize()  # the losses are of other streams
        return Result([loss.item() for loss in losses], parameters)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("param", "optim"), PLACEMENTS)
def test_a_stream_of_the_user_changes_no_bit(param: str, optim: str, clip: float) -> None:
    """A new stream for each micro-batch, and one for each step."""
    config = engine_config(param, optim, bf16=True, clip=clip)
    assert_same(run(config, around=new_stream), run(config))


def test_a_step_outside_of_the_stream_changes_no_bit() -> None:
    config = engine_config("cpu", "cpu", bf16=True, clip=0.5)
    assert_same(run(config, around=new_stream, around_step=nullcontext), run(config))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("param", "optim"), PLACEMENTS)
def test_late_compute_changes_no_bit(param: str, optim: str, schedule: str) -> None:
    config = engine_config(param, optim, bf16=True, update=schedule)
    assert_same(run(config, make=lambda: delayed(stack())), run(config))


@pytest.mark.parametrize("prefetch", [0, 10**9])
def test_late_compute_new_stream_of_the_user_changes_no_bit(prefetch: int) -> None:
    config = engine_config("cpu", "nvme", bf16=True, clip=0.5, accumulation=2, prefetch_bytes=prefetch)
    assert_same(run(config, make=lambda: delayed(stack()), around=new_stream), run(config))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_placements_agree_in_fp16(moments: str) -> None:
    fp16 = {"initial_scale_power": 8}
    results = [run(engine_config(*place, fp16=fp16, clip=0.5, moments=moments)) for place in HOST_PLACEMENTS]
    for other in results[1:]:
        assert_same(results[0], other)


class Wide(nn.Module):
    """Units of 16 MB in fp32, about two staging buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2000, 2000) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def wide() -> nn.Module:
    torch.manual_seed(0)
    return Wide()


def test_units_larger_than_a_staging_buffer_match_units_in_host_memory() -> None:
    generator = torch.Generator().manual_seed(1)
    batches: Batches = [(torch.randn(4, 2000, generator=generator),) for _ in range(2)]
    sizes = {"unit_size": "64MiB", "tile_size": 1 << 20}
    results = [
        run(engine_config(*place, **sizes), make=wide, batches=batches) for place in (("cpu", "cpu"), ("nvme", "nvme"))
    ]
    assert_same(*results)


def test_batches_in_host_memory_match_batches_on_the_device() -> None:
    config = engine_config("cpu", "cpu", bf16=True)
    there = [tuple(part.to(device()) for part in batch) for batch in token_batches(6)]
    assert_same(run(config), trained(stack(), there, config, engine_device()))
