"""Striping: the place of each byte, unchanged training, and no leftovers if one path fails."""

from __future__ import annotations

import errno
import os
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from infinity.errors import OutOfSpaceError, StorageError
from infinity.plan.io import LARGEST_CHUNK, LONGEST_STRIPE, SMALLEST_CHUNK, IoPlan, Stripe, stripe_chunk, weights_of
from infinity.tiers import files, io as tier_io
from infinity.tiers.files import SwapFile, open_swap_files
from infinity.tiers.io import engine_of, open_engine
from infinity.tiers.memory import host_tensor
from infinity.tiers.nvme import NvmeTier
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_same, open_engine as open_training, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

MB = 1_000_000
CHUNK = SMALLEST_CHUNK
SAME = "ignore:.*are on one file system:RuntimeWarning"
pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.filterwarnings(SAME)]


def folders(parent: Path, count: int) -> list[Path]:
    made = [parent / f"disk{number}" for number in range(count)]
    for folder in made:
        folder.mkdir()
    return made


# -- the map -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 12).map(lambda pages: pages * 4096))
def test_a_chunk_is_a_piece_within_bounds(block_size: int) -> None:
    chunk = stripe_chunk(block_size)
    assert SMALLEST_CHUNK <= chunk <= LARGEST_CHUNK and chunk % SMALLEST_CHUNK == 0
    assert chunk >= min(block_size, LARGEST_CHUNK)
    if block_size % SMALLEST_CHUNK == 0 and block_size <= LARGEST_CHUNK:
        assert chunk == block_size


WEIGHTS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any).map(tuple)


@given(st.integers(1, 5))
def test_equal_weights_are_round_robin(files: int) -> None:
    assert Stripe(CHUNK, (1,) * files).order == tuple(range(files))
    assert Stripe(CHUNK, (3,) * files).order == tuple(range(files)) * 3


def test_chunks_of_a_file_are_spread_evenly() -> None:
    assert Stripe(CHUNK, (3, 1)).order == (0, 0, 1, 0)
    assert Stripe(CHUNK, (1, 3, 2)).order == (1, 2, 0, 1, 2, 1)


@given(st.integers(1, 10_000_000), st.integers(1, 16).map(lambda n: n * CHUNK), WEIGHTS)
def test_sizes_are_what_the_chunks_need(nbytes: int, chunk: int, weights: tuple[int, ...]) -> None:
    """A file has its share of the chunks, within one stripe."""
    stripe = Stripe(chunk, weights)
    needed = [0] * len(weights)
    for number in range(-(-nbytes // chunk)):
        needed[stripe.order[number % len(stripe.order)]] += chunk
    assert stripe.sizes(nbytes) == [max(each, chunk) for each in needed]
    for each, weight in zip(needed, weights, strict=True):
        assert abs(each - nbytes * weight / sum(weights)) <= chunk * weight


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 4), WEIGHTS)
def test_every_byte_has_one_place(offset: int, nbytes: int, chunk: int, weights: tuple[int, ...]) -> None:
    """Pieces and ranges agree with a count of the chunks, and no two bytes share a place."""
    stripe = Stripe(chunk, weights)
    places, ends = [], [0] * len(weights)
    for start in range(0, offset + nbytes, chunk):
        file = stripe.order[start // chunk % len(stripe.order)]
        places += [(file, ends[file] + byte) for byte in range(chunk)]
        ends[file] += chunk
    wanted = places[offset : offset + nbytes]
    assert len({*places}) == len(places)
    pieces = list(stripe.pieces(offset, nbytes))
    assert [(file, start + byte) for file, start, length in pieces for byte in range(length)] == wanted
    for file, (start, stop) in enumerate(stripe.ranges(offset, nbytes)):
        assert list(range(start, stop)) == [byte for where, byte in wanted if where == file]


SPEEDS = st.lists(st.floats(1e6, 1e10), min_size=1, max_size=6)


@given(SPEEDS, st.data())
def test_weights_follow_speeds_and_room(speeds: list[float], data: st.DataObject) -> None:
    """A stripe by speed is at most as much slower than round robin as measurements vary, and keeps the limits."""
    limits = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), min_size=len(speeds), max_size=len(speeds)))
    free = weights_of(speeds, [1.0] * len(speeds))
    assert sum(free) <= LONGEST_STRIPE and min(free) >= 0
    assert _rate(free, speeds) >= 0.89 * _rate((1,) * len(speeds), speeds)
    tight = weights_of(speeds, limits)
    if tight != (1,) * len(speeds):
        assert all(weight <= sum(tight) * limit for weight, limit in zip(tight, limits, strict=True))


