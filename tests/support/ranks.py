"""A group of processes for many tests: starting one takes seconds, a case in it milliseconds."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

Case = Callable[..., Any]

_PRELOADED = ["torch.distributed.tensor.parallel", "infinity.engine.initialize", "infinity.engine.training"]
"""Modules that the server of processes imports once. Ranks are forked from it, and import tests only."""


class RankFailed(AssertionError):
    """A case raised in a rank; the text is that rank's traceback."""


class Group:
    """`size` processes joined by gloo, which run cases: module-level functions that take the rank first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(self, case: Case, /, timeout: float = 120, dies: int | None = None, **options: Any) -> list[Any]:
        """The results of `case(rank, **options)` by rank.

        RankFailed if one raised or took longer than `timeout` seconds, with the stacks of the ranks that hang; the
        group starts anew after that, since its ranks may wait for each other. dies: a rank whose process ends or stops
        in the case, for which the result is None; the group starts anew after that too.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, options))
        answers: list[Any] = []
        hanging: list[int] = []
        failed = ""
        for rank, pipe in enumerate(self._pipes):
            if rank == dies:
                answers.append(None)
                continue
            try:
                done, answer = (
                    pipe.recv() if pipe.poll(timeout if not failed else 2) else (False, "no answer: it hangs")
                )
            except EOFError:
                done, answer = False, "the process ended"
            failed += "" if done else f"\nrank {rank}: {answer}"
            hanging += [] if done or "hangs" not in answer else [rank]
            # Its own memory: what arrives is shared, and takes a file descriptor for each tensor as long as it lives.
            answers.append(tree_map_only(torch.Tensor, torch.clone, answer))
        if failed:
            failed += "".join(f"\nstacks of rank {rank}:\n{self._stacks(rank)}" for rank in hanging)
            self.stop()
            raise RankFailed(failed)
        if dies is not None:
            self.stop()
        return answers

    def _stacks(self, rank: int) -> str:
        """Where the threads of a rank are."""
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR2)
        time.sleep(1)  # a handler in C writes them, which needs no turn of the interpreter
        return Path(_stacks_file(self._folder, rank)).read_text()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.mkdtemp()
        meeting = os.path.join(self._folder, "meeting")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):  # not in the time of a case: other work may slow it down
            if not pipe.poll(180):
                self.stop()
                raise RankFailed(f"rank {rank} did not start")
            pipe.recv()

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def _stacks_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stacks of {rank}")


def _serve(rank: int, size: int, meeting: str, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stacks = open(_stacks_file(os.path.dirname(meeting), rank), "w")  # noqa: SIM115 - as long as the process lives
    faulthandler.register(signal.SIGUSR2, file=stacks)
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # as in conftest.py: initialize looks through all objects that are collected
    # As in pyproject.toml: a buffer that is referred to after its release is an error in tests.
    warnings.filterwarnings("error", "something still refers to the parameters of unit", UserWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    pipe.send("ready")
    while True:
        try:
            case, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, case(rank, **options))
        except BaseException:  # noqa: BLE001 - told to the test
            answer = (False, traceback.format_exc())
        pipe.send(answer)
