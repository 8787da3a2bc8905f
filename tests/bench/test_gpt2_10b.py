"""The script of the 10 billion parameter GPT-2: operations, memory it takes, refusals, and every placement's bits."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from infinity.plan.policy import DeviceInfo
from infinity.sizes import show_bytes
from infinity.tiers.accelerator import AcceleratorDevice
from infinity.tiers.device import CpuDevice
from infinity.tiers.transfer import DONE
from infinity.update.kernels import NATIVE

script = importlib.import_module("gpt2_10b")
memory = importlib.import_module("gpt2_10b_memory")
placed = importlib.import_module("gpt2_10b_smoke")
steps = importlib.import_module("gpt2_10b_steps")
BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16"]
TINY += ["--vocab-size", "256", "--micro-batch-size", "2"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "counted_device", CpuDevice)
    (tmp_path / "text.txt").write_text("".join(f"{n} is {n % 7} more than {n - n % 7}\n" for n in range(2000)))
    monkeypatch.chdir(tmp_path)


def test_operations_are_those_that_torch_counts() -> None:
    shape = replace(script.SMOKE, num_layers=3, checkpoint_activations=False)
    with torch.device("meta"):
        model = script.GPT2(shape)
        tokens = torch.zeros(2, shape.seq_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as whole:
        model(tokens)
    with FlopCounterMode(display=False) as block:
        model.h[0](torch.empty(2, shape.seq_length, shape.hidden_size, device="meta"))
    assert script.model_flops(shape, 2) == 3 * whole.get_total_flops()
    assert script.recomputed_flops(shape, 2) == 0
    checkpointed = replace(shape, checkpoint_activations=True)
    assert script.recomputed_flops(checkpointed, 2) == 3 * block.get_total_flops()


def test_configurations_differ_in_placements_only() -> None:
    configs = [json.loads((BENCH / "configs" / name).read_text()) for name in script.PLACEMENTS.values()]
    placed = [config.pop("zero_optimization") for config in configs]
    assert configs[0] == configs[1] == configs[2]
    devices = [(zero["offload_param"]["device"], zero["offload_optimizer"]["device"]) for zero in placed]
    assert devices == [("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")]


@pytest.mark.parametrize(("flags", "dtype"), [([], "fp16"), (["--fp16"], "fp16"), (["--bf16"], "bf16")])
def test_precision_is_fp16_unless_bf16_is_given(flags: list[str], dtype: str) -> None:
    config = script.config_of(script.parse(flags), "cpu", "8bit")
    assert (config.fp16.enabled, config.bf16.enabled) == (dtype == "fp16", dtype == "bf16")


def test_ten_billion_parameters_take_the_bytes_of_their_formats() -> None:
    """In fp16: 2 bytes of parameter and gradient each, 4 of master, and the moments."""
    args, parameters = script.parse([]), script.SHAPE.num_parameters
    assert parameters == pytest.approx(10.28e9, rel=1e-3)
    for moments, nbytes in (("fp32", 16), ("bf16", 12), ("8bit", 10)):
        plan = memory.plan_of(script.SHAPE, script.config_of(args, "nvme", moments), CpuDevice())
        assert plan.placement.nbytes["nvme"] >= (nbytes - 2) * parameters
        assert plan.nbytes()["nvme"] <= 1.02 * nbytes * parameters


class ApartFromTheHost(CpuDevice):
    """Stands for a device with memory of its own; nothing is allocated on it."""

    @property
    def info(self) -> DeviceInfo:
        return DeviceInfo("cuda", host_addressable=False)


def test_page_shows_the_bytes_of_each_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels for the device, so that states fill half of its memory."""
    kernels = replace(NATIVE, is_exact=lambda kind: True, check_on_device=lambda *states: None)
    monkeypatch.setattr("infinity.engine.platform.Machine.kernels", kernels)
    page, args = (BENCH.parent / "docs" / "gpu.md").read_text(), script.parse([])
    activations = memory.activation_bytes(script.SHAPE, args.micro_batch_size, 2)
    for placement, moments in itertools.product(script.PLACEMENTS, script.MOMENTS):
        plan = memory.plan_of(script.SHAPE, script.config_of(args, placement, moments), ApartFromTheHost())
        needed = {need.memory: show_bytes(need.needed) for need in memory.needs(plan, activations, {})}
        cells = [f"`{placement}`", moments, *(needed[name] for name in ("device", "host", "nvme"))]
        assert f"| {' | '.join(cells)} |" in page


def test_a_plan_allocates_nothing_and_lists_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1_000_000)
    assert script.main([*TINY, "--plan", "--out", "plan.json", "--nvme-path", "."]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) == 9
    refused = [re.search(r"needs ([\d.]+ [kM]B) more on host: ([\d,]+) bytes of 1,000,000", line) for line in lines]
    assert all("fits" in line or found for line, found in zip(lines, refused, strict=True)) and any(refused)
    assert len(json.loads(Path("plan.json").read_text())["needs"]) == 9


def test_a_placement_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    assert script.main([*TINY, "--data", "text.txt"]) == 2
    error = capsys.readouterr().err
    assert re.match(
        r"gpt2_10b.py: cpu with 8bit moments does not fit. It needs .* more on host: [\d,]+ bytes of ", error
    )