def _rate(weights: Sequence[int], speeds: Sequence[float]) -> float:
    return sum(weights) / max(weight / speed for weight, speed in zip(weights, speeds, strict=True))


@given(st.lists(st.floats(0.8, 1.0), min_size=1, max_size=6), st.floats(1e6, 1e10))
def test_similar_speeds_are_round_robin(parts: list[float], fastest: float) -> None:
    assert weights_of([part * fastest for part in [*parts, 1.0]], [1.0] * (len(parts) + 1)) == (1,) * (len(parts) + 1)


@pytest.mark.parametrize(
    ("speeds", "limits", "weights"),
    [
        ((3, 1), (1, 1), (3, 1)),
        ((3.2, 1), (1, 1), (3, 1)),
        ((1, 2, 3), (1, 1, 1), (1, 2, 3)),
        ((100, 1), (1, 1), (1, 0)),  # with a chunk in each stripe, the second drive would be the limit
        ((3, 1), (0.5, 1), (1, 1)),
        ((3, 1), (0.2, 1), (1, 4)),
        ((1, 1), (0.25, 1), (1, 3)),
        ((1, 1), (0, 1), (0, 1)),
        ((3, 1), (0.2, 0.2), (1, 1)),  # nothing fits, which is an error of the file
    ],
)
def test_weights_of_speeds(speeds: Sequence[float], limits: Sequence[float], weights: tuple[int, ...]) -> None:
    assert weights_of(speeds, limits) == weights


class Model:
    """A model of a striped file: each member has its chunks of the whole, one after the other."""

    def __init__(self, nbytes: int, order: Sequence[int]) -> None:
        self.order = order
        self.data = bytearray(nbytes)

    def member(self, number: int, size: int) -> bytes:
        held = bytearray()
        for offset in range(0, len(self.data), CHUNK):
            if self.order[offset // CHUNK % len(self.order)] == number:
                held += self.data[offset : offset + CHUNK]
        return bytes(held).ljust(size, b"\0")


def member_bytes(swap: SwapFile) -> list[bytes]:
    """Return the content of each member, read through its buffered descriptor; all members are direct."""
    descriptors = swap._fds[1::2]
    return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in descriptors]


RANGES = st.lists(st.tuples(st.integers(0, 9 * CHUNK), st.integers(1, 4 * CHUNK)), min_size=1, max_size=6)
"""(offset, length) of writes, one after the other."""


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=RANGES,
    weights=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    threads=st.integers(1, 3),
    block_size=st.sampled_from([4096, 20_480, CHUNK, 4 * CHUNK]),
    shift=st.sampled_from([0, 0, 100]),
)
def test_every_byte_is_where_the_map_says(
    tmp_path: Path,
    ranges: list[tuple[int, int]],
    weights: tuple[int, ...],
    threads: int,
    block_size: int,
    shift: int,
) -> None:
    """Aligned and unaligned requests of every length, against the model; `shift` bytes of memory are skipped."""
    nbytes = 13 * CHUNK
    members = len(weights)
    model = Model(nbytes, Stripe(CHUNK, weights).order)
    memory = host_tensor(nbytes + 4096)
    at = memory[shift:]
    with (
        open_swap_files([tmp_path] * members, nbytes, name="x", chunk=CHUNK, weights=weights) as swap,
        open_engine(block_size=block_size, queue_depth=4, threads=threads) as engine,
    ):
        for number, (offset, length) in enumerate(ranges):
            data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
            at[:length] = data
            engine.write(swap.file, offset, at.data_ptr(), length).wait()
            model.data[offset : offset + length] = data.numpy().tobytes()
        if members > 1:
            for number, held in enumerate(member_bytes(swap)):
                assert held == model.member(number, len(held))
        memory.fill_(0xFF)
        engine.read(swap.file, 0, at.data_ptr(), nbytes).wait()
        assert at[:nbytes].numpy().tobytes() == bytes(model.data)
        for offset, length in ranges:
            engine.read(swap.file, offset, at.data_ptr(), length).wait()
            assert at[:length].numpy().tobytes() == bytes(model.data[offset : offset + length])


