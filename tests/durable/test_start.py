"""The start of a durable run on several ranks, and the generations that a commit replaces."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.durable import run as module
from infinity.durable.choose import Source
from infinity.durable.folder import Lock, generation_folder, remove_generation
from infinity.durable.manifest import Manifest
from infinity.durable.run import DurableRun, open_run


class Meeting:
    """An exchange between two ranks, which are threads of this process."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.gathered: list[Any] = [None, None]
        self.writing = threading.Event()
        """Set once rank 0 has made the folder, and writes its manifest."""
        self.moved_on = threading.Event()
        """Set once rank 1 waits for rank 0, or does not."""


class Rank:
    """The part of a `Communicator` that `open_run` uses."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self.model = rank, 2, SimpleNamespace(number=0, size=1)
        self._meeting = meeting

    def gather(self, mine: Any) -> list[Any]:
        self._meeting.gathered[self.rank] = mine
        self._meeting.barrier.wait()
        return self._meeting.gathered

    def barrier(self) -> None:
        if self.rank == 1:
            self._meeting.moved_on.set()
        self._meeting.barrier.wait()


def test_a_rank_that_fails_at_once_leaves_the_folder_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes the folder if it is empty, so it waits until all ranks have their manifests in it."""
    meeting = Meeting()

    def write(path: Path, manifest: Any) -> None:
        if path.name.startswith("rank-00000"):
            meeting.writing.set()
            assert meeting.moved_on.wait(20)
        path.write_text("{}")

    monkeypatch.setattr(module, "_write_manifest", write)
    monkeypatch.setattr(module, "manifest_of", lambda *_: Manifest({"ranks": 2}, (), ""))
    plan: Any = SimpleNamespace(io=SimpleNamespace(folders=[tmp_path], durable=SimpleNamespace(run="run")))

    def start(rank: int) -> DurableRun:
        ranks: Any = Rank(meeting, rank)
        opened = open_run(plan, ranks, ranks)
        if rank == 1:
            assert meeting.writing.wait(20)
            opened.close()
            meeting.moved_on.set()
        return opened

    with ThreadPoolExecutor(2) as threads:
        first, _ = [each.result(60) for each in [threads.submit(start, rank) for rank in range(2)]]
    assert [path.name for path in generation_folder(tmp_path / "run", 1).iterdir()] == ["rank-00000.json"]
    first.close()


def test_ranks_remove_a_generation_at_once(tmp_path: Path) -> None:
    """The folder may go while another rank lists it."""
    folder, barrier = generation_folder(tmp_path, 1), threading.Barrier(2, timeout=20)

    def remove() -> None:
        barrier.wait()
        remove_generation([tmp_path], 1)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(1000):  # without the handling of that case, about 15 of them failed
            folder.mkdir()
            for rank in range(2):
                (folder / f"rank-{rank:05d}.json").touch()
                (folder / f"rank-{rank:05d}.states").touch()
            for each in [threads.submit(remove) for _ in range(2)]:
                each.result(20)
            assert not folder.exists()


@pytest.mark.parametrize("generation", [1, 2])
def test_a_commit_replaces_the_generation_that_was_loaded(
    generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own generation stays."""
    monkeypatch.setattr(module, "invalidate", lambda *_, **__: None)
    folder = generation_folder(tmp_path, 1)
    folder.mkdir()
    (folder / "rank-00000.json").touch()
    record: Any = SimpleNamespace(number=1)
    manifest = Manifest({"ranks": 1}, (), "")
    run = DurableRun([tmp_path], 0, generation, Source(1, 5, 1), record, Lock(tmp_path, 0), manifest, "job")
    run.conclude()
    assert folder.exists() == (generation == 1)
    run.close()
