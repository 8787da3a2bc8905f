"""Checksums: they change no result. A byte that a drive stores wrongly is an error with its location, and one that
changes on the way is read again."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from infinity.engine.training import TrainingEngine
from infinity.errors import ChecksumError, StorageError, UsageError
from infinity.native import _aio
from infinity.plan.formats import GradDtypes
from infinity.plan.io import SMALLEST_CHUNK, stripe_chunk
from infinity.plan.layout import Member, layout_unit
from infinity.plan.placement import EXTENT_ALIGNMENT, Extent, Policy, State, checksum_block, place, tiles
from infinity.plan.policy import OptimizerFormat
from infinity.tier_kind import TierKind
from infinity.tiers.nvme import NvmeTier
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_same, open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

BATCHES = token_batches(8)
ON_NVME = [(param, optim) for param, optim in PLACEMENTS if "nvme" in (param, optim)]
pytestmark = pytest.mark.filterwarnings("ignore:.*are on one file system:RuntimeWarning")

PAGES = st.integers(1, 1 << 10).map(lambda count: count * 4096)


@given(PAGES, PAGES)
def test_a_block_divides_all_that_ranges_start_at(granule: int, block_size: int) -> None:
    chunk = stripe_chunk(block_size)
    block = checksum_block(math.gcd(granule, EXTENT_ALIGNMENT), block_size, chunk)
    assert block >= 4096 and block & (block - 1) == 0
    assert all(size % block == 0 for size in (EXTENT_ALIGNMENT, granule, block_size, chunk))


@pytest.mark.parametrize(("moments", "block"), [("fp32", EXTENT_ALIGNMENT), ("bf16", EXTENT_ALIGNMENT), ("8bit", 8192)])
def test_the_default_block(moments: Any, block: int) -> None:
    states = OptimizerFormat("remainder", "adamw", moments)
    layout = layout_unit(0, "unit", [Member("p", (1 << 22,), 0)], torch.bfloat16, True, 1)
    grads = GradDtypes(*[torch.bfloat16] * 3)
    placement = place([layout], Policy(TierKind.NVME, TierKind.NVME, TierKind.NVME, lambda _: grads, states, 1 << 20))
    assert checksum_block(placement.granule, 1 << 20, 1 << 20) == block


# -- nothing changes ---------------------------------------------------------------------------------------------------


def folders(parent: Path, count: int) -> list[Path]:
    made = [parent / f"disk{number}" for number in range(count)]
    for folder in made:
        folder.mkdir(exist_ok=True)
    return made


def configured(parent: Path, *, paths: int = 1, checksum: bool = True, **options: Any) -> Any:
    aio = {"block_size": SMALLEST_CHUNK, "checksum": checksum}
    return engine_config(folder=folders(parent, paths), aio=aio, **{"prefetch_bytes": 20_000, **options})


def run(config: Any, device: LateDevice | None = None) -> Result:
    with open_engine(seeded(Stack), config, device) as engine:
        losses = train(engine, BATCHES[:4])
        return Result(losses, parameters_of(engine) | states_of(engine))


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("options", [{}, {"bf16": True, "clip": 0.5}, {"accumulation": 2, "tile_size": 32768}], ids=str)
@pytest.mark.parametrize(("param", "optim"), ON_NVME)
def test_training_is_the_same(tmp_path: Path, param: str, optim: str, options: dict[str, Any], late: bool) -> None:
    """Training is bit-identical, on one path and on two."""
    device = LateDevice(0.01) if late else None
    options = {**options, "param": param, "optim": optim}
    expected = run(configured(tmp_path, checksum=False, **options), device)
    for paths in (1, 2):
        assert_same(run(configured(tmp_path, paths=paths, **options), device), expected)


def test_units_of_odd_sizes(tmp_path: Path) -> None:
    """Extents end inside a block, and a frozen unit of bytes ends inside a page."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(width=24)
            self.table = nn.Parameter(torch.arange(5000, dtype=torch.int32).to(torch.uint8), requires_grad=False)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.stack(tokens, targets) + self.table.float().mean() / 1000
            return out

    results = []
    for checksum in (False, True):
        config = configured(tmp_path, checksum=checksum, unit_size=2000, bf16=True)
        with open_engine(seeded(Odd), config) as engine:
            extents = engine.parts.plan.placement.extents.values()
            assert any(extent.nbytes % 4096 for extent in extents)
            assert any(extent.nbytes % EXTENT_ALIGNMENT > 4096 for extent in extents)
            losses = train(engine, BATCHES[:4])
            results.append(Result(losses, parameters_of(engine) | states_of(engine)))
    assert_same(*results)


# -- a byte that changes -----------------------------------------------------------------------------------------------