# -- opening -----------------------------------------------------------------------------------------------------------


def test_one_path_is_a_plain_file(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_swap_files([tmp_path], 5, name="x", chunk=CHUNK) as swap:
            assert (swap.nbytes, swap.path, len(swap._fds)) == (4096, str(tmp_path / "x"), 2)


def test_each_path_has_its_share(tmp_path: Path) -> None:
    paths = folders(tmp_path, 3)
    with open_swap_files(paths, 4 * CHUNK + 5, name="x", chunk=CHUNK) as swap:
        assert swap.nbytes == 5 * CHUNK
        assert swap.path == ", ".join(str(path / "x") for path in paths)
        assert swap.direct and swap.file.direct
        sizes = [os.fstat(fd).st_size for fd in swap._fds[1::2]]
        assert sizes == [2 * CHUNK, 2 * CHUNK, CHUNK]
        assert all(os.fstat(fd).st_blocks * 512 >= size for fd, size in zip(swap._fds[1::2], sizes, strict=True))
        assert [os.listdir(path) for path in paths] == [[], [], []]
    swap.close()


def test_fewer_chunks_than_paths(tmp_path: Path) -> None:
    with open_swap_files(folders(tmp_path, 3), 5, name="x", chunk=CHUNK) as swap:
        assert swap.nbytes == CHUNK and [os.fstat(fd).st_size for fd in swap._fds[1::2]] == [CHUNK] * 3


def test_not_direct_where_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = folders(tmp_path, 2)
    real = files._open_direct

    def refuse(fd: int, folder: Path) -> int:
        return -1 if folder == second else real(fd, folder)

    monkeypatch.setattr(files, "_open_direct", refuse)
    memory = host_tensor(4 * CHUNK)
    memory.copy_(torch.arange(4 * CHUNK) % 251)
    expected = memory.clone()
    with (
        open_swap_files([first, second], 4 * CHUNK, name="x", chunk=CHUNK) as swap,
        open_engine(block_size=CHUNK, queue_depth=4, threads=2) as engine,
    ):
        assert not swap.direct
        engine.write(swap.file, 0, memory.data_ptr(), memory.numel()).wait()
        memory.fill_(0xFF)
        engine.read(swap.file, 0, memory.data_ptr(), memory.numel()).wait()
        assert torch.equal(memory, expected)


@pytest.mark.filterwarnings("default")
def test_one_file_system_is_said_once(tmp_path: Path) -> None:
    first, second = folders(tmp_path, 2)
    said = f"{first} and {second} are on one file system: striping over them gains nothing"
    with pytest.warns(RuntimeWarning, match=said) as caught, open_swap_files([first, second], MB, name="x"):
        pass
    assert len(caught) == 1 and caught[0].filename == __file__


def test_no_path() -> None:
    with pytest.raises(ValueError, match="at least one folder"):
        open_swap_files([], MB, name="x")


def test_space_on_one_file_system_is_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each share would fit alone, but not all of them."""
    monkeypatch.setattr(files, "open_anonymous", lambda *_: pytest.fail("something was created"))
    paths = folders(tmp_path, 2)
    status = os.statvfs(tmp_path)
    nbytes = status.f_bavail * status.f_frsize * 3 // 2
    with pytest.raises(OutOfSpaceError, match=f"in {paths[0]} and {paths[1]}: .* are missing; free") as caught:
        open_swap_files(paths, nbytes, name="x")
    assert nbytes <= caught.value.needed < nbytes + 2 * LARGEST_CHUNK


# -- a path that fails -------------------------------------------------------------------------------------------------


def test_a_second_path_that_is_missing(tmp_path: Path) -> None:
    first, _ = folders(tmp_path, 2)
    with pytest.raises(StorageError, match=f"{tmp_path}/none does not exist"):
        open_swap_files([first, tmp_path / "none"], MB, name="x")


@pytest.mark.parametrize(
    ("call", "error", "raised"),
    [("posix_fallocate", errno.ENOSPC, OutOfSpaceError), ("posix_fallocate", errno.EFBIG, StorageError)],
)
@pytest.mark.parametrize("named", [False, True], ids=["anonymous", "named"])
def test_a_second_path_that_is_full(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: int,
    raised: type[Exception],
    named: bool,
) -> None:
    """Space reserved in the first folder is released."""
    paths = folders(tmp_path, 2)
    reserved: list[int] = []

    def reserve(fd: int, offset: int, nbytes: int) -> None:
        reserved.append(fd)
        if len(reserved) == 2:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(files.os, call, reserve)
    if named:
        monkeypatch.setattr(files.os, "O_TMPFILE", 0)  # opening a folder to write in it is refused
    with pytest.raises(raised, match=str(paths[1])):
        open_swap_files(paths, 4 * MB, name="x")
    assert len(reserved) == 2
    for fd in reserved:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; skipped where one cannot be mounted."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"this machine cannot mount a small file system: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_second_path_that_is_small(tmp_path: Path, small_disk: Path) -> None:
    """On two file systems, each holds only its own share, without a warning."""
    (first,) = folders(tmp_path, 1)
    with pytest.raises(OutOfSpaceError, match=f"too little space in {small_disk}: 5,242,880 bytes are needed"):
        open_swap_files([first, small_disk], 10 << 20, name="x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*refuses direct I/O")  # older kernels have none on tmpfs
        with open_swap_files([first, small_disk], 8 << 20, name="x"):
            assert os.statvfs(small_disk).f_bavail == 0
        assert os.statvfs(small_disk).f_bavail > 0


# -- training ----------------------------------------------------------------------------------------------------------


def io_plan(folders: Sequence[Path], nbytes: int) -> IoPlan:
    stripe = Stripe(CHUNK, (1,) * len(folders))
    return IoPlan(tuple(folders), nbytes, 0, stripe, "auto", CHUNK, 32, len(folders), 0)


class Throttled:
    """An engine for two folders that takes `seconds` for each chunk of a folder in one direction."""

    def __init__(self, io: IoPlan, read: Sequence[float], write: Sequence[float]) -> None:
        self.engine = engine_of(io)
        self.seconds = {"read": read, "write": write}
        self.free = [0.0, 0.0]
        """When each folder is done with all requests so far."""

    def __enter__(self) -> Throttled:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def read(self, file: Any, offset: int, address: int, nbytes: int) -> Any:
        return self._start("read", file, offset, address, nbytes)

    def write(self, file: Any, offset: int, address: int, nbytes: int) -> Any:
        return self._start("write", file, offset, address, nbytes)

    def _start(self, way: str, file: Any, offset: int, address: int, nbytes: int) -> Any:
        assert nbytes == CHUNK
        folder = offset // CHUNK % 2
        until = self.free[folder] = max(self.free[folder], time.perf_counter()) + self.seconds[way][folder]
        request = getattr(self.engine, way)(file, offset, address, nbytes)

        def wait() -> int:
            time.sleep(max(0.0, until - time.perf_counter()))
            return int(request.wait())

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize(
    ("write", "writes", "ratio"),
    [((0.003, 0.009), True, 3), ((0.003, 0.003), True, 2), ((0.009, 0.003), False, 3)],
    ids=["both", "reads only are slow", "only reads count"],
)
def test_a_throttled_file_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: tuple[float, float], writes: bool, ratio: float
) -> None:
    """The second folder reads at a third of the speed."""
    monkeypatch.setattr(tier_io, "engine_of", lambda io: Throttled(io, (0.003, 0.009), write))
    first, second = tier_io._speeds(io_plan(folders(tmp_path, 2), MB), writes=writes)
    assert 0.8 * ratio < first / second < 1.25 * ratio
    assert os.listdir(tmp_path / "disk0") == os.listdir(tmp_path / "disk1") == []


def test_one_file_system_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_io, "_speeds", lambda *_, **__: pytest.fail("measured"))
    io = io_plan(folders(tmp_path, 2), 1 << 30)
    assert tier_io.striped_by_speed(io, 1) is io
    missing = io_plan([tmp_path, tmp_path / "none"], 1 << 30)
    assert tier_io.striped_by_speed(missing, 1) is missing


def test_a_small_file_is_not_measured(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_io, "_speeds", lambda *_, **__: pytest.fail("measured"))
    io = io_plan([tmp_path, small_disk], (32 << 20) - 1)
    assert tier_io.striped_by_speed(io, 1) is io


@pytest.mark.parametrize(("ranks", "weights"), [(1, (11, 1)), (2, (23, 1)), (1000, (1, 0))])
def test_a_folder_holds_no_more_than_its_room(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, weights: tuple[int, int]
) -> None:
    """The small one is the faster, and the file opens although round robin would not fit."""
    monkeypatch.setattr(tier_io, "_speeds", lambda *_, **__: [1.0, 2.0])
    io = io_plan([tmp_path, small_disk], 44 << 20)
    assert tier_io.striped_by_speed(io, ranks).stripe.weights == weights
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*refuses direct I/O")
        open_swap_files(io.folders, io.nbytes, name="x", chunk=CHUNK, weights=weights).close()


def test_no_room_to_measure(tmp_path: Path, small_disk: Path) -> None:
    io = io_plan([tmp_path, small_disk], 1 << 30)
    assert tier_io.striped_by_speed(io, 1) is io


def trained_on(paths: Sequence[Path], options: dict[str, Any], device: LateDevice | None = None) -> Result:
    config = engine_config(folder=paths, prefetch_bytes=20_000, **options)
    with open_training(seeded(Stack), config, device) as engine:
        losses = train(engine, token_batches(4))
        result = Result(losses, parameters_of(engine) | states_of(engine))
        nvme = engine.parts.tiers["nvme"]
        assert isinstance(nvme, NvmeTier)
        if len(paths) > 1:
            assert all(any(held) for held in member_bytes(nvme._file))
            assert nvme._engine.threads == len(paths) * engine.config.aio.threads
    return result


AIO = {"block_size": CHUNK, "thread_count": 2}


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("options", [{}, {"bf16": True, "clip": 0.5}, {"param": "cpu"}, {"optim": "none"}], ids=str)
def test_training_is_the_same(tmp_path: Path, options: dict[str, Any], late: bool) -> None:
    """Training is bit-identical for any number of paths."""
    paths = folders(tmp_path, 3)
    one, two, three = (
        trained_on(paths[:count], {**options, "aio": AIO}, LateDevice(0.01) if late else None) for count in (1, 2, 3)
    )
    assert_same(two, one)
    assert_same(three, one)


@pytest.mark.parametrize("shares", ["auto", "equal", [3, 1]], ids=str)
def test_training_on_two_file_systems(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, shares: Any
) -> None:
    """Training is bit-identical for any shares; `auto` measures."""
    measure = tier_io._speeds
    monkeypatch.setattr(tier_io, "_MEASURED", 2 * CHUNK)
    monkeypatch.setattr(tier_io, "_speeds", lambda io, writes: [1.0, 3.0] if all(measure(io, writes=writes)) else [])
    (first,) = folders(tmp_path, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*refuses direct I/O")
        two = trained_on([first, small_disk], {"aio": {**AIO, "shares": shares}})
        assert_same(two, trained_on([first], {"aio": AIO}))
