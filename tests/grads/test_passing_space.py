"""Gradients on nvme that updates consume on arrival: their space is given back, and reserved again by who needs it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import NonFiniteError, OutOfSpaceError, UsageError
from infinity.plan.placement import Extent, State
from infinity.tier_kind import TierKind
from infinity.tiers import space as space_of_files
from infinity.tiers.device import CpuDevice, Device
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine as open_io
from infinity.tiers.memory import host_tensor
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.passing import PassingSpace
from infinity.tiers.pool import Pool
from support.configs import engine_config
from support.late_device import LateDevice
from support.late_disk import use_late_disks
from support.locked import locked
from support.loops import Result, assert_close, open_engine, parameters_of, plain, train
from support.models import Stack, seeded, token_batches
from support.mounts import mount
from support.states import states_of

PART = 64 << 10
KEPT = Extent(TierKind.NVME, 0, PART, "parameters")
ONE, OTHER = Extent(TierKind.NVME, PART, PART, "gradient"), Extent(TierKind.NVME, 2 * PART, 5000, "gradient of another")


def on_disk(folder: Path) -> int:
    """Return the bytes reserved for the open files in `folder`."""
    sizes: dict[int, int] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        with suppress(OSError):
            if os.readlink(path).startswith(str(folder)):
                sizes[os.stat(path).st_ino] = os.stat(path).st_blocks * 512
    return sum(sizes.values())


def filled(value: int, extent: Extent = ONE) -> torch.Tensor:
    memory = host_tensor(extent.nbytes)
    memory.fill_(value)
    return memory


def value_of(tier: Any, extent: Extent) -> int:
    memory = host_tensor(extent.nbytes)
    tier.read(extent, memory).wait()
    (value,) = torch.unique(memory).tolist()
    return int(value)


@pytest.fixture(params=[1, 3], ids=["one folder", "three folders"])
def nvme(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NvmeTier]:
    folders = [tmp_path / str(number) for number in range(request.param)]
    for folder in folders:
        folder.mkdir()
    engine = open_io("auto", block_size=PART, queue_depth=4, threads=len(folders))
    with pytest.warns(RuntimeWarning) if len(folders) > 1 else nullcontext():
        file = open_swap_files(folders, 3 * PART, name="x", chunk=PART // 4)
    tier = NvmeTier(file, 3 * PART, engine, CpuDevice())
    tier.write(KEPT, filled(7, KEPT)).wait()
    yield tier
    assert value_of(tier, KEPT) == 7, "an extent beside those that were released has changed"
    tier.close()


@pytest.fixture
def space(nvme: NvmeTier) -> PassingSpace:
    return locked(PassingSpace, "_held", "_spare", "_old")(nvme, [ONE, OTHER])


def test_space_is_given_back_after_two_trims_without_a_write(space: PassingSpace, tmp_path: Path) -> None:
    assert on_disk(tmp_path) == 3 * PART and space.nbytes == 2 * PART
    space.write(ONE, filled(1)).wait()
    space.trim()
    assert on_disk(tmp_path) == 3 * PART
    space.trim()
    assert on_disk(tmp_path) == 2 * PART and space.nbytes == PART
    assert value_of(space, ONE) == 1
    space.discard(ONE)
    space.trim()
    assert space.nbytes == PART
    space.trim()
    assert on_disk(tmp_path) == PART and space.nbytes == 0
    space.write(OTHER, filled(1, OTHER)).wait()
    space.discard(OTHER)
    space.clear()
    assert on_disk(tmp_path) == PART and space.nbytes == 0


@pytest.mark.parametrize("trims", [0, 1, 2])
def test_a_write_reserves_what_was_given_back(trims: int, space: PassingSpace, tmp_path: Path) -> None:
    for value in (1, 2):
        space.write(ONE, filled(value)).wait()
        assert value_of(space, ONE) == value
        space.discard(ONE)
        for _ in range(trims):
            space.trim()
    space.write(OTHER, filled(3, OTHER)).wait()
    space.write(ONE, filled(4)).wait()
    assert (value_of(space, ONE), value_of(space, OTHER)) == (4, 3)
    assert on_disk(tmp_path) == 3 * PART and space.nbytes == 2 * PART


def test_a_reader_discards_only_the_bytes_that_it_has_read(space: PassingSpace) -> None:
    pool = Pool(host_tensor, {PART: 1}, name="tiles")
    space.write(ONE, filled(1)).wait()
    window = space.window(ONE, 0, PART, pool)
    assert window is not None
    window.arrived.wait()
    space.write(ONE, filled(2)).wait()
    space.discard(ONE, window.tensor)
    assert value_of(space, ONE) == 2
    window.release()
    window = space.window(ONE, 0, PART, pool)
    assert window is not None
    window.arrived.wait()
    space.discard(ONE, window.tensor)
    window.release()
    with pytest.raises(infinity.InfinityError, match="internal error: the gradient was read"):
        space.read(ONE, host_tensor(PART))


def test_a_full_disk_refuses_a_write(space: PassingSpace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    space.clear()
    refuse_space(monkeypatch)
    for _ in range(2):
        with pytest.raises(OutOfSpaceError, match=r"too little space in .* are missing; free"):
            space.write(ONE, filled(1))
    assert on_disk(tmp_path) == PART
    monkeypatch.undo()
    space.write(ONE, filled(1)).wait()
    assert value_of(space, ONE) == 1


def test_a_file_system_without_holes_keeps_the_space(
    space: PassingSpace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(space_of_files, "_fallocate", lambda *_: -1)
    for value in (1, 2, 3, 4):
        space.write(ONE, filled(value)).wait()
        assert value_of(space, ONE) == value
        space.discard(ONE)
        for _ in range(value):
            space.trim()
        assert on_disk(tmp_path) == 3 * PART and space.nbytes == 2 * PART


def refuse_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(space_of_files.os, "posix_fallocate", full)


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_disk_holds_no_gradients_after_three_steps(stage: int, late: bool, tmp_path: Path) -> None:
    """Stage 3 stores only the gradient of an embedding, which is not resident when backward ends."""
    device: Device = LateDevice(delay=0.005) if late else CpuDevice()
    config = engine_config("none" if stage < 3 else "nvme", folder=tmp_path, stage=stage)
    batches = token_batches(6)
    expected = plain(seeded(Stack), batches, config)
    with open_engine(seeded(Stack), config, device) as engine:
        plan = engine.parts.plan
        grads = sum(size_of(plan, unit.index) for unit in engine.units)
        least, most = plan.nbytes()["nvme"], plan.peak_nbytes()["nvme"]
        assert most - least == plan.passing["nvme"] == grads
        assert "stored gradients take up to" in engine.describe()
        assert on_disk(tmp_path) == most
        losses = []
        for number, inputs in enumerate(batches):
            loss = engine(*inputs)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            waiting = size_of(plan, 0) if stage == 3 else 0
            assert on_disk(tmp_path) == engine.ledger.tier_bytes()["nvme"] == (most if number < 2 else least + waiting)
        engine.settle()
        assert_close(Result(losses, parameters_of(engine)), expected)


def size_of(plan: Any, unit: int) -> int:
    return -(-plan.placement.of(unit, State.GRAD).nbytes // PART) * PART


@pytest.mark.parametrize("options", [{"accumulation": 2}, {"clip": 1.0}, {"accumulation_buffers": True}], ids=str)
def test_gradients_that_wait_in_every_step_keep_their_space(options: dict[str, Any], tmp_path: Path) -> None:
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, **options)) as engine:
        plan = engine.parts.plan
        assert not plan.passing and engine.parts.training.passing is None
        train(engine, token_batches(8))
        assert on_disk(tmp_path) == plan.nbytes()["nvme"] == plan.peak_nbytes()["nvme"]


class Turned(Stack):
    """Calls its blocks in reverse once `turned` is set, or only the first two."""

    turned = False
    depth = 6

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        blocks = list(self.blocks)[: self.depth]
        x = self.embedding(tokens)
        for block in reversed(blocks) if self.turned else blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def departing(engine: Any) -> dict[str, torch.Tensor]:
    """Train in ways that store gradients after their space was released."""
    model = engine.module
    batches = iter(token_batches(40))

    def steps(count: int, micro: int = 1) -> None:
        for _ in range(count):
            for number in range(micro):
                if number < micro - 1:
                    with engine.no_sync():
                        engine.backward(engine(*next(batches)))
                else:
                    engine.backward(engine(*next(batches)))
            engine.step()

    steps(4)
    steps(2, micro=2)
    steps(3)
    model.turned = True
    steps(4)
    model.depth = 2
    steps(4)
    model.depth, model.turned = 6, False
    steps(1)
    with engine.no_sync():
        engine.backward(engine(*next(batches)))
    engine.drop_gradients()
    steps(3, micro=2)
    return parameters_of(engine) | states_of(engine)


@pytest.mark.parametrize("late", [False, True], ids=["disk", "late disk"])
def test_steps_that_depart_from_the_trace_have_the_bits_of_gradients_in_memory(
    late: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = []
    for tier in ("cpu", "nvme"):
        if late and tier == "nvme":
            use_late_disks(monkeypatch)
        with open_engine(seeded(Turned), engine_config(tier, tier, folder=tmp_path)) as engine:
            results.append(departing(engine))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.parametrize("at_end", [False, True], ids=["as gradients arrive", "at the end of backward"])
@pytest.mark.parametrize("plain_backward", [False, True], ids=["engine.backward", "loss.backward"])
def test_a_disk_that_is_full_when_gradients_have_to_wait_again(
    at_end: bool, plain_backward: bool, tmp_path: Path
) -> None:
    """The step that departs is dropped with the error of a full disk, and training continues once there is space."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    unmount = mount("-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder))
    try:
        with open_engine(seeded(Stack), engine_config(folder=folder)) as engine:
            batches = token_batches(9)
            train(engine, batches[:4])
            before = parameters_of(engine) | states_of(engine)
            fill(folder)
            if at_end:
                engine.parts.schedule.arrivals._before = {unit.index: 99 for unit in engine.units}
            with (
                pytest.raises(OutOfSpaceError, match=f"too little space in {folder}.* are missing; free"),
                engine.no_sync(),
            ):
                loss = engine(*batches[4])
                loss.backward() if plain_backward else engine.backward(loss)  # type: ignore[no-untyped-call]
            assert_bits(parameters_of(engine) | states_of(engine), before)
            (folder / "filler").unlink()
            train(engine, batches[4:])
            after = parameters_of(engine) | states_of(engine)
        with open_engine(seeded(Stack), engine_config("cpu", "cpu")) as engine:
            train(engine, batches[:4])
            train(engine, batches[4:])
            assert_bits(after, parameters_of(engine) | states_of(engine))
    finally:
        unmount()


