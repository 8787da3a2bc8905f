"""A plan predicts the allocated bytes, and is rejected if memory is short."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.comm.communicator import Communicator
from infinity.config import Config
from infinity.engine.describe import describe, left_under_limit
from infinity.engine.wiring import plan_model
from infinity.errors import OutOfMemoryError
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.plan.policy import DeviceInfo
from infinity.plan.shortage import keys_of_buffers, shortage
from infinity.sizes import parse_size, show_bytes
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.models import Stack, seeded, token_batches

CONFIGS: list[dict[str, Any]] = [
    *({"param": param, "optim": optim} for param, optim in PLACEMENTS),
    {"bf16": True, "accumulation": 2},
    {"bf16": True, "moments": "8bit", "update": "next_forward"},
    {"stage": 1, "param": "none", "optim": "cpu", "accumulation": 2},
    {"stage": 0, "param": "none", "optim": "none"},
    {"prefetch_bytes": 0, "unit_size": 4096},
    {"cache_bytes": "auto", "debug": False},
    {"optimizer": "SGD", "clip": 1.0},
]


class CountingDevice(CpuDevice):
    """Counts the bytes allocated for the device and for the host."""

    def __init__(self) -> None:
        self.device_bytes = 0
        self.host_bytes = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        self.device_bytes += nbytes
        return super().empty(nbytes)

    def host_buffer(self, nbytes: int, *, pin: bool = True) -> torch.Tensor:
        self.host_bytes += nbytes
        return super().host_buffer(nbytes, pin=pin)


class CountingLateDevice(LateDevice):
    """The same, with its own memory."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.device_bytes = 0
        self.host_bytes = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        self.device_bytes += nbytes
        return super().empty(nbytes)

    def host_buffer(self, nbytes: int, *, pin: bool = True) -> torch.Tensor:
        self.host_bytes += nbytes
        return super().host_buffer(nbytes, pin=pin)


def on_disk(folder: Path) -> int:
    """Return the bytes reserved for all open files in `folder`, each counted once."""
    sizes: dict[int, int] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        with suppress(OSError):
            if os.readlink(path).startswith(str(folder)):
                found = os.stat(path)
                sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def described(options: dict[str, Any], folder: Path, device: CpuDevice | LateDevice | None = None) -> Plan:
    model = seeded(Stack)
    config = engine_config(folder=folder, **options)
    seam = device or CpuDevice()
    return plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan


