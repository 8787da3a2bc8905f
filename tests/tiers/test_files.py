"""Swap files: anonymous, reserved, direct where supported, and one clear error otherwise."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infinity.errors import OutOfSpaceError, StorageError
from infinity.tiers import files, space
from infinity.tiers.files import open_swap_files

MB = 1_000_000
pytestmark = pytest.mark.usefixtures("no_leaks")


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, error: int, when: Callable[..., bool]) -> None:
    """Make os.<name> fail with `error` if `when(*arguments)`."""
    real = getattr(os, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise OSError(error, os.strerror(error))
        return real(*arguments, **options)

    monkeypatch.setattr(files.os, name, call)


def is_tmpfile(path: object, flags: int, *_: object) -> bool:
    return flags & os.O_TMPFILE == os.O_TMPFILE


def is_direct(path: object, flags: int, *_: object) -> bool:
    return bool(flags & os.O_DIRECT)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def test_reserved_and_anonymous(tmp_path: Path) -> None:
    with open_swap_files([tmp_path], 3 * MB, name="rank0") as swap:
        assert os.listdir(tmp_path) == []
        assert swap.nbytes == 3_002_368  # whole pages
        assert swap.direct and swap.file.direct
        assert swap.file.path == swap.path == str(tmp_path / "rank0")
        status = os.fstat(swap._fds[0])
        assert (status.st_size, status.st_nlink) == (swap.nbytes, 0)
        assert status.st_blocks * 512 >= swap.nbytes
        assert status.st_mode & 0o777 == 0o600
        assert os.pread(swap._fds[1], swap.nbytes, 0) == bytes(swap.nbytes)
        assert not any(os.get_inheritable(fd) for fd in swap._fds)
    swap.close()


def test_two_with_one_name(tmp_path: Path) -> None:
    with open_swap_files([tmp_path], 5, name="x") as first, open_swap_files([str(tmp_path)], 5, name="x") as second:
        os.pwrite(first._fds[1], b"first", 0)
        assert os.pread(second._fds[1], 5, 0) == bytes(5)


def test_where_no_file_is_anonymous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "open", errno.EOPNOTSUPP, is_tmpfile)
    with open_swap_files([tmp_path], MB, name="a/b") as swap:
        assert os.listdir(tmp_path) == []
        assert swap.direct
        assert os.fstat(swap._fds[0]).st_nlink == 0


def test_folder_that_stays_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps a name for a removed file while it is open."""
    refuse(monkeypatch, "open", errno.EOPNOTSUPP, is_tmpfile)
    monkeypatch.setattr(Path, "rmdir", Mock(side_effect=OSError(errno.ENOTEMPTY, "not empty")))
    swap = open_swap_files([tmp_path], MB, name="x")
    assert len(os.listdir(tmp_path)) == 1
    monkeypatch.undo()
    swap.close()


@pytest.mark.parametrize("how", ["open", "pwrite", "preadv"])
def test_direct_io_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Some file systems reject the flag, others accept it and reject the transfer."""
    refuse(monkeypatch, how, errno.EINVAL, is_direct if how == "open" else lambda *_: True)
    with (
        pytest.warns(RuntimeWarning, match=f"{tmp_path} .* refuses direct I/O .*page cache") as caught,
        open_swap_files([tmp_path], MB, name="x") as swap,
    ):
        assert not swap.direct
        assert swap.nbytes >= MB
    assert len(caught) == 1
    assert space.file_system_of(tmp_path) in str(caught[0].message)
    assert caught[0].filename == __file__


def test_read_back_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "preadv", lambda fd, buffers, offset: len(buffers[0]))
    with pytest.warns(RuntimeWarning, match="read back different"), open_swap_files([tmp_path], MB, name="x") as swap:
        assert not swap.direct


def test_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from infinity.tiers.files import open_swap_files\n"
        "swap = open_swap_files([sys.argv[1]], 50_000_000, name='x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    free = free_bytes(tmp_path)
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert killed.returncode == -9
    assert free_bytes(tmp_path) > free - 40_000_000


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path}/none does not exist; create it"):
        open_swap_files([tmp_path / "none"], 1, name="x")


def test_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"{tmp_path}/file is not a folder"):
        open_swap_files([tmp_path / "file"], 1, name="x")
    (tmp_path / "file").unlink()


@pytest.mark.parametrize("also_named", [False, True])
def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, also_named: bool) -> None:
    """The error is injected, since root may write everywhere."""
    refuse(monkeypatch, "open", errno.EOPNOTSUPP if also_named else errno.EACCES, is_tmpfile)
    refuse(monkeypatch, "mkdir", errno.EROFS, lambda *_: True)
    reason = "Read-only file system" if also_named else "Permission denied"
    with pytest.raises(StorageError, match=f"cannot create a file in {tmp_path}: {reason}; make the folder writable"):
        open_swap_files([tmp_path], 1, name="x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_not_writable_for_real(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="make the folder writable"):
            open_swap_files([tmp_path], 1, name="x")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        open_swap_files([tmp_path], nbytes, name="x")


def test_too_little_space_is_seen_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "open_anonymous", lambda *_: pytest.fail("something was created"))
    with pytest.raises(
        OutOfSpaceError, match=f"too little space in {tmp_path}: .* are missing; free .* GB there"
    ) as caught:
        open_swap_files([tmp_path], 10**15, name="x")
    assert caught.value.needed == 10**15
    assert 0 < caught.value.available < 10**15


def test_said_in_gigabytes(tmp_path: Path) -> None:
    for missing, said in ((2_500_000_001, "2.6 GB"), (1_500_000, "1.5 MB"), (1, "0.1 MB")):
        with pytest.raises(OutOfSpaceError, match=f"free {said} there"):
            space.require(tmp_path, missing + 5, 5)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_space_taken_since_it_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    refuse(monkeypatch, "posix_fallocate", error, lambda *_: True)
    with pytest.raises(OutOfSpaceError, match="missing"):
        open_swap_files([tmp_path], 5 * MB, name="x")


def test_no_space_for_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "pwrite", errno.ENOSPC, lambda *_: True)
    with pytest.raises(OutOfSpaceError, match="missing"):
        open_swap_files([tmp_path], 5 * MB, name="x")


def test_file_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "posix_fallocate", errno.EFBIG, lambda *_: True)
    with pytest.raises(StorageError, match=f"cannot reserve 5,001,216 bytes in {tmp_path}: File too large.*ulimit -f"):
        open_swap_files([tmp_path], 5 * MB, name="x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_small_disk(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], check=False, capture_output=True
    )
    try:
        if mounted.returncode != 0:
            pytest.skip(f"this machine cannot mount a small file system: {mounted.stderr.decode().strip()}")
        with pytest.raises(OutOfSpaceError, match=r"free 1\.1 MB there"):
            open_swap_files([mount], 5_242_880, name="x")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # older kernels have no direct I/O on tmpfs
            with open_swap_files([mount], 4_194_304, name="x"):
                assert free_bytes(mount) == 0
                with pytest.raises(OutOfSpaceError, match="0 are available"):
                    open_swap_files([mount], 1, name="y")
        assert free_bytes(mount) == 4_194_304
    finally:
        subprocess.run(["umount", mount], check=False, capture_output=True)
        mount.rmdir()
