"""Output of `infinity plan`: the table of bytes, the step, its bytes on the drive, and the advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psutil
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from infinity.cli.console import printable
from infinity.config import Config
from infinity.observe.timeline import LANES
from infinity.sim.advice import name_of_wait
from infinity.sim.machine import Machine
from infinity.sim.needs import FREED, KINDS, memory_name
from infinity.sim.planner import Prediction
from infinity.sim.simulate import Simulation
from infinity.sizes import counted, show_bytes, show_count
from infinity.tier_kind import TierKind

_PROCESS = 10**9
"""Bytes that a process may take beside its engine, with torch imported."""


def shown(found: Prediction, machine: Machine, notes: Sequence[str] = ()) -> Iterator[str | RenderableType]:
    """Yield the head, the table of bytes, `notes`, the step and the advice."""
    needs, seen = found.needs, found.simulation
    nodes = counted(machine.nodes, "node")
    computes = f"{counted(machine.gpus, 'GPU')} each" if machine.gpus else "the host computes"
    samples = counted(found.sequences, "sequence" if found.tokens > 1 else "sample")
    length = f" of {found.tokens:,} tokens" if found.tokens > 1 else ""
    work = f"{show_count(found.parameters)} parameters, {samples}{length} a step"
    yield Text(printable(f"{found.model}, {work}; {nodes}, {computes}"), style="bold")
    yield _verdict(found)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
    table.add_column("bytes of a node")
    for tier in TierKind:
        table.add_column(tier, justify="right", no_wrap=True)
    for kind in KINDS:
        table.add_row(kind, *(_cell(needs.tiers[tier][kind]) for tier in TierKind))
    table.add_row("peak", *(_cell(needs.peak[tier]) for tier in TierKind), style="bold")
    table.add_row("available", *(_cell(needs.available[tier]) for tier in TierKind))
    yield table
    yield from notes
    if seen is not None and not machine.gpus and needs.spare(TierKind.HOST) < FREED * needs.peak[TierKind.HOST]:
        spare = needs.spare(TierKind.HOST)
        left = f"{show_bytes(spare)} of host memory are left, and predicted" if spare >= 0 else "predicted"
        yield (
            f"{left} peaks were up to 22 % too low: leave more, or set MALLOC_MMAP_THRESHOLD_=1048576 in the "
            "environment, which returns blocks that glibc keeps after they are freed"
        )
    for tier in TierKind:
        if passing := needs.passing[tier]:
            yield (
                f"{tier}: {show_bytes(passing)} of it are for gradients of the first three steps. Later steps store "
                "only those of units that run in a new order or are updated in the next forward "
                "(infinity.forward_updates)"
            )
    if found.plan.drafted:
        yield (
            f"{found.plan.drafted_share:.0%} of the parameters are updated during backward (infinity.speculate). The "
            "step is one whose gradients clipping leaves as they are; otherwise these updates are repeated. The table "
            "counts the second slots of their states"
        )
    if seen is not None:
        how = ", measured here" if found.is_measured else ""
        yield f"step: {seen.seconds:.3g} s, of which the model computes {seen.compute_seconds:.3g} s{how}"
        for lane in LANES:
            if (seconds := seen.exposed.get(lane, 0.0)) >= 0.0005 * seen.seconds:
                yield f"  waits for {name_of_wait(lane, found.plan.ranks.size)}: {seconds:.3g} s"
        yield from _moved(found, seen)
    else:
        yield (
            "step time and the memory of the processes themselves are not known: measure the machine with infinity "
            "bench-links, and pass --bandwidths"
        )
    for line in found.advice:
        yield f"advice: {line}"


def striping(config: Config) -> Iterator[str]:
    """Yield that shares of several folders are measured by a run, and not here."""
    folders = len(config.zero_optimization.durable_paths)
    if folders > 1 and config.aio.shares == "auto":
        yield (
            f"nvme is {folders} folders: a run measures their speeds and gives each its share (aio.shares); nothing is "
            "measured here, where they count as one drive"
        )


def _verdict(found: Prediction) -> Text:
    """Return whether the model fits. Without bandwidths, the processes' own memory is not in the table."""
    needs = found.needs
    if needs.limits:
        small = " and ".join(map(memory_name, needs.limits))
        return Text(f"It does not fit: {small} {'is' if len(needs.limits) == 1 else 'are'} too small.", style="red")
    spare = needs.spare(TierKind.HOST)
    if found.simulation is not None or spare >= _PROCESS * found.ranks_per_node:
        return Text("It fits.", style="green")
    own = psutil.Process().memory_info().rss
    fits, style = ("fits", "green") if own * found.ranks_per_node < spare else ("may not fit", "red")
    return Text(
        f"It {fits}: {show_bytes(spare)} of host memory are left for the processes themselves, and this one, which has "
        f"imported torch, takes {show_bytes(own)}.",
        style=style,
    )


def _moved(found: Prediction, seen: Simulation) -> Iterator[str]:
    """Yield the bytes of a step to and from the drive and for activations, and the wear of the drive."""
    wear, ranks = found.wear, found.ranks_per_node
    lines = [
        f"{what}: {show_bytes(read * ranks)} read, {show_bytes(written * ranks)} written a step"
        for what, read, written in (
            ("nvme", seen.nvme_bytes_read, seen.nvme_bytes_written),
            ("activations", seen.activation_bytes_read, seen.activation_bytes_written),
        )
        if read or written
    ]
    if wear is not None:
        lines[0] += f"; {show_bytes(wear.a_day)} written a day"
        lines.insert(1, f"  {wear}")
    if seen.commit_bytes_written:
        commits = show_bytes(seen.commit_bytes_written * ranks)
        lines.append(f"{commits} of these are commits of states in memory, whose time is not simulated")
    yield from lines


def _cell(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "–"
