"""The reader of committed states, beside files that are written here byte by byte."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st

from infinity.checkpoint import rng
from infinity.checkpoint.format import Progress
from infinity.config import Config
from infinity.durable.folder import manifest_file, record_file
from infinity.durable.manifest import Manifest, manifest_of
from infinity.durable.record import Record, write_record
from infinity.durable.source import CommittedStates
from infinity.errors import CheckpointError
from infinity.nn.pieces import Piece
from infinity.optim.cpu_adam import split_master
from infinity.plan.formats import GradDtypes, MasterFormat, StateFormat, StateKind, state_format
from infinity.plan.io import Stripe, plan_durable
from infinity.plan.layout import Member, UnitLayout, layout_unit
from infinity.plan.placement import Policy, State, place, tiles
from infinity.rules import MomentFormat
from infinity.tier_kind import TierKind
from infinity.tiers.files import member_of
from infinity.tiers.open_tiers import states_of
from infinity.units.states import Flats, view

PROGRESS = Progress(3, 0, [{"lr": 0.1}], None, None)


@dataclass(frozen=True)
class Setting:
    """Formats, tiers, and ranks of a run that wrote states."""

    ranks: int = 2
    folders: int = 1
    tile: int = 4096
    tier: str = "nvme"
    master: MasterFormat = "remainder"
    moments: MomentFormat = "fp32"
    sharded: bool = True
    used: int = 0
    """Bytes of the file before the first slot of states in memory."""
    weighted: bool = False
    """Folders have different shares."""


@dataclass(frozen=True)
class Shape:
    """A unit: numels of its parameters."""

    numels: Sequence[int]
    dtype: torch.dtype
    trainable: bool


def values(kind: StateKind, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = kind.length(numel)
    if kind.dtype in (torch.uint8, torch.int16):
        return torch.randint(0, 200, (count,), generator=generator).to(kind.dtype)
    return torch.randn(count, generator=generator).to(kind.dtype)


def write_run(folder: Path, shapes: Sequence[Shape], setting: Setting) -> list[tuple[UnitLayout, Flats]]:
    """Write files of all ranks as an engine leaves them after a commit. Returns the units' states."""
    shards = setting.ranks if setting.sharded else 1
    layouts: list[UnitLayout] = []
    for number, shape in enumerate(shapes):
        members = [Member(f"unit{number}.p{n}", (numel,), n % 2) for n, numel in enumerate(shape.numels)]
        first = layouts[-1].end if layouts else 0
        layouts.append(layout_unit(number, f"unit{number}", members, shape.dtype, shape.trainable, shards, first))
    policy = Policy(
        param_tier=TierKind(setting.tier),
        optim_tier=TierKind(setting.tier),
        grad_tier=TierKind.HOST,
        grads=lambda dtype: GradDtypes(dtype, dtype, dtype),
        states=lambda layout: state_format(layout.dtype, setting.master, "adamw", setting.moments),
        tile_size=setting.tile,
    )
    placement = place(layouts, policy)
    durable = plan_durable("run", placement, placement.nbytes.get("nvme", 0) + setting.used)
    chunk, weights = 1 << 16, (1, 3, 2)[: setting.folders] if setting.weighted else (1,) * setting.folders
    nbytes = placement.nbytes.get("nvme", 0) + setting.used + durable.nbytes
    plan = SimpleNamespace(
        ranks=SimpleNamespace(model_parallel=1, shards=shards),
        units=layouts,
        placement=placement,
        policy=policy,
        io=SimpleNamespace(
            durable=durable,
            folders=[folder / str(n) for n in range(setting.folders)],
            stripe=Stripe(chunk, weights),
            checksum_block=0,
            nbytes=nbytes,
        ),
    )
    config = Config.load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "infinity": {"moments": setting.moments},
        }
    )
    manifest = manifest_of(cast(Any, plan), config, setting.ranks)
    states = [(layout, _states(layout, policy.states(layout))) for layout in layouts]
    for each in range(setting.folders):
        (folder / str(each)).mkdir()
    for rank in range(setting.ranks):
        order = plan.io.stripe.order
        content = bytearray(b"\xee" * (-(-nbytes // (chunk * len(order))) * chunk * len(order)))
        slots = bytes((n + rank) % 2 for n in range(len(durable.extents)))
        for extent, slot in zip(durable.extents, slots, strict=True):
            layout, flats = states[extent.unit]
            start = (extent.first, extent.second)[slot].offset
            low, high = layout.shard_range(rank if setting.sharded else 0)
            if extent.state is State.PARAM:
                _put(content, start, flats["param"][low:high])
                continue
            form = policy.states(layout)
            for tile in tiles(high - low, placement.tile_sizes[layout.index], form):
                for name, field in form.ranges(tile.stop - tile.start).items():
                    part = flats[name][field.kind.part(low + tile.start, low + tile.stop)]
                    _put(content, start + tile.offset + field.first, part)
        for each in range(setting.folders):
            rows = (row for row in range(0, len(content), chunk) if order[row // chunk % len(order)] == each)
            data = b"".join(content[row : row + chunk] for row in rows) if setting.folders > 1 else content
            (folder / str(each) / member_of(states_of(rank), each)).write_bytes(data)
        manifest_file(folder / "0", rank).write_text(manifest.to_json())
        blobs = {"client_state": rng.pack({"rank": rank}), "rng": b"", "buffers": b""}
        steps = [[7] * len(layout.slots) for layout in layouts]
        write_record(record_file(folder / "0", rank, 5), Record(5, PROGRESS, steps, slots, blobs))
    return states


def _states(layout: UnitLayout, form: StateFormat) -> Flats:
    kinds = form.states if layout.trainable else ()
    flats = {kind.name: values(kind, layout.numel, 10 * layout.index + n) for n, kind in enumerate(kinds)}
    flats["param"] = values(StateKind("param", layout.dtype), layout.numel, 10 * layout.index + 9)
    if "remainder" in flats:
        flats["whole"] = values(StateKind("master", torch.float32), layout.numel, 10 * layout.index + 8)
        flats["param"], flats["remainder"] = split_master(flats["whole"])
    elif layout.trainable:
        flats["whole"] = flats["param"] if layout.dtype == torch.float32 else flats["master"]
    return flats


def _put(content: bytearray, start: int, part: torch.Tensor) -> None:
    data = part.contiguous().view(torch.uint8).numpy().tobytes()
    content[start : start + len(data)] = data


def opened(folder: Path, setting: Setting, rank: int = 0, ranks: int = 1) -> CommittedStates:
    return CommittedStates(folder, [folder / str(n) for n in range(setting.folders)], 5, rank, ranks)


UNITS = st.lists(
    st.builds(
        Shape,
        st.lists(st.integers(0, 9000), min_size=1, max_size=4),
        st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)
SETTINGS = st.builds(
    Setting,
    ranks=st.integers(1, 4),
    folders=st.integers(1, 3),
    tile=st.sampled_from([4096, 8192, 1 << 40]),
    tier=st.sampled_from(["nvme", "host"]),
    master=st.sampled_from(["remainder", "fp32"]),
    moments=st.sampled_from(["fp32", "bf16", "8bit"]),
    sharded=st.booleans(),
    used=st.sampled_from([0, 1 << 16, 200 << 10]),
    weighted=st.booleans(),
)


@settings(max_examples=60)
@given(UNITS, SETTINGS)
def test_every_parameter_is_read_as_it_was_written(shapes: list[Shape], setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as name:
        states = write_run(Path(name), shapes, setting)
        source = opened(Path(name), setting)
        for layout, flats in states:
            for slot in layout.slots:
                kinds = source.index.kinds(slot.name)
                found = source.read(Piece(slot.name, slot.shape), kinds)
                for kind in kinds:
                    expected = view(kind, slot, flats["whole" if kind.name == "master" else kind.name])
                    assert found[kind.name].shape == kind.shape_in(slot.shape)
                    assert torch.equal(found[kind.name].view(torch.uint8), expected.contiguous().view(torch.uint8))
                assert (source.index.parameters[slot.name].step, source.index.global_steps) == (7, 3)


ONE = [Shape([5000, 300], torch.bfloat16, True)]


def test_client_state_is_that_of_the_same_rank_or_of_the_first(tmp_path: Path) -> None:
    write_run(tmp_path, ONE, Setting())
    assert opened(tmp_path, Setting(), rank=1, ranks=2).client_state() == {"rank": 1}
    assert opened(tmp_path, Setting(), rank=1, ranks=4).client_state() == {"rank": 0}


def test_a_replicated_run_needs_the_states_of_one_rank_only(tmp_path: Path) -> None:
    ((layout, flats),) = write_run(tmp_path, ONE, Setting(sharded=False))
    (tmp_path / "0" / states_of(1)).unlink()
    source = opened(tmp_path, Setting())
    slot = layout.slots[0]
    found = source.read(Piece(slot.name, slot.shape), source.index.kinds(slot.name))
    assert torch.equal(found["master"], flats["whole"][: slot.stop])


@pytest.mark.parametrize("file", [states_of(1), "rank-00001.json", "rank-00001.record-1"])
def test_a_missing_file_of_a_rank_is_named(file: str, tmp_path: Path) -> None:
    write_run(tmp_path, ONE, Setting())
    (tmp_path / "0" / file).unlink()
    with pytest.raises(CheckpointError, match=rf"0/{file} is missing"):
        opened(tmp_path, Setting())


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, ONE, Setting())
    with open(tmp_path / "0" / states_of(1), "r+b") as file:
        file.truncate(4096)
    with pytest.raises(CheckpointError, match=r"rank-00001\.states has 4,096 bytes instead of [\d,]+: it was cut"):
        opened(tmp_path, Setting())


def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, ONE, Setting())
    path = tmp_path / "0" / states_of(1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"rank-00001\.states cannot be read"):
        opened(tmp_path, Setting())


def test_another_number_of_folders_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, ONE, Setting(folders=2))
    with pytest.raises(CheckpointError, match=r"is striped over 2 folders, and 1 are named"):
        opened(tmp_path, Setting(folders=1))


def altered(folder: Path, change: Any) -> None:
    """Change the manifests of both ranks, with checksums that fit."""
    for rank in range(2):
        path = manifest_file(folder / "0", rank)
        content = json.loads(path.read_text())
        change(content["layout"])
        path.write_text(Manifest(content["layout"], (), "").to_json())


def test_tensor_parallel_states_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, ONE, Setting())
    altered(tmp_path, lambda layout: layout.update(model_parallel=2))
    with pytest.raises(CheckpointError, match=r"was written by 2 tensor-parallel ranks"):
        opened(tmp_path, Setting())


HOSTILE: dict[str, Any] = {
    "a huge parameter": lambda layout: layout["units"][0]["slots"][0].__setitem__(1, [1 << 50]),
    "a huge unit": lambda layout: layout["units"][0].update(numel=1 << 50),
    "a negative shape": lambda layout: layout["units"][0]["slots"][0].__setitem__(1, [-5, -1000]),
    "an extent beyond the file": lambda layout: layout["extents"][0].__setitem__(slice(2, 4), [1 << 50, 1 << 50]),
    "a negative place": lambda layout: layout["extents"][0].__setitem__(slice(2, 4), [-4096, -4096]),
    "a dtype that is no dtype": lambda layout: layout["units"][0].update(dtype="nn"),
    "other states": lambda layout: layout["units"][0]["states"][1].__setitem__(0, "elsewhere"),
    "no tiles": lambda layout: layout["units"][0].update(tile=0),
    "no units": lambda layout: layout.pop("units"),
    "text for a number": lambda layout: layout["units"][0].update(numel="many"),
    "no shards": lambda layout: layout.update(shards=0),
    "more shards than ranks": lambda layout: layout.update(shards=1 << 40),
    "a chunk of nothing": lambda layout: layout.update(chunk=0),
    "a huge number of folders": lambda layout: layout.update(folders=1 << 50),
    "weights of other folders": lambda layout: layout.update(weights=[3, 1]),
    "a negative weight": lambda layout: layout.update(weights=[-1]),
    "no weight": lambda layout: layout.update(weights=[0]),
    "a huge weight": lambda layout: layout.update(weights=[1 << 50]),
    "a weight that is no number": lambda layout: layout.update(weights=["1"]),
    "weights that are no list": lambda layout: layout.update(weights=1),
    "units that are no units": lambda layout: layout.update(units=[3]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_manifest_that_misstates_the_files_is_refused(change: Any, tmp_path: Path) -> None:
    write_run(tmp_path, ONE, Setting())
    altered(tmp_path, change)
    with pytest.raises(CheckpointError):
        opened(tmp_path, Setting())


def test_files_of_different_steps_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, ONE, Setting())
    path = record_file(tmp_path / "0", 1, 5)
    record = Record(5, replace(PROGRESS, global_steps=4), [[7, 7]], bytes([1, 0]), {})
    write_record(path, record)
    with pytest.raises(CheckpointError, match=r"ranks differ in their units or (steps|formats)"):
        opened(tmp_path, Setting())