def nvme(engine: TrainingEngine) -> NvmeTier:
    tier = engine.parts.tiers["nvme"]
    assert isinstance(tier, NvmeTier)
    return tier


def flip(engine: TrainingEngine, extent: Extent, offset: int) -> None:
    """Change one bit at `offset` of the extent through the file's buffered descriptor, as a drive might."""
    descriptors = nvme(engine)._file._fds[1::2]
    at = extent.offset + offset
    member, place = 0, at
    if len(descriptors) > 1:
        chunk = stripe_chunk(engine.config.aio.block_size)
        member = at // chunk % len(descriptors)
        place = at // chunk // len(descriptors) * chunk + at % chunk
    (byte,) = os.pread(descriptors[member], 1, place)
    assert os.pwrite(descriptors[member], bytes([byte ^ 4]), place) == 1


def the_last_byte(extent: Extent) -> int:
    return extent.nbytes - 1


def the_first_byte(extent: Extent) -> int:
    return 0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of an undisturbed run."""
    with open_engine(seeded(Stack), configured(tmp_path_factory.mktemp("expected"))) as engine:
        return train(engine, BATCHES)


def mismatch(engine: TrainingEngine, expected: list[float], start: int) -> ChecksumError:
    """Train on and return the error; losses before it must equal those of an undisturbed run."""
    losses = []
    with pytest.raises(ChecksumError) as caught:
        for batch in BATCHES[start:]:
            losses.append(train(engine, [batch])[0])
        engine.settle()
    assert losses == expected[start : start + len(losses)]
    return caught.value


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("where", [the_first_byte, the_last_byte])
@pytest.mark.parametrize(("state", "said"), [(State.PARAM, "parameters"), (State.OPTIM, "optimizer states")])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_a_flipped_bit(
    tmp_path: Path,
    expected: list[float],
    update: str,
    state: State,
    said: str,
    where: Any,
    paths: int,
    late: bool,
) -> None:
    config = configured(tmp_path, paths=paths, update=update)
    with open_engine(seeded(Stack), config, LateDevice(0.01) if late else None) as engine:
        assert train(engine, BATCHES[:2]) == expected[:2]
        engine.settle()
        unit = next(unit for unit in engine.units if unit.name.startswith("blocks.3"))
        extent = engine.parts.plan.placement.of(unit.index, state)
        flip(engine, extent, where(extent))
        error = mismatch(engine, expected, 2)
        assert f"checksum mismatch in the {said} of unit {unit.name}, in {tmp_path}" in str(error)
        assert "bytes at offset" in str(error) and "resume from the last checkpoint" in str(error)
        assert "a second read returned the same bytes" in str(error)
        assert error.errno == errno.EBADMSG and "states of rank 0" in str(error.filename)
        assert isinstance(error, StorageError) and isinstance(error, OSError)
        with pytest.raises(UsageError, match=r"the engine stopped \(checksum mismatch.*load the last checkpoint"):
            engine(*BATCHES[0])


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
def test_a_flipped_bit_in_a_gradient(tmp_path: Path, late: bool) -> None:
    """The bit flips between backward and an update that waits for all gradients."""
    config = configured(tmp_path, clip=0.5)
    with open_engine(seeded(Stack), config, LateDevice(0.01) if late else None) as engine:
        train(engine, BATCHES[:2])
        engine.backward(engine(*BATCHES[2]))
        engine.updates.gradients.settle()
        unit = engine.units[2]
        flip(engine, engine.parts.plan.placement.of(unit.index, State.GRAD), 100)
        with pytest.raises(ChecksumError, match=f"in the gradient of unit {unit.name}"):
            engine.step()
            engine.settle()


def test_every_block_of_the_file(tmp_path: Path) -> None:
    """A changed byte is reported by reads of its extent, and by no others."""
    with open_engine(seeded(Stack), configured(tmp_path, paths=2, clip=0.5)) as engine:
        train(engine, BATCHES[:2])
        engine.settle()
        tier = nvme(engine)
        block = checksum_block(engine.parts.plan.placement.granule, SMALLEST_CHUNK, SMALLEST_CHUNK)
        unit = engine.units[1]
        for state in State:
            extent = engine.parts.plan.placement.of(unit.index, state)
            whole = torch.empty(extent.nbytes, dtype=torch.uint8)
            for offset in range(0, extent.nbytes, block):
                flip(engine, extent, offset + 7)
                with pytest.raises(ChecksumError, match=f"unit {unit.name}"):
                    tier.read(extent, whole).wait()
                for rest in (torch.empty(offset, dtype=torch.uint8), whole[offset + block :].clone()):
                    tier.read(extent, rest, 0 if rest.numel() == offset else offset + block).wait()
                flip(engine, extent, offset + 7)
            tier.read(extent, whole).wait()


def test_tiles_are_verified_by_themselves(tmp_path: Path) -> None:
    with open_engine(seeded(Stack), configured(tmp_path, bf16=True)) as engine:
        train(engine, BATCHES[:2])
        engine.settle()
        unit = max(engine.units, key=lambda unit: unit.layout.shard_numel)
        extent = engine.parts.plan.placement.of(unit.index, State.OPTIM)
        cut = tiles(unit.layout.shard_numel, 4096, engine.parts.states.formats(unit.layout))
        assert len(cut) > 2
        flip(engine, extent, cut[1].offset)
        for tile in cut:
            memory = torch.empty(tile.nbytes, dtype=torch.uint8)
            reading = nvme(engine).read(extent, memory, tile.offset)
            if tile is cut[1]:
                with pytest.raises(ChecksumError, match=f"at offset {extent.offset + tile.offset}"):
                    reading.wait()
            else:
                reading.wait()


def test_a_checkpoint_of_it_is_not_written(tmp_path: Path) -> None:
    with open_engine(seeded(Stack), configured(tmp_path)) as engine:
        train(engine, BATCHES[:2])
        engine.settle()
        flip(engine, engine.parts.plan.placement.of(1, State.OPTIM), 0)
        with pytest.raises(ChecksumError):
            engine.save_checkpoint(tmp_path / "saved")
        assert not (tmp_path / "saved" / "latest").exists()
        assert [path for path in (tmp_path / "saved").rglob("*") if path.is_file()] == []


def test_without_checksums_it_goes_unnoticed(tmp_path: Path) -> None:
    """Flipped bytes go unnoticed without checksums, so the tests above do flip bytes."""
    with open_engine(seeded(Stack), configured(tmp_path, checksum=False)) as engine:
        train(engine, BATCHES[:2])
        engine.settle()
        flip(engine, engine.parts.plan.placement.of(1, State.PARAM), 3)
        train(engine, BATCHES[2:4])


@pytest.fixture
def faults() -> Iterator[Any]:
    yield _aio._inject
    _aio._inject([])


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The engine's log."""
    monkeypatch.setattr(logging.getLogger("infinity"), "propagate", True)
    caplog.set_level(logging.WARNING, "infinity")
    return caplog


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("after", [0, 40, 150])
def test_a_transfer_that_changes_a_byte_is_repaired(
    faults: Any, tmp_path: Path, expected: list[float], warnings: pytest.LogCaptureFixture, after: int, late: bool
) -> None:
    """Training goes on with the right bytes; the log names unit, file and offset, and counts."""
    faults([{"where": "event", "flip": True, "only": "read", "after": after, "times": 3}])
    with open_engine(seeded(Stack), configured(tmp_path), LateDevice(0.01) if late else None) as engine:
        assert train(engine, BATCHES) == expected
        engine.settle()
        assert engine.ledger.snapshot().blocks_repaired == 3
    said = [record.getMessage() for record in warnings.records if "read again" in record.getMessage()]
    assert len(said) == 3
    for text in said:
        assert re.search(
            rf"mismatch in the [\w ]+ of unit .*, in {tmp_path}.*: \d+ bytes at offset \d+ were wrong", text
        )
    assert {int(re.search(r"(\d+) such blocks so far", text)[1]) for text in said} <= {1, 2, 3}  # type: ignore[index]
    assert any("3 such blocks" in text for text in said)


def test_a_transfer_that_changes_bytes_of_a_bad_block(faults: Any, tmp_path: Path, expected: list[float]) -> None:
    """Two reads that return different wrong bytes are an error that says so."""
    faults([{"where": "nowhere"}])
    with open_engine(seeded(Stack), configured(tmp_path)) as engine:
        assert train(engine, BATCHES[:2]) == expected[:2]
        engine.settle()
        flip(engine, engine.parts.plan.placement.of(engine.units[2].index, State.OPTIM), 100)
        faults([{"where": "event", "flip": True, "only": "read", "times": -1}])
        error = mismatch(engine, expected, 2)
        assert " of unit " in str(error) and "a second read returned other bytes, wrong too" in str(error)


def test_activations_are_repaired(faults: Any, tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    activations = {"device": "nvme", "min_bytes": 256, "memory_bytes": 4096}
    results = []
    for injected in ([], [{"where": "event", "flip": True, "only": "read", "times": -1}]):
        faults(injected)
        config = configured(tmp_path, activations=activations)
        with open_engine(seeded(Stack), config, LateDevice(0.01)) as engine:
            results.append(train(engine, BATCHES[:2]))
    assert results[0] == results[1]
    assert "checksum mismatch in the saved activations, in" in warnings.text
