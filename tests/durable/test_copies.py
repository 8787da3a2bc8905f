"""Copies of a durable run whose files were read at different moments of its training: exact, or refused.

Every write of a training is recorded, so that any byte of any file can be taken from any moment.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from durable import power_cases
from durable.conversion_cases import assert_same, everything, opened, train
from durable.drive import Files, apply, is_whole
from durable.recorder import STATES, Log, Write
from durable.test_loading import flip
from infinity.durable.condition import Condition, condition
from infinity.durable.folder import generation_folder, manifest_file, record_file
from infinity.durable.manifest import read_manifest
from infinity.durable.record import DIGESTS, Proof, read_record
from infinity.errors import CheckpointError, UsageError
from infinity.tiers.open_tiers import states_of
from support.ranks import Group
from support.records import of_version

STEPS = 5
RECORDS = ("record-0", "record-1")
PAGE = 4096


@dataclass
class Trained:
    """The writes of a rank, and the files at each moment: between any two writes."""

    log: Log
    changes: list[Write] = field(init=False)

    def __post_init__(self) -> None:
        self.changes = [event for event in self.log.events if isinstance(event, Write)]

    @cached_property
    def moments(self) -> list[Files]:
        files: Files = {STATES: bytearray(self.log.nbytes)}
        found = [dict(files)]
        for write in self.changes:
            files = {**files, write.file: bytearray(files.get(write.file, b""))}
            apply(files, write)
            found.append(files)
        return found

    def part(self, name: str, moment: int) -> bytes | None:
        """The content of a file at a moment; None: it does not exist yet."""
        content = self.moments[moment].get(name)
        return None if content is None else bytes(content)

    @cached_property
    def different(self) -> list[int]:
        """Moments of which no two have the same records, with some between the commits."""
        last: object = None
        found = []
        for number, files in enumerate(self.moments):
            records = [bytes(files.get(self.record(slot), b"")) for slot in (0, 1)]
            if records != last or number % 7 == 0:
                found.append(number)
            last = records
        return found

    @cached_property
    def recorded(self) -> list[int]:
        """The first moment of each content of the records."""
        contents = [tuple(bytes(files.get(self.record(slot), b"")) for slot in (0, 1)) for files in self.moments]
        return [number for number, each in enumerate(contents) if number == 0 or each != contents[number - 1]]

    def record(self, slot: int) -> str:
        return f"rank-{self.log.rank:05d}.{RECORDS[slot]}"


@pytest.fixture(scope="module", params=[1, 2])
def ranks(
    request: pytest.FixtureRequest, groups: dict[int, Group], tmp_path_factory: pytest.TempPathFactory
) -> list[list[Trained]]:
    """Two trainings with the same numbers, and the ranks of each."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    return [
        [
            Trained(log)
            for log, _ in groups[request.param].run(
                power_cases.interrupted, timeout=300, folder=str(folder), steps=STEPS, late=0.0
            )
        ]
        for folder in folders
    ]


@dataclass(frozen=True)
class Copied:
    """Files of a rank in a copy. states: pieces in order, from their start on. records: contents; None: missing."""

    trained: Trained
    states: bytes
    records: tuple[bytes | None, bytes | None]


def copy_of(trained: Trained, states: int, records: Sequence[int]) -> Copied:
    """The states of one moment and the records of others."""
    content = trained.part(STATES, states)
    assert content is not None
    first, second = (trained.part(trained.record(slot), moment) for slot, moment in enumerate(records))
    return Copied(trained, content, (first, second))


def verdict(copies: Sequence[Copied], folder: Path) -> Condition | None:
    """Write a copy of all ranks, and return what `infinity resume --check` finds; None: it cannot be read."""
    target = generation_folder(folder, 1)
    target.mkdir(exist_ok=True)
    for copied in copies:
        log = copied.trained.log
        for name, content in log.files.items():
            (target / name).write_bytes(content)
        (target / states_of(log.rank)).write_bytes(copied.states)
        for slot, content in enumerate(copied.records):
            path = record_file(target, log.rank, slot)
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
    try:
        return condition(folder, folder, verify=True)
    except CheckpointError:
        return None


def check(copies: Sequence[Copied], folder: Path) -> bool:
    """Return whether a copy is accepted. AssertionError if it is and has other states than one step."""
    found = verdict(copies, folder)
    if found is None or not found.is_intact:
        return False
    for copied in copies:
        log = copied.trained.log
        records = [read_record(record_file(generation_folder(folder, 1), log.rank, slot)) for slot in (0, 1)]
        chosen = [each for each in records if each is not None and each.progress.global_steps == found.step]
        assert chosen, f"rank {log.rank} has no record of step {found.step}"
        assert is_whole(log, chosen[0], bytearray(copied.states)), f"a mixture is taken for step {found.step}"
    return True


