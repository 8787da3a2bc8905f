"""`infinity bench-links`: measures the bandwidths that `infinity plan` reads."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from infinity.cli.console import (
    Step,
    check_folders,
    check_output,
    check_range,
    fail,
    file_system,
    note,
    note_memory_folders,
    one_line_errors,
    printable,
    progress,
    say,
    size_of,
    warnings_as_notes,
    write_out,
)
from infinity.cli.drive.bench import granted
from infinity.cli.drive.measure import OPS, SMALLEST_FILE, Bench, Workload
from infinity.cli.links.rates import Calls, Copies, Gathers, Rate, adam, few_rows, matmul, measure, unsteady
from infinity.cli.report import processor
from infinity.comm.groups import join_process_group
from infinity.config import Config
from infinity.errors import InfinityError
from infinity.plan.io import stripe_chunk
from infinity.sim.machine import BANDWIDTHS, DTYPES, Links
from infinity.sizes import format_size, show_bytes, show_flops
from infinity.tiers.accelerator import default_device
from infinity.tiers.device import Device

_TRAINING = """
import contextlib, json, sys
with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
    score.write("1000")  # if a container does not hold both processes, the kernel kills this one
sys.path[:], imports = json.loads(sys.argv[1])
import psutil, torch, infinity
for each in imports:
    with contextlib.suppress(Exception):
        exec(each)
from infinity.sim.gpt2 import GPT2, GPT2Config
model = GPT2(GPT2Config(vocab_size=64, seq_length=16, num_layers=1, hidden_size=64, num_attention_heads=2))
engine, *_ = infinity.initialize(model=model, config={"train_batch_size": 1, "bf16": {"enabled": True}})
tokens = torch.zeros(1, 16, dtype=torch.int64)
for _ in range(2):
    engine.backward(engine(tokens, tokens))
    engine.step()
memory = psutil.Process().memory_info()
print(memory.rss, memory.shared)
engine.close()
"""


class ProcessMemory(NamedTuple):
    """Resident bytes of a process, and those of them that are pages of library files."""

    nbytes: int
    of_files: int


COMPILER = "import torch._dynamo"
"""transformers' Trainer and activation checkpointing import torch's compiler."""
TRAINER = "from transformers import Trainer"


def process_memory(*imports: str) -> ProcessMemory:
    """Return the memory of a new process that has run `imports`, those that succeed, and has trained a transformer of
    one small layer.

    Importing alone leaves out what training loads: the kernels' code, such as that of attention, and the stacks of
    threads. Raises InfinityError if memory is too small for it.
    """
    command = [sys.executable, "-I", "-c", _TRAINING, json.dumps([sys.path, imports])]
    ended = subprocess.run(command, capture_output=True, text=True, env=_of_one_rank())
    if ended.returncode < 0:
        raise InfinityError(
            "a process that trains a small layer was killed: memory is too small for Python and its libraries. Measure "
            "on a machine or in a container with more"
        )
    if ended.returncode:
        reason = (ended.stderr.splitlines() or ["no output"])[-1]
        raise InfinityError(f"a process that imports torch and infinity ended with {ended.returncode}: {reason}")
    nbytes, of_files = ended.stdout.splitlines()[-1].split()
    return ProcessMemory(int(nbytes), int(of_files))


def _of_one_rank() -> dict[str, str]:
    """Return this process's environment without a launcher's variables, with which a process waits for other ranks."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in names}


def machine(device: Device) -> dict[str, Any]:
    """Return the facts, of JSON types. The device is the accelerator's name, or "cpu"."""
    kind = device.torch_device
    name = getattr(torch.get_device_module(kind), "get_device_name", None)
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "device": str(kind if name is None else name(kind)),
    }


_PREPARED, _MEASURED = 0.1, 0.97
"""Positions of the progress bar before the first round and after the last."""
_LONGEST_MATMUL = 1 / 60
"""Part of all seconds that one matmul may take."""