@pytest.mark.parametrize("options", CONFIGS, ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
def test_what_it_says_is_allocated(options: dict[str, Any], late: bool, tmp_path: Path) -> None:
    device = CountingLateDevice() if late else CountingDevice()
    plan = described(options, tmp_path, device)
    assert (device.device_bytes, device.host_bytes, on_disk(tmp_path)) == (0, 0, 0)
    engine = infinity.initialize(model=seeded(Stack), config=engine_config(folder=tmp_path, **options), device=device)[
        0
    ]
    with engine:
        assert engine.parts.plan == plan
        held = {"device": device.device_bytes, "host": device.host_bytes, "nvme": on_disk(tmp_path)}
        at_start = plan.nbytes()
        at_start["nvme"] += plan.passing.get("nvme", 0)
        assert held == at_start == engine.ledger.tier_bytes()


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("options", [{}, {"prefetch_bytes": 0}, {"cache_bytes": "auto"}, {"unit_size": 4096}], ids=str)
def test_keys_are_listed_with_the_bytes_of_their_buffers(options: dict[str, Any], late: bool, tmp_path: Path) -> None:
    """Each key with what its buffers take, the most bytes first; none that is 0 already."""
    plan = described({"prefetch_bytes": "auto", "cache_bytes": 0, **options}, tmp_path, LateDevice() if late else None)
    sizes = dict(keys_of_buffers(plan, (TierKind.DEVICE, TierKind.HOST)))
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert not any("prefetch_bytes" in key for key in sizes) or plan.prefetch_bytes
    assert not any("cache_bytes" in key for key in sizes) or options.get("cache_bytes") == "auto"
    less = described({**options, "prefetch_bytes": 0, "cache_bytes": 0}, tmp_path, LateDevice() if late else None)
    ahead = sum(nbytes for key, nbytes in sizes.items() if "prefetch_bytes" in key or "cache_bytes" in key)
    assert plan.peak_of_host() - less.peak_of_host() == ahead
    assert sizes["infinity.tile_size"] == sum(pool.nbytes for pool in plan.pools if "tiles" in pool.name)


@pytest.mark.parametrize("shares", ["auto", "equal", [5, 1, 2]])
def test_several_folders_are_counted_in_whole_chunks(tmp_path: Path, shares: Any) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    config = engine_config(folder=folders, aio={"shares": shares})
    with pytest.warns(RuntimeWarning, match="one file system"):
        engine = infinity.initialize(model=seeded(Stack), config=config, device=CpuDevice())[0]
    with engine:
        assert on_disk(tmp_path) == engine.parts.plan.peak_nbytes()["nvme"]


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_it_fits_in_what_it_needs_and_not_in_a_byte_less(options: dict[str, Any], tmp_path: Path) -> None:
    plan = described(options, tmp_path)
    needed = plan.peak_nbytes()["device"] + plan.peak_nbytes()["host"]
    assert shortage(plan, {"host": needed}) is None
    missing = shortage(plan, {"host": needed - 1})
    assert missing is not None and missing[1:4] == ("host memory", needed, needed - 1)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"param": "cpu", "optim": "cpu"}, "for states, .* for buffers, .* .* --host-memory "),
        ({"prefetch_bytes": 1 << 30}, "needed are .* for buffers, .* .* --host-memory "),
    ],
)
def test_too_little_memory_is_refused_before_a_byte(
    options: dict[str, Any], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.engine.platform.available_memory", lambda: (32 << 20) + 800_000)
    device = CountingDevice()
    with pytest.raises(OutOfMemoryError, match=fix):
        infinity.initialize(model=seeded(Stack), config=engine_config(folder=tmp_path, **options), device=device)
    assert (device.device_bytes, device.host_bytes, list(tmp_path.iterdir())) == (0, 0, [])


LIMIT = {"param": "cpu", "optim": "cpu", "cache_bytes": 0, "unit_size": 4096}


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("optim", ["none", "cpu", "nvme"])
def test_a_limit_of_device_memory_holds_to_the_byte(optim: str, late: bool, tmp_path: Path) -> None:
    """Less memory gives a smaller depth ahead, then an error that names the key and the missing bytes."""
    device = CountingLateDevice() if late else CountingDevice()
    options = {**LIMIT, "optim": optim}
    ample = described(options, tmp_path, device)
    least = described({**options, "memory": {"device": 1}}, tmp_path, device)
    assert least.prefetch_bytes < ample.prefetch_bytes
    needed = least.peak_nbytes()["device"]
    assert needed < ample.peak_nbytes()["device"]

    def open_with(limit: int) -> infinity.Engine:
        config = engine_config(folder=tmp_path, **options, memory={"device": limit})
        return infinity.initialize(model=seeded(Stack), config=config, device=device)[0]

    with open_with(needed) as engine:
        assert device.device_bytes == engine.ledger.tier_bytes()["device"] == least.nbytes()["device"] <= needed
    device.device_bytes = device.host_bytes = 0
    said = rf"infinity\.memory\.device.*{needed:,} bytes are needed.* 1 are missing; raise infinity\.memory\.device"
    with pytest.raises(OutOfMemoryError, match=said):
        open_with(needed - 1)
    assert (device.device_bytes, device.host_bytes, list(tmp_path.iterdir())) == (0, 0, [])


def test_ranks_compare_the_depth_ahead(tmp_path: Path) -> None:
    """Ranks on devices of different sizes would evict different units."""

    class Sized(CpuDevice):
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

        @property
        def info(self) -> DeviceInfo:
            return DeviceInfo("cuda", host_addressable=False, nbytes=self.nbytes)

    model, config = seeded(Stack), engine_config(folder=tmp_path, **LIMIT)
    small, large, larger = (
        plan_model(model, config, [{"params": list(model.parameters())}], device, Communicator(device)).common
        for device in map(Sized, (200_000, 1 << 30, 1 << 31))
    )
    assert large == larger and len(small) == len(large)
    (pair,) = [(one, other) for one, other in zip(small, large, strict=True) if one != other]
    assert all(line.startswith("infinity.prefetch_bytes gives ") for line in pair)


def test_units_are_cut_by_the_limit_of_device_memory(tmp_path: Path) -> None:
    """`unit_size: auto` takes a 16th of it, on the CPU too."""

    def largest(**options: Any) -> int:
        with torch.device("meta"):
            model = Repeated(2, width=4096)
        config = engine_config(folder=tmp_path, unit_size="auto", **options)
        seam = CpuDevice()
        plan = plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan
        return max(layout.nbytes for layout in plan.units)

    assert largest() == largest(memory={"device": "1GiB"}) < largest(memory={"device": "16GiB"})


class Repeated(nn.Module):
    """Blocks of several units each, the last of which differs."""

    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.head = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})
            for _ in range(depth)
        )
        self.layers.append(nn.Linear(width, 2 * width))