def test_a_copy_of_one_moment_is_accepted(ranks: list[list[Trained]], tmp_path: Path) -> None:
    """Copies of all ranks between two commits, and of a single rank at any moment, are accepted."""
    trained = ranks[0]
    last = [len(each.moments) - 1 for each in trained]
    assert check([copy_of(each, at, (at, at)) for each, at in zip(trained, last, strict=True)], tmp_path)
    if len(trained) == 1:
        first = next(n for n in trained[0].different if trained[0].part(trained[0].record(1), n))
        for moment in range(first + 1, len(trained[0].moments)):
            assert check([copy_of(trained[0], moment, (moment, moment))], tmp_path)


def test_states_and_records_of_any_two_moments(ranks: list[list[Trained]], tmp_path: Path) -> None:
    """States first and records later, and the reverse. With two ranks, the files of one rank are of one moment."""
    if len(ranks[0]) == 1:
        (trained,) = ranks[0]
        pairs: Iterator[list[Copied]] = (
            [copy_of(trained, states, (records, records))]
            for states, records in itertools.product(range(len(trained.moments)), trained.recorded)
        )
    else:
        pairs = (
            [copy_of(each, at, (at, at)) for each, at in zip(ranks[0], chosen, strict=True)]
            for chosen in itertools.product(*(each.different for each in ranks[0]))
        )
    accepted = [check(copies, tmp_path) for copies in pairs]
    assert 0 < sum(accepted) < len(accepted)