@dataclass(frozen=True)
class Task:
    """A measurement: the command's options, validated. gathers: None on one rank."""

    paths: Sequence[Path]
    size: int
    seconds: float
    device: Device
    gathers: Gathers | None


@dataclass(frozen=True)
class _Kind:
    """A bandwidth, or the FLOP/s of a dtype. rate: None if the hardware is absent. how: for people."""

    name: str
    rate: Rate | None
    how: str


def run(paths: Sequence[Path], out: Path | None, seconds: float, size: str, as_json: bool) -> None:
    """Run the command; see its help. Ranks other than 0 only take part in collectives."""
    with one_line_errors(), warnings_as_notes(), ExitStack() as ending:
        device = default_device()
        join_process_group(None, device)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several and dist.get_rank() > 0:
            return ending.enter_context(Gathers(device)).follow()
        check_range("--seconds", seconds, 0.1, 86_400)
        nbytes = size_of("--size", size, least=SMALLEST_FILE)
        check_folders(paths)
        check_output("--out", out)
        note_memory_folders(paths)
        with progress(shown=not as_json) as step:
            gathers = ending.enter_context(Gathers(device)) if several else None
            links = measured(Task(paths, nbytes, seconds, device, gathers), step)
        try:
            say(*([links.to_json().rstrip()] if as_json else shown(links)))
        finally:  # write the file even if stdout fails
            if out is not None and (problem := write_out(out, links.to_json())):
                fail(problem)


def measured(task: Task, step: Step) -> Links:
    """Measure all bandwidths, verify the drive's file, and return the medians."""
    began = time.perf_counter()
    step(0, "starting a process that imports torch")
    baseline = process_memory(COMPILER, TRAINER).nbytes
    aio = Config().aio
    work = granted(Workload("read", aio.block_size, aio.queue_depth, aio.threads, aio.engine), len(task.paths))
    works = [replace(work, op=op) for op in OPS]
    step(_PREPARED / 4, f"laying out {format_size(task.size)}")
    with Bench(task.paths, task.size, works, chunk=stripe_chunk(work.block_size)) as drive:
        step(_PREPARED / 2, "preparing memory and matmuls")
        kinds = [*_drive_kinds(drive, works), *_other_kinds(task)]
        rates = {kind.name: kind.rate for kind in kinds if kind.rate is not None}
        left = task.seconds - (time.perf_counter() - began)
        samples = measure(rates, left, lambda done, now: step(_PREPARED + done * (_MEASURED - _PREPARED), now))
        step(_MEASURED, "verifying")
        drive.verify()
        folders = {str(path): file_system(path) for path in task.paths}
        ranks = dist.get_world_size() if task.gathers else 1
        facts = {**machine(task.device), "ranks": ranks, "folders": folders, "file": task.size, "direct": drive.direct}
    if busy := unsteady(samples):
        note(
            f"{', '.join(busy)} differed by more than half between rounds: something else uses this machine; run this "
            "again while nothing does, or with more --seconds"
        )
    medians = {name: round(median(values)) for name, values in samples.items()}
    of_dtypes: dict[str, Any] = {
        key: {dtype: medians.pop(f"{key}.{dtype}", None) for dtype in DTYPES} for key in ("flops", "weights")
    }
    bandwidths: dict[str, Any] = {kind.name: medians.get(kind.name) for kind in kinds if "." not in kind.name}
    measurement = {
        "rounds": min(map(len, samples.values())),
        "seconds": round(time.perf_counter() - began, 1),
        "lowest": {name: round(min(values)) for name, values in samples.items()},
        "highest": {name: round(max(values)) for name, values in samples.items()},
        "how": {kind.name: kind.how for kind in kinds},
    }
    return Links(**bandwidths, **of_dtypes, baseline_rss=baseline, facts={"machine": facts, "measurement": measurement})


