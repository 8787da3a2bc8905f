"""Collectives that follow earlier ones, and ranks that depart from them. They run in a `support.ranks.Group`."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from infinity.comm.agreement.announcements import Announcement, Operation
from infinity.comm.agreement.announcer import Announcer
from infinity.comm.communicator import Communicator
from infinity.comm.connections import disconnect
from infinity.comm.groups import destroy_group, duplicate_group
from infinity.comm.liveness.heartbeat import Heartbeat
from infinity.errors import RanksError
from infinity.plan.layout import Member, UnitLayout, layout_unit
from infinity.tiers.device import CpuDevice
from infinity.tiers.transfer import DONE
from multirank.cases import SAMPLES
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches

UNITS = ("one", "two", "six")


def layouts_of(ranks: int) -> list[UnitLayout]:
    return [
        layout_unit(number, name, [Member("a", (64, 8), 0), Member("b", (64, 8), 0)], torch.float32, True, ranks)
        for number, name in enumerate(UNITS)
    ]


class Round:
    """Issues the same collectives over and over, on units of two parameters."""

    def __init__(self, rank: int, ranks: Communicator) -> None:
        self.rank, self.ranks = rank, ranks
        self.layouts = layouts_of(ranks.size)
        ranks.set_layouts(self.layouts)
        self.present = {0}

    def gather(self, unit: int) -> list[float]:
        flat = torch.full((self.layouts[unit].numel,), -1.0)
        self.ranks.shard(flat).fill_(10.0 * unit + self.rank)
        self.ranks.all_gather(flat, DONE, unit).wait()
        return flat.unique().tolist()

    def reduce(self, unit: int) -> tuple[list[float], list[int]]:
        flat = torch.full((self.layouts[unit].numel,), 10.0 * unit + self.rank)
        present = set(self.present)
        self.ranks.reduce(flat, self.layouts[unit], present).wait()
        return self.ranks.shard(flat).unique().tolist(), sorted(present)

    def sum(self, count: int = 1) -> tuple[float, ...]:
        return self.ranks.sums(*[float(self.rank + 1)] * count)

    def works(self) -> list[Callable[[], Any]]:
        """The collectives of a round, with results that are known."""
        return [
            lambda: self.gather(0),
            lambda: self.gather(1),
            lambda: self.gather(0),
            lambda: self.reduce(1),
            lambda: self.reduce(0),
            self.sum,
            self.ranks.barrier,
        ]

    def run(self) -> None:
        size = self.ranks.size
        union = sorted(set().union(*self.ranks.gather(self.present))) if self.present != {0} else None
        for number, work in enumerate(self.works()):
            found = work()
            if number < 3:
                unit = (0, 1, 0)[number]
                assert found == [10.0 * unit + rank for rank in range(size)]
            elif number < 5:
                summed, present = found
                assert summed == [sum(10.0 * (4 - number) + rank for rank in range(size))]
                assert union is None or present == union
        assert work is not None


def departing(rank: int, *, number: int, ways: dict[int, str], late: float = 0.0, failing: str = "") -> dict[str, Any]:
    """Rank r departs by `ways[r]` before collective `number` of a round that all ranks followed before.

    late: seconds that departing ranks wait before. Returns this rank's error, and the seconds until it was raised.
    """
    ranks = Communicator(CpuDevice())
    try:
        rounds = Round(rank, ranks)
        for _ in range(3):
            rounds.run()
        exchanges = ranks.exchanges
        rounds.run()
        assert ranks.exchanges == exchanges
        works = rounds.works()
        ranks.barrier()
        began = time.perf_counter()
        try:
            for work in works[:number]:
                work()
            if rank in ways:
                time.sleep(late)
                began = time.perf_counter()
                other: dict[str, Callable[[], Any]] = {
                    "unit": lambda: rounds.gather(2),
                    "kind": lambda: rounds.reduce(2),
                    "sums": lambda: rounds.sum(2),
                    "barrier": ranks.barrier,
                    "broadcast": lambda: ranks.broadcast(torch.zeros(4)),
                    "missing": works[(number + 1) % len(works)],
                    "raises": lambda: _give_up(ranks, rank),
                }
                other[ways[rank]]()
            for work in works[number:]:
                work()
        except RanksError as error:
            seconds = time.perf_counter() - began
            try:
                rounds.sum()
            except RanksError as again:
                assert str(again) == str(error)
            return {"raised": str(error), "seconds": seconds}
        return {"raised": "", "seconds": 0.0}
    finally:
        ranks.close()


def _give_up(ranks: Communicator, rank: int) -> None:
    ranks._met = True
    ranks.give_up(ValueError(f"of rank {rank}"))
    raise RanksError(ranks.error)


def sets(rank: int, *, own: list[list[list[int]]]) -> list[int]:
    """Reduce with the slots `own[round][rank]`; return the exchanges of each round. Results are checked."""
    ranks = Communicator(CpuDevice())
    try:
        rounds = Round(rank, ranks)
        exchanges = []
        for present in own:
            rounds.present = set(present[rank])
            before = ranks.exchanges
            for unit in (1, 0, 1):
                summed, union = rounds.reduce(unit)
                assert summed == [sum(10.0 * unit + other for other in range(ranks.size))]
                assert union == sorted(set().union(*present))
            exchanges.append(ranks.exchanges - before)
        return exchanges
    finally:
        ranks.close()


def late(rank: int, *, seconds: float) -> int:
    """Rank 1 is late for collectives that all follow; return the exchanges in that time."""
    ranks = Communicator(CpuDevice())
    try:
        rounds = Round(rank, ranks)
        for _ in range(3):
            rounds.run()
        before = ranks.exchanges
        for _ in range(2):
            if rank == 1:
                time.sleep(seconds)
            rounds.run()
        return ranks.exchanges - before
    finally:
        ranks.close()


def detour(rank: int, *, slow: int) -> list[int]:
    """All ranks issue other collectives between two rounds, one of them late; return the exchanges of each part."""
    ranks = Communicator(CpuDevice())
    try:
        rounds = Round(rank, ranks)
        exchanges = [0]
        for part in ("round", "round", "round", "detour", "round", "round", "detour", "round", "round"):
            if part == "round":
                rounds.run()
            else:
                time.sleep(0.3 * (rank == slow))
                assert [rounds.gather(unit) for unit in (2, 1)] == [
                    [10.0 * u + r for r in range(ranks.size)] for u in (2, 1)
                ]
                ranks.broadcast(torch.zeros(4))
            exchanges.append(ranks.exchanges)
        return [after - before for before, after in itertools.pairwise(exchanges)]
    finally:
        ranks.close()


def wandering(rank: int, *, seed: int, turns: int) -> dict[str, Any]:
    """Issue sequences that are drawn alike on all ranks, with pauses and sets that are not; then one rank departs."""
    shared, private = random.Random(seed), random.Random(100 * seed + rank)
    ranks = Communicator(CpuDevice())
    try:
        rounds = Round(rank, ranks)
        habits = [[shared.randrange(7) for _ in range(shared.randint(2, 8))] for _ in range(3)]
        collectives = 0
        for _ in range(turns):
            for choice in habits[shared.choice((0, 0, 0, 0, 1, 2))]:
                if private.random() < 0.02:
                    time.sleep(private.choice((0.002, 0.03, 0.12)))
                collectives += 1
                unit, size = choice % 3, ranks.size
                if choice < 3:
                    assert rounds.gather(unit) == [10.0 * unit + other for other in range(size)]
                elif choice < 6:
                    sets = [{shared.random() < 0.01} for _ in range(size)]
                    rounds.present = {int(member) for member in sets[rank]}
                    summed, union = rounds.reduce(unit)
                    assert summed == [sum(10.0 * unit + other for other in range(size))]
                    assert union == sorted({int(member) for each in sets for member in each})
                else:
                    assert rounds.sum() == (sum(range(1, size + 1)),)
        exchanges = ranks.exchanges
        last = shared.randrange(ranks.size)
        try:
            for _ in range(9):
                rounds.gather(2 if rank == last else 0)
        except RanksError as error:
            return {"raised": str(error), "exchanges": exchanges, "collectives": collectives}
        return {"raised": ""}
    finally:
        ranks.close()


class Executor:
    """A device that executes barriers after they return, and waits forever for a rank that ended."""

    def __init__(self) -> None:
        self.group = duplicate_group(dist.group.WORLD, "gloo")
        self.executing = ThreadPoolExecutor(1)
        self.aborted = threading.Event()
        self.done: Future[None] | None = None

    def issue(self) -> None:
        self.done = self.executing.submit(dist.barrier, self.group)

    def wait(self) -> None:
        assert self.done is not None
        while not self.aborted.wait(0.001):
            if self.done.done() and self.done.exception() is None:
                return

    def abort(self) -> None:
        self.aborted.set()


def on_device(rank: int, *, how: str) -> dict[str, Any]:
    """Rank 1 departs from collectives of a device, ends or stops. Returns the error and its seconds."""
    words, device = duplicate_group(dist.group.WORLD, "gloo"), Executor()
    heartbeat = Heartbeat(words, rank, dist.get_world_size(), 1.0, disconnect)
    announcer = Announcer(words, rank, dist.get_world_size(), device, heartbeat.cause)
    announcer.units = layouts_of(dist.get_world_size())
    for _ in range(4):
        for unit in (0, 1):
            announcer.run(Announcement(Operation.ALL_GATHER, unit), set(), 0, device.issue)
    began = time.perf_counter()
    try:
        if rank == 1 and how == "ends":
            os._exit(1)
        if rank == 1 and how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        for unit in (2, 1) if rank == 1 else (0, 1):
            announcer.run(Announcement(Operation.ALL_GATHER, unit), set(), 0, device.issue)
    except RanksError as error:
        seconds = time.perf_counter() - began
        heartbeat.close()
        announcer.close()
        destroy_group(device.group)  # wakes the other rank's barrier
        del device.group
        device.executing.shutdown()
        destroy_group(words)
        return {"raised": str(error), "seconds": seconds, "aborted": device.aborted.is_set()}
    return {}


def engine(rank: int, *, folder: str, evaluate: bool, **options: Any) -> list[int]:
    """Train, with an evaluation before every third step; return the exchanges of each step."""
    config = engine_config(folder=folder, micro=SAMPLES, **options)
    with open_engine(seeded(lambda: Stack(depth=3)), config) as trained:
        exchanges = []
        for number, batch in enumerate(token_batches(9, batch=SAMPLES, seed=rank)):
            if evaluate and number % 3 == 2:
                trained.eval()
                with torch.no_grad():
                    trained(*batch)
                trained.train()
            before = exchanges_of(trained.ranks)
            train(trained, [batch] * options.get("accumulation", 1))
            exchanges.append(exchanges_of(trained.ranks) - before)
        return exchanges


def exchanges_of(ranks: Communicator) -> int:
    """Return the exchanges of all collectives issued so far."""
    ranks._thread.submit(lambda: None).result()
    return ranks.exchanges