def test_files_of_two_runs_are_refused(ranks: list[list[Trained]], tmp_path: Path) -> None:
    """Two runs have trained the same numbers of steps, with the same settings."""
    one, other = ranks
    ends = {id(each): len(each.moments) - 1 for run in ranks for each in run}
    if len(one) == 2:
        mixed = [copy_of(each, ends[id(each)], (ends[id(each)],) * 2) for each in (one[0], other[1])]
        found = verdict(mixed, tmp_path)
        assert found is not None and any("different jobs wrote the records" in fault for fault in found.faults)
        return
    states, records = one[0], other[0]
    mixed = [Copied(states, copy_of(states, -1, (-1, -1)).states, copy_of(records, -1, (-1, -1)).records)]
    assert check(mixed, tmp_path), "states of the same bits are exact"
    early = copy_of(states, ends[id(states)] // 2, (-1, -1)).states
    assert not check([Copied(states, early, mixed[0].records)], tmp_path)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_pieces_of_any_moments(ranks: list[list[Trained]], tmp_path: Path, data: st.DataObject) -> None:
    """Each file is cut at pages, as a copy beside writes, and each piece is of a moment of its own."""
    copies = []
    for trained in ranks[0]:
        moments = st.sampled_from(trained.different)
        near = data.draw(moments)
        at = st.one_of(st.just(near), moments)
        pages = trained.log.nbytes // PAGE
        cuts = sorted(data.draw(st.sets(st.integers(1, pages - 1), max_size=6)))
        content = b"".join(
            trained.part(STATES, data.draw(at))[first * PAGE : last * PAGE]  # type: ignore[index]
            for first, last in itertools.pairwise([0, *cuts, -(-trained.log.nbytes // PAGE)])
        )
        first, second = (trained.part(trained.record(slot), data.draw(at)) for slot in (0, 1))
        copies.append(Copied(trained, content, (first, second)))
    check(copies, tmp_path)


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_every_slot_alone_of_another_moment(ranks: list[list[Trained]], tmp_path: Path) -> None:
    """One extent is of a commit before or after, and all others are those of the record."""
    (trained,) = ranks[0]
    whole = copy_of(trained, -1, (-1, -1))
    refused = 0
    for moment in trained.different:
        older = trained.part(STATES, moment)
        assert older is not None
        for each in trained.log.extents:
            for place in (each.first, each.second):
                content = bytearray(whole.states)
                span = slice(place.offset, place.offset + place.nbytes)
                content[span] = older[span]
                refused += not check([Copied(trained, bytes(content), whole.records)], tmp_path)
    assert refused > 10


def test_the_fault_names_the_unit_and_the_fix(ranks: list[list[Trained]], tmp_path: Path) -> None:
    copies = [copy_of(each, len(each.moments) // 2, (-1, -1)) for each in ranks[0]]
    found = verdict(copies, tmp_path)
    assert found is not None and len(found.faults) == len(copies)
    for rank, fault in enumerate(found.faults):
        assert fault.startswith(f"rank {rank}: the ") and "of unit " in fault, fault
        assert "copied while the run trained" in fault and "while no process trains the run" in fault


# -- engines and real copies -------------------------------------------------------------------------------------------


def copied(source: Path, to: Path, *patterns: str) -> None:
    """Copy the files of a run that match, as `cp -r` does while it trains."""
    for pattern in patterns:
        for path in source.rglob(pattern):
            target = to / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copy2(path, target)


ORDERS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "states first": (["*.states"], ["*.record-*", "*.json"]),
    "records first": (["*.record-*", "*.json"], ["*.states"]),
}


@pytest.fixture(scope="module", params=ORDERS)
def torn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run of four steps; some files are those of step 2."""
    folder = tmp_path_factory.mktemp("nvme")
    with opened(str(folder), 1) as engine:
        for step, patterns in zip((2, 4), ORDERS[request.param], strict=True):
            train(engine, range(step - 2, step))
            engine.settle()
            assert engine.updates.durable is not None
            engine.updates.durable.wait()
            copied(folder / "run", folder / "copy", *patterns)
    return folder


REFUSED = r"rank-00000\.states does not hold the states of its commit: the .* of unit .* copied while the run trained"


@pytest.mark.parametrize("options", [{}, {"bf16": False, "unit_size": 1 << 30}], ids=["the same layout", "another"])
def test_an_engine_refuses_a_torn_copy_and_loses_no_state(torn: Path, options: dict[str, Any]) -> None:
    with opened(str(torn), 1, run="copy", seed=9, **options) as engine:
        before = everything(engine)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=REFUSED):
                engine.resume()
        assert_same(everything(engine), before)
        with pytest.raises(UsageError, match=r"would replace. Resume it"):
            train(engine, range(1))
    with opened(str(torn), 1, run="other", seed=9) as engine, pytest.raises(CheckpointError, match=REFUSED):
        engine.load_checkpoint(torn / "copy")


def test_a_copy_of_a_run_that_has_ended_resumes(tmp_path: Path) -> None:
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(3))
        engine.settle()
        expected = everything(engine)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with opened(str(tmp_path), 1, run="copy", seed=9) as engine:
        assert engine.resume() == {"next": 3}
        assert_same(everything(engine), expected)


def former(path: Path) -> None:
    """Write a record as version 01 did."""
    record = read_record(path)
    assert record is not None
    blobs = {name: blob for name, blob in record.blobs.items() if name != DIGESTS}
    path.write_bytes(of_version(replace(record, proof=Proof(), blobs=blobs).packed(), b"01"))


@pytest.mark.parametrize("options", [{}, {"bf16": False, "unit_size": 1 << 30}], ids=["the same layout", "another"])
def test_a_run_of_the_former_version_resumes_and_is_proved_from_then_on(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Digests cover its frozen parameters, too, which no later step writes."""
    with opened(str(tmp_path), 1) as engine:
        losses = train(engine, range(3))
        engine.settle()
        expected = everything(engine)
    former(record_file(tmp_path / "run" / "0001", 0, 3))
    found = condition(tmp_path / "run", tmp_path / "run", verify=True)
    assert found.is_intact and not found.proves
    with opened(str(tmp_path), 1, seed=9, **options) as engine:
        assert engine.resume() == {"next": 3}
        if not options:
            assert_same(everything(engine), expected)
        losses += train(engine, range(3, 4))
        engine.settle()
        expected = everything(engine)
    found = condition(tmp_path / "run", tmp_path / "run", verify=True)
    assert found.is_intact and found.proves and found.step == 4
    generation = generation_folder(tmp_path / "run", 2 if options else 1)
    manifest = read_manifest(manifest_file(generation, 0))
    assert manifest is not None
    path = generation / states_of(0)
    record = next(each for slot in (0, 1) if (each := read_record(record_file(generation, 0, slot))) is not None)
    for (_, _, *places, nbytes), slot in zip(manifest.layout["extents"], record.slots, strict=True):
        for place in (places[slot], places[slot] + nbytes - 1):
            flip(path, place)
            assert not condition(tmp_path / "run", tmp_path / "run", verify=True).is_intact
            flip(path, place)
    with opened(str(tmp_path), 1, seed=8, **options) as engine:
        assert engine.resume() == {"next": 4}
        assert_same(everything(engine), expected)


def test_digests_outlive_a_change_of_their_blocks(tmp_path: Path) -> None:
    """`aio.block_size` bounds a block; frozen extents, which no step writes, have the former one."""
    for step, size in enumerate((1 << 16, 1 << 12, 1 << 16)):
        with opened(str(tmp_path), 1, aio={"block_size": size}) as engine:
            assert (engine.resume() or {"next": 0}) == {"next": step}
            train(engine, range(step, step + 1))
        found = condition(tmp_path / "run", tmp_path / "run", verify=True)
        assert found.is_intact and found.proves and found.step == step + 1


def test_a_record_of_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(1))
    path = record_file(tmp_path / "run" / "0001", 0, 1)
    path.write_bytes(of_version(path.read_bytes(), b"04"))
    with pytest.raises(CheckpointError, match=r"record-1 has format version 04: use a newer Infinity"):
        opened(str(tmp_path), 1)


def test_a_manifest_of_another_run_is_refused(tmp_path: Path) -> None:
    """The manifest's layout has as many extents, with other rules."""
    for name, options in (("run", {}), ("other", {"optimizer": "Adam"})):
        with opened(str(tmp_path), 1, run=name, **options) as engine:
            train(engine, range(2))
    shutil.copy2(tmp_path / "other" / "0001" / "rank-00000.json", tmp_path / "run" / "0001" / "rank-00000.json")
    with (
        opened(str(tmp_path), 1, run="third", seed=9) as engine,
        pytest.raises(CheckpointError, match="the manifest and the record of a rank name different layouts"),
    ):
        engine.load_checkpoint(tmp_path / "run")
    found = condition(tmp_path / "run", tmp_path / "run", verify=True)
    assert not found.is_intact
