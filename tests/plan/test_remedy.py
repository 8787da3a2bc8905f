"""Advice of an OutOfMemoryError and of `infinity plan`: what it names is done, and then the engine runs."""

from __future__ import annotations

import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import infinity
from infinity.comm.communicator import Communicator
from infinity.config import Config
from infinity.engine.budget import check_memory, checkpoint_nbytes, host_bytes, plan_units
from infinity.engine.wiring import PlannedModel, plan_model
from infinity.errors import OutOfMemoryError
from infinity.model.remote import drop_values
from infinity.observe.log import logger
from infinity.plan.budget import Budget
from infinity.plan.policy import RankInfo
from infinity.sizes import parse_size, show_bytes
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice
from infinity.tiers.headroom import PROCESS
from support.advice import DEVICE, VALUE, followed
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches


def content_of(folder: Path, **options: Any) -> dict[str, Any]:
    return engine_config(folder=folder, **options).model_dump()


def planned(content: dict[str, Any], device: Any) -> tuple[Config, PlannedModel]:
    config, model = Config.load(content), seeded(Stack)
    return config, plan_model(model, config, [{"params": list(model.parameters())}], device, Communicator(device))


def advice_of(content: dict[str, Any], device: Any, available: dict[TierKind, int]) -> str | None:
    """Return the advice of the error with so much memory; None: the plan fits."""
    config, found = planned(content, device)
    try:
        check_memory(config, found.plan, found.budget, found.replan, available)
    except OutOfMemoryError as error:
        return error.hint
    return None