def test_a_disk_that_is_full_when_step_stores_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gradients of whole units add up on the device, and `step` stores them if no backward was the last."""
    config = engine_config("none", folder=tmp_path, stage=1, accumulation=2)
    with open_engine(seeded(Stack), config) as engine:
        batches = token_batches(8)
        train(engine, batches)
        before = parameters_of(engine) | states_of(engine)
        refuse_space(monkeypatch)
        with engine.no_sync():
            for inputs in batches[:2]:
                engine.backward(engine(*inputs))
        with pytest.raises(OutOfSpaceError, match="are missing; free"):
            engine.step()
        assert engine.micro_steps == 0
        assert_bits(parameters_of(engine) | states_of(engine), before)
        monkeypatch.undo()
        train(engine, batches)


def test_an_engine_stops_if_a_full_disk_ends_a_step_that_has_updated_units(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The embedding's gradient waits in every step, after the blocks were updated."""
    with open_engine(seeded(Stack), engine_config(folder=tmp_path)) as engine:
        batches = token_batches(5)
        train(engine, batches[:4])
        engine.settle()
        engine.parts.training.passing.clear()
        refuse_space(monkeypatch)
        with pytest.raises(OutOfSpaceError, match="are missing; free"):
            engine.backward(engine(*batches[4]))
        with pytest.raises(UsageError, match="a backward failed after some units had been updated"):
            engine(*batches[4])


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_gradients_that_are_dropped_as_not_finite_give_their_memory_back(tier: str, tmp_path: Path) -> None:
    with open_engine(seeded(Turned), engine_config(tier, tier, folder=tmp_path)) as engine:
        batches = token_batches(9)
        train(engine, batches[:4])
        passing = engine.parts.training.passing
        before = passing.nbytes
        with engine.no_sync():  # gradients have to wait
            loss = engine(*batches[4])
            loss.register_hook(lambda gradient: gradient * float("nan"))
            engine.backward(loss)
        assert passing.nbytes > before
        with pytest.raises(NonFiniteError, match="updated nothing"):
            engine.step()
        train(engine, batches[5:])
        assert passing.nbytes == before


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_stored_part_that_backward_adds_gives_its_memory_back(tier: str, late: bool, tmp_path: Path) -> None:
    """The last micro-batch updates units with its gradients plus those that were stored before."""
    device: Device = LateDevice(delay=0.005) if late else CpuDevice()
    with open_engine(seeded(Turned), engine_config(tier, tier, folder=tmp_path), device) as engine:
        batches = token_batches(9)
        train(engine, batches[:4])
        passing = engine.parts.training.passing
        before = passing.nbytes
        with engine.no_sync():
            engine.backward(engine(*batches[4]))
        assert passing.nbytes > before
        train(engine, batches[5:])
        assert passing.nbytes == before
        engine.offload_states()
        assert passing.nbytes == 0
        engine.reload_states()
        train(engine, batches[:1])


def test_only_gradients_on_nvme_give_space_back(tmp_path: Path) -> None:
    """Units whose gradients a budget keeps on the device have extents there, whose offsets are other states' here."""
    results = []
    for tier, memory in (("cpu", {}), ("nvme", {"device_optimizer": 0.5})):
        config = engine_config("cpu", tier, folder=tmp_path, unit_size=4096, memory=memory)
        with open_engine(seeded(Stack), config, LateDevice(delay=0.001)) as engine:
            assert len(engine.parts.plan.placement.tiers(State.GRAD)) == 1 + len(memory)
            train(engine, token_batches(6))
            results.append(parameters_of(engine) | states_of(engine))
            if memory:
                assert engine.ledger.tier_bytes()["nvme"] <= on_disk(tmp_path)
    assert_bits(*results)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb") as filler, suppress(OSError):
        while True:
            filler.write(bytes(PART))
            filler.flush()


def assert_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