def test_bytes_on_a_device_are_held_against_its_limit() -> None:
    args = script.parse(TINY)
    plan = memory.plan_of(script.shape_of(args), script.config_of(args, "cpu", "fp32"), CpuDevice())
    plan = replace(plan, device=DeviceInfo("cuda", host_addressable=False))
    held = plan.nbytes()["device"]
    found = memory.needs(plan, 1000, {"device": held, "host": 1 << 40, "nvme": 0})
    assert [(need.memory, need.missing) for need in found] == [("device", 1000), ("host", 0), ("nvme", 0)]


@pytest.mark.parametrize(("total", "limits"), [(80 << 30, [30 << 30]), (16 << 30, []), (0, [])])
def test_limit_is_enforced_on_larger_devices(total: int, limits: list[int]) -> None:
    found: list[int] = []
    device: Any = SimpleNamespace(info=DeviceInfo("cuda", host_addressable=False, nbytes=total), limit=found.append)
    memory.enforce(device, 30 << 30)
    assert found == limits


def test_copies_are_counted_by_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorDevice, "__init__", lambda self, device: None)
    monkeypatch.setattr(AcceleratorDevice, "copy", lambda self, destination, source, *, after=None: DONE)
    device = steps.CountingDevice(torch.device("meta"))
    host, there = torch.empty(5), torch.empty(5, device="meta")
    for destination, source in ((host, there), (there, host), (there, host), (host, host), (there, there)):
        device.copy(destination, source)
    assert (device.to_device, device.from_device) == (40, 20)


def test_a_run_records_each_step_and_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    run = [*TINY, "--data", "text.txt", "--placement", "optimizer-nvme", "--nvme-path", ".", "--train-iters", "4"]
    assert script.main([*run, "--global-batch-size", "4", "--resident-layers", "1", "--out", "run.json"]) == 0
    result = json.loads(Path("run.json").read_text())
    assert [step["step"] for step in result["steps"]] == [1, 2, 3, 4]
    for step in result["steps"]:
        assert step["nvme_bytes_read"] + step["nvme_bytes_written"] > 0
        assert step["recomputing_tflops"] > step["model_tflops"] > 0
        assert step["tokens_per_second"] * step["seconds"] == pytest.approx(4 * 16)
    out = capsys.readouterr().out
    assert "not measured  accumulation 1: TFLOP/s ÷ resident" in out
    found = script.figures(result | {"resident_tflops": result["steps"][-1]["recomputing_tflops"] * 2}, 8)
    assert any(re.match(r"(met   |MISSED)  accumulation 8: ", text) for text in script.targets(found))
    assert not list(Path().glob("infinity*"))


def test_smoke_fails_if_placements_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = iter(range(9))
    monkeypatch.setattr(script, "SMOKE", replace(script.SMOKE, num_layers=2))
    monkeypatch.setattr(script, "digest", lambda engine: str(min(next(numbers), 8 - 1)))  # the last two agree
    assert script.main(["--smoke", "--data", "text.txt", "--nvme-path", "."]) == 1
    assert capsys.readouterr().out.count("FAILED: with ") == 3


def test_smoke_fails_if_states_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = []

    def misplaced(engine: Any) -> list[str]:
        budgets.append(engine.config.infinity.memory.device)
        return ["parameters are on device, not on host"] if len(budgets) == 2 else []

    monkeypatch.setattr(script, "SMOKE", replace(script.SMOKE, num_layers=2))
    monkeypatch.setattr(script, "misplaced", misplaced)
    assert script.main(["--smoke", "--data", "text.txt", "--nvme-path", ".", "--device-memory", "1GiB"]) == 1
    failed = "FAILED: optimizer-nvme with fp32 moments: parameters are on device, not on host\n"
    out = capsys.readouterr().out
    assert failed in out and out.count("FAILED") == 1
    assert budgets == [None] * 9
    assert not torch.are_deterministic_algorithms_enabled()


def test_states_are_compared_with_their_configuration() -> None:
    args = script.parse([*TINY, "--nvme-path", "."])
    with script.open_engine(script.shape_of(args), script.config_of(args, "cpu", "fp32"), CpuDevice(), 0) as engine:
        assert not list(placed.misplaced(engine))
        other = SimpleNamespace(config=script.config_of(args, "nvme", "fp32"), parts=engine.parts, ledger=engine.ledger)
        elsewhere = ["parameters are on host, not on nvme", "optimizer states are on host, not on nvme"]
        assert list(placed.misplaced(other)) == elsewhere
        empty = SimpleNamespace(tier_bytes=lambda: {"device": 0, "host": 1, "nvme": 0})
        [problem] = placed.misplaced(SimpleNamespace(config=engine.config, parts=engine.parts, ledger=empty))
        assert re.match(r"host has reserved 1 bytes for states of [\d,]+", problem)


@pytest.mark.campaign(few=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["--fp16", "--bf16"])
def test_placements_of_the_deep_model_agree_in_every_bit(precision: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(BENCH / "gpt2_10b_v100.sh"), "--smoke", precision, "--out", "smoke.json", "--nvme-path", "."]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "smoke.json").read_text())["runs"]
    assert len(runs) == 9 and len({run["digest"] for run in runs}) == 3
    assert not any(run["misplaced"] for run in runs)
    assert len(re.findall(r"loss \d+\.\d+", done.stdout)) == 9
