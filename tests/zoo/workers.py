"""Processes that judge architectures: one each, so that a crash or a hang is a verdict too."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import resource
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait

import torch
import transformers

from zoo.judge import Verdict, judge
from zoo.kinds import Architecture

SECONDS = 180
"""Time limit of an architecture."""
_COMMON = "llama", "bert", "vit", "t5", "whisper"
MEMORY = 12 << 30
"""Address space of a process, in bytes."""


def quiet() -> None:
    """Use one thread, so that sums have one order, turn logging off, and import what all processes need."""
    for name in ("torch._dynamo", *(f"transformers.models.{name}.modeling_{name}" for name in _COMMON)):
        importlib.import_module(name)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("infinity").addHandler(logging.NullHandler())
    logging.disable(logging.CRITICAL)


def _work(connection: Connection, architecture: Architecture) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    quiet()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        os.dup2(nowhere.fileno(), 2)
        try:
            verdict = judge(architecture)
        except BaseException as error:  # noqa: BLE001 - any: a fault of these tests is a verdict
            verdict = Verdict("failed", reason=f"{type(error).__name__}: {error}"[:300])
        connection.send(verdict)
    os._exit(0)


class _Worker:
    def __init__(self, architecture: Architecture) -> None:
        context = multiprocessing.get_context("fork")
        self.architecture = architecture
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(theirs, architecture))
        self.process.start()
        theirs.close()
        self.since = time.monotonic()

    def verdict(self) -> Verdict | None:
        """Return the verdict, or None while there is none."""
        if self.connection.poll():
            try:
                return self.connection.recv()  # type: ignore[no-any-return]
            except EOFError:
                self.process.join()
                return Verdict("failed", reason=f"the process ended with status {self.process.exitcode}")
        if time.monotonic() - self.since > SECONDS:
            return Verdict("failed", reason=f"no result after {SECONDS} s")
        return None

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def judge_all(architectures: Sequence[Architecture], jobs: int) -> Iterator[tuple[Architecture, Verdict]]:
    """Yield verdicts as they come."""
    pending, workers = deque(architectures), list[_Worker]()
    while pending or workers:
        while pending and len(workers) < jobs:
            workers.append(_Worker(pending.popleft()))
        wait([worker.connection for worker in workers], timeout=1.0)
        for worker in list(workers):
            verdict = worker.verdict()
            if verdict is not None:
                worker.end()
                workers.remove(worker)
                yield worker.architecture, verdict
