"""How every script of this folder measures: the machine, kinds in turns, medians, child processes, JSON.

Machines are shared, so the kinds of a benchmark alternate within each round, in an order that rotates, and figures are
medians over rounds; a ratio is the median of the ratios within a round. Peak memory belongs to a process, so what
reports it runs in a process of its own.

A result is one JSON object. Its head says `bench` (which of `bench/report/` draws it), `command`, `machine` and, where
the machine and the flags do not say it all, `note`; `remark` is a sentence about that one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from infinity.engine.training import TrainingEngine
    from infinity.observe.ledger import Snapshot

T = TypeVar("T")
K = TypeVar("K")
Result = dict[str, Any]
RESULTS = Path(__file__).resolve().parent / "results"


# -- the machine -------------------------------------------------------------------------------------------------------


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """The processor's name as Linux shows it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def file_system(path: str | os.PathLike[str], mounts: str | None = None) -> str:
    """Type of the file system that holds `path`, such as ext4. mounts: lines as in /proc/self/mounts."""
    lines = (Path("/proc/self/mounts").read_text() if mounts is None else mounts).splitlines()
    found = Path(path).resolve()
    best, name = -1, "unknown file system"
    for _, mount, kind, *_ in map(str.split, lines):
        if found.is_relative_to(mount) and len(mount) >= best:  # of two on one mount point, the later one shows
            best, name = len(mount), kind
    return name


def machine(path: str | os.PathLike[str] | None = None) -> str:
    """One line: kernel, processor, cores, memory, the file system of `path`, torch."""
    parts = [f"Linux {platform.release()}", processor(), f"{cores()} cores", f"{memory_bytes() / 2**30:.0f} GiB"]
    if path is not None:
        parts.append(file_system(path))
    return ", ".join([*parts, f"torch {version('torch')}"])


def peak_rss() -> int:
    """Bytes of this process's largest resident set so far.

    Not `ru_maxrss`, which counts the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def moved_so_far(engine: TrainingEngine) -> Snapshot:
    """The engine's counts between two steps, after the transfers under way have ended.

    Reads for the next step are under way then. `settle` would drop some of them, which the next step reads again.
    """
    time.sleep(1)
    return engine.ledger.snapshot()


def drive_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to drives so far, as the kernel counts them."""
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counted["read_bytes"]), int(counted["write_bytes"])


# -- kinds that take turns ---------------------------------------------------------------------------------------------


def rotated(kinds: Sequence[T], number: int) -> list[T]:
    """The kinds in the order of round `number`: each comes first once in len(kinds) rounds."""
    turn = number % len(kinds)
    return [*kinds[turn:], *kinds[:turn]]


def interleaved(kinds: Iterable[T], rounds: int, *, warm_up: int = 0) -> Iterator[tuple[int, T]]:
    """(round, kind) of every kind in every round. Rounds that warm up come first and have negative numbers."""
    order = list(kinds)
    for number in range(-warm_up, rounds):
        for kind in rotated(order, number):
            yield number, kind


def collect(kinds: Iterable[K], rounds: int, run: Callable[[K], Result], show: Callable[[Result], str]) -> dict[K, Any]:
    """Results of `run` by kind, in the order of rounds. Prints a line for each, of which `show` gives the figure."""
    order = list(kinds)
    found: dict[K, Any] = {kind: [] for kind in order}
    for number, kind in interleaved(order, rounds):
        result = run(kind)
        found[kind].append(result)
        print(f"round {number + 1}/{rounds}  {kind!s:28}  {show(result)}", file=sys.stderr, flush=True)
    return found


# -- medians -----------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A figure over rounds."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Median, smallest and largest; ValueError if there are none."""
    found = list(values)
    if not found:
        raise ValueError("no values to take a median of")
    return Spread(statistics.median(found), min(found), max(found))


def median(samples: Iterable[Mapping[str, Any]], key: str) -> float:
    """Median of one entry of each sample."""
    return spread(sample[key] for sample in samples).median


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """Median of the ratios within rounds; both hold one value a round, in the same order."""
    return spread(a / b for a, b in zip(above, below, strict=True)).median


def apart(runs: Iterable[Sequence[float]]) -> float:
    """Largest relative difference of losses after equally many steps. Runs have equally many."""
    return float(max((max(column) - min(column)) / min(column) for column in zip(*runs, strict=True)))


def grouped(samples: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Samples by the values of `keys`, in the order in which they appear."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for sample in samples:
        found.setdefault(tuple(sample[key] for key in keys), []).append(sample)
    return found


# -- child processes ---------------------------------------------------------------------------------------------------


def run_child(
    script: str, arguments: Sequence[str], *, before: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Result:
    """Run `script` in a fresh process; the JSON object of its last line of output. What it writes to stderr shows.

    before: words that start the command, such as `taskset 1`. environment: variables beside those of this process.
    Ends this process with an error if the child fails.
    """
    command = [*before, sys.executable, script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with code {done.returncode}; its error is above.")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def attempt(command: Sequence[str], *, environment: Mapping[str, str], limit: float) -> Result:
    """Run a command that may fail.

    environment: all variables. limit: seconds after which it is killed. Returns the last JSON object that it printed,
    and `status` (negative: a signal; None: it was killed after `limit`), the line of its last `error`, `seconds`.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(environment)
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            status = None
    lines = [line for line in out.splitlines() if line.startswith('{"')]
    problem = re.compile(r"(?:\[rank0\]: )?([\w.]*(?:Error|Exception|Assert|terminate).*)")
    last = [match[1] for match in map(problem.match, errors.splitlines()) if match]
    found = json.loads(lines[-1]) if lines else {}
    return {**found, "status": status, "error": last[-1] if last else "", "seconds": time.perf_counter() - began}


# -- the command line and the result -----------------------------------------------------------------------------------


def make_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with what all benchmarks share: --name and --results, where result files go, and --redraw."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=name, help="name of the result files")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="folder for the result files")
    parser.add_argument("--redraw", action="store_true", help="draw an earlier run's JSON again; measure nothing")
    return parser


def head(
    bench: str,
    *,
    path: str | os.PathLike[str] | None = None,
    note: str = "",
    arguments: Any = None,
    script: str | None = None,
) -> Result:
    """The first entries of a result. path: a folder on the disk that is measured. script: if not BENCH.py."""
    given = sys.argv[1:] if arguments is None else arguments
    words = [word for word in given if word != "--redraw"]
    command = shlex.join(["python", f"bench/{script or f'{bench}.py'}", *words])
    found = {"bench": bench, "command": command, "machine": machine(path)}
    return found | ({"note": note} if note else {})


def result_path(name: str) -> Path:
    """A result of bench/results by its name, or any by the path of its JSON."""
    return Path(name) if name.endswith(".json") else RESULTS / f"{name}.json"


def target(args: argparse.Namespace) -> Path:
    """The JSON that a run with the flags of `make_parser` writes."""
    return Path(args.results) / f"{args.name}.json"


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Replace `path` at once, so that a reader never finds half a result."""
    replace_text(path, json.dumps(result, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
