"""Moves a model's values into their tiers, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from infinity.comm.communicator import Communicator
from infinity.comm.dtensor import is_distributed, local
from infinity.construction.init_context import check_kept
from infinity.construction.materialize import Materializer, empty_states, put, read_shard, source_of
from infinity.errors import RanksError
from infinity.model.remote import is_remote, plain
from infinity.plan.layout import UnitLayout
from infinity.tiers.freed import return_freed_memory
from infinity.units.binding import unbind
from infinity.units.discover import UnitParameters
from infinity.units.states import Flats, UnitStates
from infinity.units.stored import follow_device
from infinity.units.unit import Unit


def stream_in(
    model: nn.Module,
    found: Sequence[UnitParameters],
    layouts: Sequence[UnitLayout],
    states: UnitStates,
    ranks: Communicator,
    device: torch.device,
) -> list[Unit]:
    """Write the values of `model` to their tiers and return its units, released. Peak memory: two units.

    found: in the order of the slots. A parameter with a source is read from it. Of the others, each rank makes its
    shards from rank 0's seed, or takes rank 0's values. Raises RanksError if ranks differ in the parameters with a
    source.
    """
    _check_sources(found, ranks)
    units = []
    with (
        ThreadPoolExecutor(torch.get_num_threads(), "infinity-draws") as pool,
        ThreadPoolExecutor(1, "infinity-construction", initializer=states.device.enter_thread) as thread,
        _writing(states, thread) as write,
    ):
        values = Materializer(model, {unit.root for unit in found}, pool)
        apart = _share_seed(values, ranks)
        for members, layout in zip(found, layouts, strict=True):
            sources = [source_of(parameter) for parameter in members.parameters]
            makes_shard = apart and all(s or p.is_meta for s, p in zip(sources, members.parameters, strict=True))
            flats = empty_states(layout)
            (flat,) = flats.values()
            low, high = layout.shard_range(ranks.shard_rank) if makes_shard else (0, layout.numel)
            room = [
                flat[slot.offset : slot.stop].view(slot.shape)
                if source is None and slot.offset < high and slot.stop > low
                else None
                for slot, source in zip(layout.slots, sources, strict=True)
            ]
            parameters = values.materialize(members.root, members.parameters, room)
            for parameter, place in zip(parameters, room, strict=True):
                if place is not None and not is_remote(parameter):
                    put(local(parameter).data, place)
            if None in sources and not makes_shard:
                ranks.broadcast(flat.view(torch.uint8))  # as bytes: not every backend supports every dtype
            read_shard(layout, flat, sources, ranks.shard_rank)
            write(layout, flats)
            for parameter in parameters:
                plain(parameter)
            units.append(Unit(layout, list(parameters), device, members.wrappers))
            unbind(units[-1])
            del flats, flat, room, place
            return_freed_memory()
    check_kept(model)
    follow_device(chain(*(unit.wrappers for unit in units)))
    return units


def _share_seed(values: Materializer, ranks: Communicator) -> bool:
    """Return whether each rank may make only the parameters of its own shards. With shards, all take rank 0's seed.

    Otherwise every rank makes every parameter and rank 0's are broadcast: if states are replicated, or if the values of
    a rule may differ between ranks.
    """
    if ranks.shards == 1:
        return False
    said = ranks.gather((values.seed, values.fingerprint()))
    values.seed = said[0][0]
    return bool(said[0][1]) and len({fingerprint for _, fingerprint in said}) == 1


@contextmanager
def _writing(states: UnitStates, thread: Executor) -> Iterator[Callable[[UnitLayout, Flats], None]]:
    """Yield a function that writes a unit's states on `thread`, while the next unit is made. They must not change from
    then on. One at a time, which bounds memory.

    Raises the error of a write at the next one, or at the end of the block. No write is under way after the block.
    """
    last: Future[None] | None = None

    def write(layout: UnitLayout, flats: Flats) -> None:
        nonlocal last
        if last is not None:
            last.result()
        last = thread.submit(states.write, layout, flats)

    try:
        yield write
    finally:
        if last is not None:
            last.exception()  # waits, since the tiers are closed next
    if last is not None:
        last.result()


def _check_sources(found: Sequence[UnitParameters], ranks: Communicator) -> None:
    """Raise RanksError if ranks read different numbers of parameters from files."""
    count = float(sum(source_of(p) is not None for unit in found for p in unit.parameters))
    total, squares = ranks.sums(count, count**2)
    if total**2 != ranks.size * squares:
        raise RanksError("ranks load different pretrained parameters: call load_pretrained alike on every rank")


def share_buffers(model: nn.Module, ranks: Communicator) -> None:
    """Broadcast rank 0's buffers, as its parameters. From then on each rank keeps its own."""
    if ranks.is_single:
        return
    for buffer in model.buffers():
        if not is_distributed(buffer) and buffer.numel():
            whole = buffer.detach().contiguous().cpu().clone()
            ranks.broadcast(whole.view(-1).view(torch.uint8))
            if ranks.rank and not torch.equal(whole, buffer.cpu()):
                with torch.no_grad():
                    buffer.copy_(whole)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers of `model` to `device`."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
