"""Command that runs seeds of the fuzz in separate processes and counts verdicts.

.venv/bin/python tests/fuzz/run.py --seeds 0:2000 --jobs 2
.venv/bin/python tests/fuzz/run.py --show 17
.venv/bin/python tests/fuzz/run.py --minimise 17
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from fuzz.case import Case, Node, case_of, in_words
from fuzz.judge import FAILURES, Verdict, judge
from fuzz.minimise import minimise

SECONDS = 240
"""Time limit of a seed; a longer one counts as hanging."""


def quiet() -> None:
    """Use one thread, so that sums have one order, and turn logging off."""
    torch.set_num_threads(1)
    logging.getLogger("infinity").addHandler(logging.NullHandler())
    logging.getLogger("infinity").setLevel(logging.CRITICAL)
    logging.getLogger("infinity").propagate = False
    importlib.import_module("torch._dynamo")  # as the first checkpoint would
    gc.collect()
    gc.freeze()  # what is imported is not looked through after every case


def _work(connection: Connection, seeds: list[int], trace: str) -> None:
    quiet()
    with open(trace, "w") as file, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        for seed in seeds:
            faulthandler.dump_traceback_later(SECONDS - 5, file=file)
            connection.send((seed, None))
            verdict = judge(case_of(seed))
            faulthandler.cancel_dump_traceback_later()
            connection.send((seed, verdict))
            if verdict.failed:
                break  # a failed case may leave state behind that affects the next one
    os._exit(0)


class Worker:
    """A process that judges seeds, one after the other, until one fails."""

    def __init__(self, seeds: collections.deque[int], folder: str) -> None:
        self.trace = str(Path(folder, f"{time.monotonic_ns()}"))
        Path(self.trace).touch()
        given = [seeds.popleft() for _ in range(min(25, len(seeds)))]
        self.left = collections.deque(given)
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(theirs, given, self.trace))
        self.process.start()
        theirs.close()
        self.since = time.monotonic()

    def end(self, seeds: collections.deque[int]) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()
        seeds.extendleft(reversed(self.left))


def judge_all(numbers: list[int], jobs: int) -> Iterator[tuple[int, Verdict]]:
    """Yield (seed, verdict) as they finish. A process that hangs or dies gives a verdict too."""
    seeds = collections.deque(numbers)
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        while seeds or workers:
            while seeds and len(workers) < jobs:
                workers.append(Worker(seeds, folder))
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                verdict: Verdict | None = None
                ended = False
                if worker.connection in ready:
                    try:
                        _, verdict = worker.connection.recv()
                        worker.since = time.monotonic()
                    except EOFError:
                        ended = True
                        worker.process.join()
                        if worker.process.exitcode:
                            verdict = Verdict("crash", f"exit status {worker.process.exitcode}")
                elif time.monotonic() - worker.since > SECONDS:
                    verdict, ended = Verdict("hang", Path(worker.trace).read_text()[-3000:]), True
                if verdict is not None and worker.left:
                    yield worker.left.popleft(), verdict
                if ended:
                    worker.end(seeds)
                    workers.remove(worker)


def kinds_of(case: Case) -> Iterator[str]:
    """Yield the names of everything drawn for a case, for counting."""

    def walk(node: Node) -> Iterator[str]:
        yield f"part {node.kind}/{node.variant}"
        for child in node.children:
            yield from walk(child)

    for node in case.nodes:
        yield from walk(node)
    for event in case.loop.events:
        yield f"event {event.kind}/{event.place}"
    for name in (
        "call",
        "backward",
        "penalty",
        "kept",
        "optimizer",
        "schedule",
        "thread",
        "accumulation",
        "autocast",
        "dtype",
        "unsynced",
    ):
        yield f"loop {name}/{getattr(case.loop, name)}"
    for setting in case.settings:
        for each in fields(setting):
            yield f"setting {each.name}/{getattr(setting, each.name)}"


def show(seed: int, verdict: Verdict) -> str:
    return f"seed {seed}: {verdict.kind}: {verdict.text}\n{in_words(case_of(seed))}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, metavar="SEED", help="print a seed's case and verdict")
    parser.add_argument("--minimise", type=int, metavar="SEED", help="print the smallest case that fails as this seed")
    parser.add_argument("--coverage", action="store_true", help="print how often each kind was drawn")
    parser.add_argument("--brief", action="store_true", help="one line for each failure")
    asked = parser.parse_args()
    quiet()
    if asked.show is not None:
        verdict = next(judge_all([asked.show], 1))[1]
        print(show(asked.show, verdict))
        return int(verdict.failed)
    if asked.minimise is not None:
        case, verdict = minimise(case_of(asked.minimise))
        print(f"{verdict.kind}: {verdict.text}\n{in_words(case)}")
        return int(verdict.failed)
    first, end = (int(part) for part in asked.seeds.split(":"))
    counts: collections.Counter[str] = collections.Counter()
    texts: collections.Counter[str] = collections.Counter()
    drawn: collections.Counter[str] = collections.Counter()
    quarantines, began = 0, time.monotonic()
    for done, (seed, verdict) in enumerate(judge_all(list(range(first, end)), asked.jobs), 1):
        counts[verdict.kind] += 1
        quarantines += verdict.quarantines
        drawn.update(set(kinds_of(case_of(seed))))
        if verdict.kind in ("refused", "void"):
            texts[f"{verdict.kind}: {verdict.text}"] += 1
        if verdict.failed:
            print(
                f"seed {seed}: {verdict.kind}: {verdict.text[: 3000 if verdict.kind == 'hang' else 300]!r}"
                if asked.brief
                else show(seed, verdict),
                flush=True,
            )
        if done % 100 == 0:
            print(f"{done} seeds in {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
    for text, count in texts.most_common():
        print(f"{count:5} {text}")
    if asked.coverage:
        for text, count in sorted(drawn.items()):
            print(f"{count:5} {text}")
    print(
        f"{sum(counts.values())} seeds in {time.monotonic() - began:.0f} s: {dict(counts)}; {quarantines} quarantines"
    )
    return int(any(counts[kind] for kind in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
