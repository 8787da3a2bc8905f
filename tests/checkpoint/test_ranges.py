"""Checkpoints of units that are read and written in several ranges equal those of whole units."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import infinity
from infinity.checkpoint.piecewise import PiecewiseChecksum, PiecewiseFile, TensorFile, combined_crc32
from infinity.checkpoint.tensors import Spec
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError
from infinity.nn import TiledLinear
from infinity.nn.pieces import Piece
from infinity.plan.formats import BLOCK
from infinity.plan.layout import Member, layout_unit
from infinity.plan.placement import EXTENT_ALIGNMENT, RANGE, Placement, shard_ranges
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.late_disk import use_late_disks
from support.loops import open_engine, parameters_of, train
from support.models import seeded
from support.states import states_of

WIDTH = 96
TILE = 8192


class Wide(nn.Module):
    """One unit of four ranges: parameters in several ranges, and several parameters in one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1500, WIDTH)
        self.gain = nn.Parameter(torch.rand(7))
        self.head = nn.Linear(WIDTH, 900)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.head(self.table(tokens)).float().square().mean() * self.gain.float().sum()).sqrt()


BATCHES = [(torch.randint(0, 1500, (4, 5), generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of `EXTENT_ALIGNMENT` elements."""
    monkeypatch.setattr("infinity.plan.placement.RANGE", EXTENT_ALIGNMENT)


def whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "ranges", lambda self, layout: [(0, layout.shard_numel)])


def engine_of(*places: str, seed: int = 0, device: Any = None, tiled: bool = False, **options: Any) -> TrainingEngine:
    def model() -> nn.Module:
        made = Wide()
        if tiled:
            made.head = TiledLinear(WIDTH, 900, in_splits=3)
        return made

    return open_engine(
        seeded(model, seed), engine_config(*places, unit_size="64MiB", tile_size=TILE, **options), device
    )


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def everything(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return parameters_of(engine) | states_of(engine)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


FORMATS: list[dict[str, Any]] = [
    {},
    {"bf16": True},
    {"bf16": True, "moments": "8bit"},
    {"bf16": True, "master": "fp32", "moments": "bf16"},
]


@pytest.mark.parametrize(("param", "optim"), PLACEMENTS)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_files_and_states_are_those_of_whole_units(
    param: str, optim: str, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(param, optim, **form) as engine:
        assert [len(engine.parts.states.ranges(unit.layout)) for unit in engine.units] == [4]
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path, "ranges")
        expected = everything(engine)
        with monkeypatch.context() as patched:
            whole_units(patched)
            engine.save_checkpoint(tmp_path, "whole")
        losses = train(engine, BATCHES[2:])
        assert content(tmp_path / "ranges") == content(tmp_path / "whole")
        engine.load_checkpoint(tmp_path, "ranges")
        assert_equal(everything(engine), expected)
    with engine_of(param, optim, seed=1, **form) as engine:
        engine.load_checkpoint(tmp_path, "ranges")
        assert_equal(everything(engine), expected)
        assert train(engine, BATCHES[2:]) == losses


def test_a_late_device_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_late_disks(monkeypatch)
    with engine_of("nvme", "nvme", bf16=True) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path)
        expected = everything(engine)
    with engine_of("nvme", "nvme", seed=1, device=LateDevice(), bf16=True) as engine:
        engine.load_checkpoint(tmp_path)
        assert_equal(everything(engine), expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("saved", ["fp32", "bf16", "8bit"])
def test_other_formats_round_alike(saved: str, moments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic rounding draws by the element's index in the model, wherever its range begins."""
    with engine_of("cpu", "nvme", bf16=True, moments=saved) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path)
    found = []
    for is_whole in (False, True):
        with engine_of("nvme", "cpu", seed=1, bf16=True, moments=moments) as engine, monkeypatch.context() as patched:
            if is_whole:
                whole_units(patched)
            engine.load_checkpoint(tmp_path)
            found.append(everything(engine))
    assert_equal(*found)


@pytest.mark.parametrize("options", [{"load_module_only": True}, {"load_optimizer_states": False}], ids=str)
def test_parts_of_a_checkpoint_leave_the_rest(options: dict[str, bool], tmp_path: Path) -> None:
    with engine_of("nvme", "nvme", bf16=True) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path)
        saved = everything(engine)
    with engine_of("nvme", "nvme", seed=1, bf16=True) as engine:
        train(engine, BATCHES[2:])
        before = states_of(engine)
        engine.load_checkpoint(tmp_path, **options)
        after = everything(engine)
    moments = [name for name in before if "/exp_avg" in name]
    assert moments and all(torch.equal(after[name], before[name]) for name in moments)
    assert all(torch.equal(after[name], value) for name, value in saved.items() if name not in moments)


def test_a_parameter_that_was_not_saved_keeps_its_states(tmp_path: Path) -> None:
    """It lies between saved ones in a range."""
    with engine_of("nvme", "nvme", bf16=True) as engine:
        engine.module.gain.requires_grad_(False)
        train(engine, BATCHES[:2])
        saved = everything(engine)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    with engine_of("nvme", "nvme", seed=1, bf16=True) as engine:
        engine.module.gain.requires_grad_(False)
        train(engine, BATCHES[2:])
        before = everything(engine)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        after = everything(engine)
    assert any(name.startswith("gain") for name in after)
    assert_equal(after, {name: (before if name.startswith("gain") else saved)[name] for name in after})


@pytest.mark.parametrize("frozen", ["as_is", "8bit", "nf4"])
def test_frozen_parameters(frozen: str, tmp_path: Path) -> None:
    def frozen_engine(seed: int) -> TrainingEngine:
        model = seeded(Wide, seed)
        model.table.requires_grad_(False)
        options: dict[str, Any] = {"unit_size": "64MiB", "tile_size": TILE, "bf16": True, "frozen": frozen}
        return open_engine(model, engine_config("nvme", "nvme", **options))

    with frozen_engine(0) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path)
        expected = everything(engine)
    with frozen_engine(1) as engine:
        engine.load_checkpoint(tmp_path)
        assert_equal(everything(engine), expected)