def _drive_kinds(drive: Bench, works: Sequence[Workload]) -> Iterator[_Kind]:
    def rate(work: Workload) -> Rate:
        return lambda seconds: 1e9 * drive.run(work, seconds=seconds).gb_per_s

    for work in works:
        how = f"blocks of {format_size(work.block_size)}, {work.queue_depth} in flight"
        yield _Kind(f"nvme_{work.op}", rate(work), "half reads, half writes" if work.op == "mixed" else how)


def _other_kinds(task: Task) -> Iterator[_Kind]:
    device, gathers = task.device, task.gathers
    update, nbytes = adam()
    yield _Kind("memory", update, f"AdamW over {show_bytes(nbytes)}, all cores")
    copies = None if device.host_addressable else Copies(device)
    for name in ("host_to_device", "device_to_host"):
        if copies is None:
            yield _Kind(name, None, "no accelerator")
        else:
            call = copies.to_device if name == "host_to_device" else copies.to_host
            yield _Kind(name, Calls(call, copies.nbytes), f"copies of {show_bytes(copies.nbytes)}")
    if gathers is None:
        yield _Kind("collective", None, "one rank")
    else:
        how = f"{show_bytes(gathers.nbytes)} to {dist.get_world_size()} ranks over {gathers.backend}"
        yield _Kind("collective", Calls(gathers.run, gathers.nbytes), how)
    for dtype in DTYPES:
        found = matmul(device, getattr(torch, dtype), task.seconds * _LONGEST_MATMUL)
        if found is None:
            for key in ("flops", "weights"):
                yield _Kind(f"{key}.{dtype}", None, f"the device has no {dtype}")
        else:
            calls, width = found
            yield _Kind(f"flops.{dtype}", calls, f"({width}, {width}) x ({width}, {4 * width})")
            few = few_rows(device, getattr(torch, dtype), width)
            yield _Kind(f"weights.{dtype}", few, f"the weight of (16, {width}) x ({width}, {4 * width})")


def shown(links: Links) -> list[RenderableType]:
    """Return a table of the bandwidths under their names in the JSON, and the machine."""
    machine: Mapping[str, Any] = links.facts["machine"]
    measurement: Mapping[str, Any] = links.facts["measurement"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("range", no_wrap=True)
    table.add_column("measured on", no_wrap=True)
    for name, rate, show in _rates(links):
        how, ends = measurement["how"][name], [measurement[end].get(name) for end in ("lowest", "highest")]
        if rate is None:
            table.add_row(name, "–", "", how, style="dim")
        else:
            table.add_row(name, show(rate), _range(*map(show, ends)), how)
    table.add_row("baseline_rss", show_bytes(links.baseline_rss), "", "after training one small layer")
    folders = ", ".join(f"{path} ({kind})" for path, kind in machine["folders"].items())
    parts = (machine["processor"], f"{machine['cores']} cores", f"torch {machine['torch']}")
    where = f"drive: {folders}, {'direct' if machine['direct'] else 'through the page cache'}"
    device = f"computes on: {machine['device']}"
    return [Text(printable(", ".join(parts)), style="bold"), Text(printable(where)), Text(printable(device)), table]


def _rates(links: Links) -> Iterator[tuple[str, float | None, Callable[[float], str]]]:
    for name in BANDWIDTHS:
        yield name, getattr(links, name), lambda rate: f"{show_bytes(rate)}/s"
    for dtype, flops in links.flops.items():
        yield f"flops.{dtype}", flops, lambda rate: f"{show_flops(rate)}/s"
    for dtype, weights in links.weights.items():
        yield f"weights.{dtype}", weights, lambda rate: f"{show_bytes(rate)}/s"


def _range(low: str, high: str) -> str:
    """("1.5 GB/s", "2.5 GB/s") -> '1.5 to 2.5'; with both units if they differ."""
    (number, unit), (last, last_unit) = low.split(), high.split()
    return f"{number} to {last}" if unit == last_unit else f"{low} to {high}"