@pytest.mark.parametrize("options", [{}, {"moments": "8bit"}, {"optimizer": "Lion"}, {"optimizer": "SGD"}], ids=str)
def test_the_bytes_of_a_plain_loop_are_those_that_it_holds(options: dict[str, Any], tmp_path: Path) -> None:
    """Parameters, gradients and moments in fp32; frozen parameters have neither of the latter."""
    model = seeded(Stack)
    model.embedding.requires_grad_(False)
    config, seam = engine_config(folder=tmp_path, **options), CpuDevice()
    plan = plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan
    trained = [p for p in model.parameters() if p.requires_grad]
    held = list(model.parameters())
    if options.get("optimizer") == "Lion":  # torch has none: one moment
        held += [*trained, *trained]
    else:
        optimizer = (
            torch.optim.SGD(trained, 0.1, momentum=0.9) if options.get("optimizer") else torch.optim.AdamW(trained)
        )
        model(*token_batches(1)[0]).backward()
        optimizer.step()
        held += [p.grad for p in trained if p.grad is not None]
        held += [state for each in optimizer.state.values() for key, state in each.items() if key != "step"]
    nbytes = sum(tensor.numel() * 4 for tensor in held)
    states = "momentum" if options.get("optimizer") == "SGD" else "optimizer states"
    line = f"a plain PyTorch loop holds {show_bytes(nbytes)} of parameters, gradients and {states} in memory"
    assert line in describe(plan)


def test_a_plain_loop_in_16_bits_is_counted_with_its_masters(tmp_path: Path) -> None:
    model = seeded(Stack).bfloat16()
    config, seam = engine_config(folder=tmp_path, bf16=True), CpuDevice()
    plan = plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan
    nbytes = sum(parameter.numel() for parameter in model.parameters()) * (2 + 2 + 3 * 4)
    (line,) = (line for line in describe(plan).splitlines() if line.startswith("a plain PyTorch loop"))
    assert f" {show_bytes(nbytes)} of " in line and "in fp32 or in 16 bits with fp32 masters, in memory" in line


