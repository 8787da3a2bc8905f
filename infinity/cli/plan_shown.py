"""Output of `infinity plan`: the table of bytes, the step, its bytes on the drive, and the advice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from infinity.cli.console import printable
from infinity.config import Config
from infinity.engine.describe import plain_loop
from infinity.observe.timeline import LANES
from infinity.sim.advice import name_of_wait
from infinity.sim.machine import Machine
from infinity.sim.needs import KINDS, memory_name
from infinity.sim.planner import Prediction
from infinity.sim.simulate import Simulation
from infinity.sizes import counted, show_bytes, show_count
from infinity.tier_kind import TierKind


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
    optional = "second slots"
    for kind in (kind for kind in KINDS if kind != optional or any(needs.tiers[tier][optional] for tier in TierKind)):
        table.add_row(kind, *(_cell(needs.tiers[tier][kind]) for tier in TierKind))
    table.add_row("peak", *(_cell(needs.peak[tier]) for tier in TierKind), style="bold")
    table.add_row("available", *(_cell(needs.available[tier]) for tier in TierKind))
    yield table
    beside = needs.tiers[TierKind.HOST]["activations"] + needs.tiers[TierKind.HOST]["processes"]
    yield from plain_loop(found.plan, beside if found.ranks_per_node == 1 and not machine.gpus else None)
    yield from notes
    if needs.returns_freed:
        yield (
            f"{show_bytes(needs.spare(TierKind.HOST))} of host memory are left. With so few, the engine returns freed "
            "blocks to the system at once, and steps take longer (18 % for a GPT-2 of 98 M parameters)"
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
            f"second slots: {found.plan.drafted_share:.0%} of the parameters are updated before the gradient norm is "
            "known, in copies of their states, and again if gradients are clipped. infinity.speculate false saves the "
            "copies, and steps take longer"
        )
    if seen is not None:
        how = ", measured here" if found.is_measured else ""
        yield f"step: {seen.seconds:.3g} s, of which the model computes {seen.compute_seconds:.3g} s{how}"
        for lane in LANES:
            if (seconds := seen.exposed.get(lane, 0.0)) >= 0.0005 * seen.seconds:
                yield f"  waits for {name_of_wait(lane, found.plan.ranks.size)}: {seconds:.3g} s"
        yield from _moved(found, seen)
    else:
        nbytes = show_bytes(needs.tiers[TierKind.HOST]["processes"])
        process = f"{nbytes} are assumed for Python and torch, and more for other libraries"
        if found.measured_with:
            process = f"{nbytes} were measured here, with {found.measured_with}"
        if found.of_files and needs.spare(TierKind.HOST) < needs.reserve:
            pages = show_bytes(found.of_files)
            process += (
                f". {pages} of that are pages of library files, which a container may not count: it counts those that "
                "no other process has read before"
            )
        yield f"processes: {process}"
        yield "step: not predicted without --bandwidths, which infinity bench-links measures"
    for line in found.advice:
        yield f"advice: {line}"
    if "transformers" in found.measured_with and any("infinity.Init" in line for line in found.advice):
        yield (
            "With a Trainer, from_pretrained constructs it so if TrainingArguments(deepspeed=…) comes before it. "
            "A model that is built by its class needs infinity.Init"
        )
    if found.changed:
        named = "this advice in the config" if found.suffices else "config of the least run"
        yield f"{named}, as JSON without the changes of the script: {json.dumps(found.changed)}"
    if found.changed_peak and found.suffices and len(needs.limits) < 2:
        yield f"with all changes of this advice, the peak is {show_bytes(found.changed_peak)}"


def striping(config: Config) -> Iterator[str]:
    """Yield that shares of several folders are measured by a run, and not here."""
    folders = len(config.zero_optimization.durable_paths)
    if folders > 1 and config.aio.shares == "auto":
        yield (
            f"nvme is {folders} folders: a run measures their speeds and gives each its share (aio.shares); nothing is "
            "measured here, where they count as one drive"
        )


def _verdict(found: Prediction) -> Text:
    """Return whether the model fits, and on a CPU the reserve beside it."""
    needs = found.needs
    if needs.limits:
        small = " and ".join(map(memory_name, needs.limits))
        return Text(f"It does not fit: {small} {'is' if len(needs.limits) == 1 else 'are'} too small.", style="red")
    if needs.is_tight:
        left, more = show_bytes(needs.spare(TierKind.HOST)), show_bytes(needs.reserve)
        return Text(f"It may not fit: {left} of host memory are left, and runs may take {more} more.", style="red")
    if found.constructed:
        return Text(f"It fits if the model is constructed {found.constructed}.", style="green")
    return Text("It fits.", style="green")


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