def smallest(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `content` with the smallest buffers, and all states on nvme that may be there."""
    found = deepcopy(content)
    zero, nvme = found["zero_optimization"], {"device": "nvme", "nvme_path": str(folder)}
    zero["offload_optimizer"] = nvme
    if zero["stage"] == 3:
        zero["offload_param"] = nvme
    least = {"unit_size": 4096, "prefetch_bytes": 0, "cache_bytes": 0, "tile_size": 4096, "read_ahead_bytes": 0}
    found["infinity"] |= {**least, "memory": {}}
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"unit_size": 1 << 16, "prefetch_bytes": 1 << 20},
    {"param": "cpu", "optim": "cpu"},
    {"param": "none", "optim": "none", "bf16": True},
    {"bf16": True, "moments": "8bit", "clip": 1.0},
    {"memory": {"host": "1GiB"}},
    {"memory": {"host_params": 10**9}},
    {"accumulation": 2, "tile_size": 8192},
    {"stage": 2, "param": "none", "optim": "cpu"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.02, 0.999))
def test_a_plan_fits_with_the_change_that_is_advised(options: dict[str, Any], share: float, tmp_path: Path) -> None:
    """Or no buffers are small enough, and the advice is no change of a key. Activations are on the device."""
    content = content_of(tmp_path, **options)
    device = LateDevice()
    plan = planned(content, device)[1].plan
    available = {TierKind.HOST: PROCESS + int(share * plan.peak_of_host()), TierKind.DEVICE: 1 << 40}
    advice = advice_of(content, device, available)
    assert advice is not None
    if "use a smaller model" in advice:
        assert not VALUE.search(advice) and not DEVICE.search(advice)
        assert advice_of(smallest(content, tmp_path), device, available) is not None, "a config fits"
        return
    changed = followed(content, advice, tmp_path)
    assert changed != content
    assert advice_of(changed, device, available) is None, advice


def test_beside_activations_no_change_is_advised_that_only_starts(tmp_path: Path) -> None:
    """They are in host memory too, and their bytes are not known: the error names the parts and infinity plan."""
    content = content_of(tmp_path, bf16=True)
    config, found = planned(content, CpuDevice())
    peak, model = found.plan.peak_of_host(), seeded(Stack)
    available = {TierKind.HOST: PROCESS + peak - 1}
    with pytest.raises(OutOfMemoryError) as raised:
        check_memory(config, found.plan, found.budget, found.replan, available, model)
    hint = raised.value.hint
    parts = (
        r"needed are (?:(.+) for states, )?(.+) for buffers, (.+) for threads and libraries\. The .+ hold (.+?) more"
    )
    states, buffers, process, held = re.match(parts, hint).groups()  # type: ignore[union-attr]
    assert sum(map(parse_size, (states or "0 B", buffers, process))) == pytest.approx(peak + PROCESS, rel=0.01)
    assert held == show_bytes(host_bytes(model)) and " --host-memory " in hint
    assert not VALUE.search(hint) and not DEVICE.search(hint)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.1, 0.999), options=st.sampled_from(OPTIONS[:5]))
def test_an_engine_trains_within_a_budget_that_the_advice_made_fit(
    options: dict[str, Any], share: float, tmp_path: Path
) -> None:
    """An engine with the advised change runs in the budget, with the losses of one without it."""

    def losses(content: dict[str, Any]) -> list[float]:
        with open_engine(seeded(Stack), Config.load(content)) as engine:
            assert limit is None or engine.parts.plan.peak_of_host() <= limit
            return train(engine, token_batches(2 * engine.batch.accumulation))

    content = content_of(tmp_path, **options)
    limit = None
    expected = losses(content)
    limit = int(share * planned(content, CpuDevice())[1].plan.peak_of_host())
    content.setdefault("infinity", {})["memory"] = {"host": limit}
    try:
        assert losses(content) == expected
    except OutOfMemoryError as error:
        if "use a smaller model" not in error.hint:
            assert losses(followed(content, error.hint, tmp_path)) == expected
        raised = re.match(r"raise infinity\.memory\.host to (\d+), or ", error.hint)
        assert raised is not None
        content["infinity"]["memory"] = {"host": (limit := int(raised[1]))}
        assert losses(content) == expected


def test_bytes_of_a_model_are_those_of_values_in_its_memory() -> None:
    """Tied parameters count once. Values of rank 0 alone, and those on the meta device, take none here."""
    layers = [torch.nn.Linear(8, 8, bias=False, device=device) for device in ("cpu", "cpu", "cpu", "meta")]
    layers[1].weight = layers[0].weight
    model = torch.nn.Sequential(*layers)
    assert host_bytes(model) == 2 * 8 * 8 * 4
    drop_values(layers[2].weight, "2.weight")
    assert host_bytes(model) == 8 * 8 * 4


def test_values_in_a_file_of_init_take_no_memory(tmp_path: Path) -> None:
    with infinity.Init(engine_config(folder=tmp_path, unit_size=4096)):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(20)))
    assert host_bytes(model) <= 4 * 4096 < sum(param.nbytes for param in model.parameters())


@pytest.mark.parametrize("durable", [False, True])
def test_a_checkpoint_that_memory_does_not_hold_is_announced(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At start, since it would be killed after the training. A durable run copies files."""
    monkeypatch.setattr(logger, "propagate", True)
    content = content_of(tmp_path, bf16=True)
    if durable:
        content["infinity"]["durable"] = True
    config, found = planned(content, CpuDevice())
    nbytes, unit = checkpoint_nbytes(found.plan)
    for left, is_announced in ((nbytes, False), (nbytes - 1, not durable)):
        available = {TierKind.HOST: found.plan.peak_of_host() + PROCESS + left}
        check_memory(config, found.plan, found.budget, found.replan, available)
        assert (f"saving or loading a checkpoint takes up to {show_bytes(nbytes)}" in caplog.text) == is_announced
        assert not is_announced or f"for states of unit {unit}, and " in caplog.text


def of_checkpoints(tmp_path: Path, width: int, ranks: RankInfo, **options: Any) -> int:
    """Return the bytes that checkpoints of two layers take."""
    config = Config.load(content_of(tmp_path, bf16=True, **options))
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
    groups = [{"params": list(model.parameters())}]
    return checkpoint_nbytes(plan_units(model, config, groups, ranks, CpuDevice().info, Budget())[1])[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_takes_as_much_on_several_ranks(stage: int, tmp_path: Path) -> None:
    """Rank 0 gathers ranges of as many elements, and holds whole parameters already in stages 0 to 2."""
    nvme = {} if stage == 3 else {"param": "none"}
    found = [
        of_checkpoints(tmp_path, 2048, RankInfo(size, size if stage else 1, backend), stage=stage, **nvme)
        for size, backend in ((1, ""), (4, "gloo"))
    ]
    assert found[1] <= found[0]


def test_a_checkpoint_takes_no_more_for_larger_units(tmp_path: Path) -> None:
    small, large = (of_checkpoints(tmp_path, width, RankInfo()) for width in (2048, 8192))
    assert small == large
    whole = of_checkpoints(tmp_path, 8192, RankInfo(1, 1, "", model_parallel=2))
    assert whole > 10 * large


CHECKPOINTS = """
import sys, threading, time
import torch, infinity
from infinity.engine.budget import checkpoint_nbytes

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {
    "train_batch_size": 2,
    "bf16": {"enabled": sys.argv[2] == "bf16"},
    "zero_optimization": {"offload_param": nvme, "offload_optimizer": nvme},
    "infinity": {"unit_size": "64KiB", "tile_size": 65536, "prefetch_bytes": 0},
}
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Embedding(16384, 512), torch.nn.Linear(512, 8))
with infinity.initialize(model=model, config=config)[0] as engine:
    for _ in range(2):
        engine.backward(engine(torch.arange(8)[None]).float().square().mean())
        engine.step()
    engine.settle()
    for use in (engine.save_checkpoint, engine.load_checkpoint):
        seen, ended = [resident()], []

        def watch():
            while not ended:
                seen.append(resident())
                time.sleep(0.001)

        thread = threading.Thread(target=watch)
        thread.start()
        use(sys.argv[1])
        ended.append(True)
        thread.join()
        print((max(seen) - seen[0]) / checkpoint_nbytes(engine.parts.plan)[0])
"""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_takes_no_more_memory_than_was_announced(dtype: str, tmp_path: Path) -> None:
    """Its states alone are 12 bytes for each of 8.4 million parameters, eight ranges."""
    command = [sys.executable, "-c", CHECKPOINTS, str(tmp_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    saving, loading = map(float, done.stdout.split())
    assert 0.1 < saving < 1.25 and 0.3 < loading < 1.25


def test_a_model_and_buffers_that_both_have_to_shrink_are_named_together(tmp_path: Path) -> None:
    """The smallest buffers do not fit beside the model, and do without it. The limit is to be raised by what is missing
    and what the process exceeds it by.
    """
    content = content_of(tmp_path, bf16=True, tile_size=8192)
    config, found = planned(content, LateDevice())
    model = seeded(Stack)
    tiny = planned(smallest(content, tmp_path), LateDevice())[1].plan.peak_of_host()
    beside = PROCESS + tiny - 1
    with pytest.raises(OutOfMemoryError) as raised:
        available = {TierKind.HOST: beside}
        check_memory(config, found.plan, found.budget, found.replan, available, model, ("ulimit -d", 5 << 20))
    hint = raised.value.hint
    assert "construct the model on the meta device" in hint and ", and set infinity." in hint
    assert "use a smaller model" not in hint
    missing = found.plan.peak_of_host() + PROCESS - beside + (5 << 20) + (4 << 20)
    assert f"raise ulimit -d, which this process exceeds by 5.24 MB, by {-(-missing >> 10):,} KiB" in hint
    changed = followed(content, hint, tmp_path)
    assert advice_of(changed, LateDevice(), {TierKind.HOST: beside + host_bytes(model)}) is None


LIMITED = """
import os, resource, sys
from contextlib import nullcontext
import torch, infinity
from infinity.errors import OutOfMemoryError
from infinity.tiers.device import CpuDevice
from infinity.tiers.headroom import PROCESS

def private():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
torch.set_num_threads(1)
nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
zero = {"offload_param": nvme, "offload_optimizer": nvme}
config = {"train_batch_size": 16, "zero_optimization": zero, "infinity": {"unit_size": "5MB"}}
start = private()
context = {"plain": nullcontext(), "meta": torch.device("meta"), "Init": infinity.Init(config)}[sys.argv[2]]
with context:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
resource.setrlimit(resource.RLIMIT_DATA, (start + 270 * 10**6, resource.RLIM_INFINITY))
try:
    with infinity.initialize(model=model, config=config, device=CpuDevice())[0] as engine:
        for _ in range(3):
            engine.backward(engine(torch.randn(16, 1024)).square().mean())
            engine.step()
    print("trained")
except OutOfMemoryError as error:
    print(error)
"""


def test_a_model_that_leaves_too_little_memory_is_to_be_built_without_any(tmp_path: Path) -> None:
    """Its 101 MB are free on the meta device and in infinity.Init, and the run fits `ulimit -d`."""

    def printed(context: str) -> str:
        command = [sys.executable, "-c", LIMITED, str(tmp_path), context]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "trained\n" or "too little host memory (ulimit -d): " in done.stdout
        return done.stdout.partition("are missing; ")[2] or done.stdout

    assert "hold 101 MB more, and would hold none in infinity.Init. This alone may not suffice" in printed("plain")
    assert printed("meta") == printed("Init") == "trained\n"