@pytest.mark.parametrize("saved", [False, True], ids=["whole layers", "tiles"])
def test_tiles_of_columns(saved: bool, tmp_path: Path) -> None:
    """Each row of a tile is a run of its own in the file."""
    with engine_of("nvme", "nvme", bf16=True, tiled=saved) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path)
        expected = {name: value.clone() for name, value in engine.state_dict().items()}
    with engine_of("nvme", "nvme", seed=1, bf16=True, tiled=not saved) as engine:
        engine.load_checkpoint(tmp_path)
        assert_equal(dict(engine.state_dict()), expected)


def test_inference_loads_ranges(tmp_path: Path) -> None:
    with engine_of("nvme", "nvme") as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path)
        expected = parameters_of(engine)
    config = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with infinity.init_inference(seeded(Wide, 1), config) as runner:
        runner.load_checkpoint(tmp_path)
        assert_equal(dict(runner.state_dict()), expected)


# -- ranges, runs and checksums ----------------------------------------------------------------------------------------


@given(
    numel=st.integers(1, 9 * EXTENT_ALIGNMENT),
    world_size=st.integers(1, 5),
    tile=st.one_of(st.none(), st.integers(1, 40).map(lambda tiles: 4096 * tiles)),
)
def test_ranges_cut_a_shard_at_tiles_and_blocks(numel: int, world_size: int, tile: int | None) -> None:
    unit = layout_unit(0, "unit", [Member("weight", (numel,), 0)], torch.bfloat16, True, world_size)
    found = shard_ranges(unit, tile)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == unit.shard_numel
    for start, stop in found:
        assert start < stop and start % EXTENT_ALIGNMENT == 0 == start % (tile or 1) == start % BLOCK
    longest = max(RANGE // world_size, EXTENT_ALIGNMENT * (tile or 1))
    assert all(stop - start <= longest for start, stop in found)


@given(st.data())
def test_runs_of_a_tile_are_its_elements(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    whole = torch.arange(rows * columns).view(rows, columns)
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    place = slice(top, data.draw(st.integers(top + 1, rows))), slice(left, data.draw(st.integers(left + 1, columns)))
    piece, flat = Piece("weight", (rows, columns), place), whole[place].reshape(-1)
    first = data.draw(st.integers(0, len(flat) - 1))
    numel = data.draw(st.integers(1, len(flat) - first))
    runs = [whole.view(-1)[start : start + count] for start, count in piece.runs(first, numel)]
    assert torch.equal(torch.cat(runs), flat[first : first + numel])
    spread = torch.full((rows * columns,), -1)
    for start, part in piece.spread(flat[first : first + numel], first, 1):
        spread[start : start + len(part)] = part
    assert torch.equal(spread[spread >= 0].sort()[0], flat[first : first + numel])
    assert all(value in (-1, place) for place, value in enumerate(spread.tolist()))


def test_scales_of_a_tile_follow_those_of_the_rows_before_it() -> None:
    rows = Piece("weight", (16, BLOCK), (slice(4, 8), slice(0, BLOCK)))
    scales = torch.tensor([5, 6], dtype=torch.uint8)
    ((start, part),) = rows.spread(scales, BLOCK, BLOCK)
    assert start == 5 and part is scales


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_adjacent_parts_are_combined(one: bytes, other: bytes) -> None:
    assert combined_crc32(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_checksum_is_that_of_the_content_in_any_order(whole: bytes, data: st.DataObject) -> None:
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=6))})
    checksum = PiecewiseChecksum()
    for start, stop in data.draw(st.permutations(list(itertools.pairwise(cuts)))):
        checksum.add(start, memoryview(whole)[start:stop])
        checksum.add(stop, memoryview(b""))
    assert checksum.of_whole == zlib.crc32(whole)


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    file = PiecewiseFile(path, {"a": Spec(torch.float32, (2, 3)), "b": Spec(torch.float32, (0,))})
    file.write("a", 3, torch.ones(3))
    file.write("a", 0, torch.zeros(3))
    assert file.is_whole and file.finish().crc32 == zlib.crc32(path.read_bytes())
    opened = TensorFile(path)
    assert opened.read("a", [(1, 2), (4, 1)], torch.float32).tolist() == [0, 0, 1]
    with path.open("r+b") as short:
        short.truncate(path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="was cut short"):
        opened.read("a", [(2, 4)], torch.float32)