@pytest.mark.parametrize("width, depth, saves", [(8, 4, False), (256, 8, True)])
def test_a_model_too_small_to_save_memory_says_so(width: int, depth: int, saves: bool, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    seam = CpuDevice()
    config = engine_config(folder=tmp_path)
    plan = plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan
    plain = 16 * sum(p.numel() for p in model.parameters())
    held = sum(nbytes for tier, nbytes in plan.nbytes().items() if tier.in_memory)
    (line,) = (line for line in describe(plan).splitlines() if line.startswith("a plain PyTorch loop"))
    assert (held < plain) == saves
    assert ("; buffers have a least size, so a model as small as this saves none" in line) != saves
    assert line.startswith(f"a plain PyTorch loop holds {show_bytes(plain)} of ")


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(("param", "optim"), PLACEMENTS)
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
def test_the_kinds_in_a_memory_add_up(param: str, optim: str, clip: float, late: bool, tmp_path: Path) -> None:
    """Gradients that a memory holds only while they are stored are in the next part of the line."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # extents are rounded up, by a few percent of these
    config, seam = engine_config(param, optim, clip=clip, folder=tmp_path), LateDevice() if late else CpuDevice()
    plan = plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan
    (line,) = (line for line in describe(plan).splitlines() if line.startswith("this rank holds"))
    for total, listed in re.findall(r"([\d.]+ \w+) (?:in|on) [^(,;]*\((\d[^)]*)\)", line):
        parts = [parse_size(" ".join(part.split()[:2])) for part in listed.split(", ")]
        assert sum(parts) == pytest.approx(parse_size(total), rel=0.05), line


def test_equal_blocks_share_a_line(tmp_path: Path) -> None:
    model = Repeated(40)
    config = Config.load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
            "infinity": {"unit_size": 70_000},
        }
    )
    device = CpuDevice()
    plan = plan_model(model, config, [{"params": list(model.parameters())}], device, Communicator(device)).plan
    lines = describe(plan).splitlines()
    assert len(plan.units) > 80
    assert any(line.startswith("layers.0 … 39 (40 alike, 2 units each)  33,088 ") for line in lines)
    assert any(line.startswith("layers.40 ") for line in lines)
    assert len(lines) <= 9


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "on arrival"),
        ({"update": "next_forward"}, "nvme 16.38 kB"),
        ({"accumulation": 2}, "nvme 16.38 kB"),
        ({"managed": False}, "nvme 16.38 kB"),
        ({"accumulation": 2, "stage": 1}, "on arrival"),
    ],
    ids=str,
)
def test_a_gradient_is_shown_where_it_is_stored(options: dict[str, Any], shown: str, tmp_path: Path) -> None:
    """A gradient that waits has a tier: for its update, or for further micro-batches unless buffers hold their sum."""
    model = nn.Sequential(nn.Linear(32, 61), nn.Linear(61, 32).requires_grad_(False))
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = Config.load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": options.get("accumulation", 1),
            "managed_gradient_accumulation": options.get("managed", True),
            "zero_optimization": {"stage": options.get("stage", 3), "offload_optimizer": nvme},
            "infinity": {"update": options.get("update", "auto"), "unit_size": 8192},
        }
    )
    device = CpuDevice()
    plan = plan_model(model, config, [{"params": list(model.parameters())}], device, Communicator(device)).plan
    trained, frozen = (next(line for line in describe(plan).splitlines() if line.startswith(unit)) for unit in "01")
    assert shown in trained
    assert "float32, frozen" in frozen and frozen.split()[-2:] == ["-", "-"]


@pytest.mark.parametrize(("asked", "units"), [(0, 0), (1, 1), ("auto", 4)])
def test_any_prefetch_holds_a_unit(tmp_path: Path, asked: int | str, units: int) -> None:
    """A budget below one unit takes the buffer of a unit, so it fetches one ahead."""
    config = Config.load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
            "infinity": {"unit_size": 70_000, "prefetch_bytes": asked, "cache_bytes": 0},
        }
    )
    model, device = Repeated(40), CpuDevice()
    plan = plan_model(model, config, [{"params": list(model.parameters())}], device, Communicator(device)).plan
    assert plan.prefetch_bytes == units * max(unit.nbytes for unit in plan.units)


def test_a_llama_of_7b_takes_ten_lines(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    device = CpuDevice()
    config = engine_config(folder=tmp_path, bf16=True, unit_size="64MiB", debug=False)
    plan = plan_model(model, config, [{"params": list(model.parameters())}], device, Communicator(device)).plan
    text = describe(plan)
    assert "model.layers.0 … 31 (32 alike, 8 units each)" in text and len(text.splitlines()) <= 10


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("pin", [True, False])
def test_only_what_the_device_copies_is_pinned(tmp_path: Path, clip: float, pin: bool) -> None:
    """The plan pins parameters and gradients with reserved memory, and no optimizer states, which the host updates."""
    options = {"param": "cpu", "optim": "cpu", "clip": clip}
    config = engine_config(**options).model_dump(mode="json", exclude_unset=True)
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part]["pin_memory"] = pin
    model = seeded(Stack)
    plan = plan_model(model, Config.load(config), [], LateDevice(), Communicator(CpuDevice())).plan
    pinned = plan.pinned(TierKind.HOST)
    if not pin:
        assert not pinned
        return
    offsets = {start for start, _ in pinned}
    copied = [State.PARAM, State.GRAD] if clip else [State.PARAM]
    assert offsets == {plan.placement.of(unit.index, state).offset for unit in plan.units for state in copied}
    assert plan.placement.nbytes["host"] > 1.5 * sum(stop - start for start, stop in pinned)
    assert all(before[1] <= after[0] for before, after in pairwise(pinned))
    on_host = plan_model(model, Config.load(config), [], CpuDevice(), Communicator(CpuDevice())).plan
    assert not on_host.pinned(TierKind.HOST)


@pytest.mark.parametrize(
    ("limit", "left", "most", "said"),
    [
        (
            "the container's limit",
            466_000_000,
            0,
            "the container's limit leaves about 466 MB, into which activations",
        ),
        ("the container's limit", 0, 99_000_000, "the container's limit leaves about 0 B (or 99.00 MB, if it does not"),
        ("ulimit -d", 0, 0, "ulimit -d leaves about 0 B, into which activations"),
        ("", 500_000_000, 0, ""),
        ("the container's limit", 3_000_000_000, 0, ""),
    ],
)
def test_what_a_small_limit_leaves_for_activations_is_said(
    limit: str, left: int, most: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of backward count as activations, as in a prediction."""
    monkeypatch.setattr("infinity.engine.describe.memory_limit", lambda: (limit, 0))
    monkeypatch.setattr("infinity.engine.describe.room", lambda: (left, most or left))
    model, seam = seeded(Stack), CpuDevice()
    groups = [{"params": list(model.parameters())}]
    plan = plan_model(model, engine_config(folder=tmp_path), groups, seam, Communicator(seam)).plan
    (line, *_) = [*left_under_limit(plan), ""]
    assert line.startswith(said) and bool(line) == bool(said)
