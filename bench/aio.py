"""File I/O of infinity's engine beside fio's, on one laid-out file, and the cost of its parts.

    python bench/aio.py --path /local_nvme                     # about 25 minutes; needs fio (Debian: apt install fio)
    python bench/aio.py --path /local_nvme --rounds 1 --seconds 1 --points 1m

Overwriting a laid-out file, as training does. Each point (block size, queue depth) is run by fio (libaio, io_uring,
and io_uring with registered buffers) and by ours (libaio, io_uring), one process each, in turn, round by round, in an
order that rotates: compare medians. All use O_DIRECT, the same file, buffers allocated once in huge pages (glibc's
malloc.hugetlb for fio), and run for the same time. `tiles` is the update's own pattern: 10 MiB requests, reads and
writes in flight together, with the engine's default block size and depth; it stands beside fio's mixed runs. CPU is
that of the whole process, kernel included. `checksum` is ours with `aio.checksum`. Writes bench/results/aio.json,
aio.md and aio.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MB = 1 << 20
POINTS = {"128k": (128 << 10, 32), "1m": (MB, 32), "8m": (8 * MB, 8)}
OPS = ("read", "write", "mixed")
FIO = {
    "fio libaio": ["--ioengine=libaio"],
    "fio io_uring": ["--ioengine=io_uring"],
    "fio io_uring, registered": ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"],
}
OURS = {"ours libaio": "libaio", "ours io_uring": "io_uring"}
Medians = dict[tuple[str, str], dict[str, dict[str, float]]]
TILE = 10 * MB
REQUEST = 16 * MB


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=".", help="folder on the drive to measure")
    parser.add_argument("--size", type=int, default=2 << 30, help="bytes of the file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--points", nargs="*", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--name", default="aio", help="name of the result files")
    parser.add_argument("--redraw", action="store_true", help="write table and plot of an earlier run's JSON again")
    parser.add_argument("--ours", help=argparse.SUPPRESS)  # one run of ours, as JSON: what a process of its own does
    return parser.parse_args()


# -- one run -----------------------------------------------------------------------------------------------------------


def run_fio(
    file: Path, size: int, op: str, block: int, depth: int, engine: list[str], seconds: float
) -> dict[str, float]:
    command = ["fio", "--name=x", f"--filename={file}", f"--size={size}", "--direct=1", *engine]
    command += [f"--rw={'rw' if op == 'mixed' else op}", f"--bs={block}", f"--iodepth={depth}", "--time_based"]
    command += [f"--runtime={seconds}s", "--overwrite=1", "--fallocate=none", "--thread", "--mem=malloc"]
    command += ["--output-format=json"]
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
    spent = job["job_runtime"] / 1e3
    gb = (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 1e9
    return {"gb_per_s": gb / spent, "cpu_s_per_gb": (job["usr_cpu"] + job["sys_cpu"]) / 100 * spent / gb}


def run_ours(spec: dict[str, Any]) -> dict[str, float]:
    """In this process: requests over the whole file, around and around, the queue always full."""
    from infinity.native import _aio
    from infinity.tiers.io import open_engine
    from infinity.tiers.memory import host_tensor

    block, depth, request, op = spec["block"], spec["depth"], spec["request"], spec["op"]
    flight = max(4, -(-2 * block * depth // request))
    size = spec["size"] // (2 * request) * 2 * request
    memory = host_tensor(request * flight)
    memory.fill_(0x5A)
    buffered, direct = os.open(spec["file"], os.O_RDWR), os.open(spec["file"], os.O_RDWR | os.O_DIRECT)
    file = _aio.File(direct, buffered, spec["file"])
    if spec["checksum"]:
        file.keep_checksums(size, 64 << 10)
    with open_engine(spec["engine"], block_size=block, queue_depth=depth, threads=1) as engine:
        engine.register(memory.data_ptr(), memory.numel())
        under_way: deque[_aio.Request] = deque()
        places = requests(op, size, request)
        began, cpu = time.perf_counter(), time.process_time()
        slot = 0
        while time.perf_counter() - began < spec["seconds"]:
            if len(under_way) == flight:
                under_way.popleft().wait()
            write, offset = next(places)
            start = engine.write if write else engine.read
            under_way.append(start(file, offset, memory.data_ptr() + slot * request, request))
            slot = (slot + 1) % flight
        for one in under_way:
            one.wait()
        spent, cpu = time.perf_counter() - began, time.process_time() - cpu
        gb = (engine.bytes_read + engine.bytes_written) / 1e9
    return {"gb_per_s": gb / spent, "cpu_s_per_gb": cpu / gb}


def requests(op: str, size: int, request: int) -> Iterator[tuple[bool, int]]:
    """(is a write, offset); mixed reads one half of the file and writes the other, by turns."""
    if op != "mixed":
        while True:
            yield from ((op == "write", offset) for offset in range(0, size, request))
    half = size // 2
    while True:
        for offset in range(0, half, request):
            yield False, offset
            yield True, half + offset


def spawn_ours(file: Path, size: int, op: str, block: int, depth: int, engine: str, seconds: float,
               request: int = 0, checksum: bool = False) -> dict[str, float]:  # fmt: skip
    spec = {"file": str(file), "size": size, "op": op, "block": block, "depth": depth, "engine": engine,
            "seconds": seconds, "request": request or REQUEST, "checksum": checksum}  # fmt: skip
    command = [sys.executable, __file__, "--ours", json.dumps(spec)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(result.stdout)
    return answer


# -- all of them -------------------------------------------------------------------------------------------------------


def lay_out(file: Path, size: int) -> None:
    """Content that no layer can compress or take for a hole."""
    with file.open("wb") as out:
        block = os.urandom(16 * MB)
        for _ in range(size // len(block)):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())


def measure(args: argparse.Namespace, file: Path) -> list[dict[str, Any]]:
    runs: list[tuple[str, str, str, Any]] = []
    for point in args.points:
        block, depth = POINTS[point]
        for op in OPS:
            cases = [(name, run_fio, {"engine": flags}) for name, flags in FIO.items()]
            cases += [(name, spawn_ours, {"engine": engine}) for name, engine in OURS.items()]
            runs.append((point, op, block, depth, cases))  # type: ignore[arg-type]
    tiles = [(f"{name}, tiles", spawn_ours, {"engine": e, "request": TILE}) for name, e in OURS.items()]
    tiles += [("ours io_uring, tiles, checksum", spawn_ours, {"engine": "io_uring", "request": TILE, "checksum": True})]
    tiles += [(name, run_fio, {"engine": flags}) for name, flags in FIO.items()]
    runs.append(("tiles", "mixed", MB, 32, tiles))  # type: ignore[arg-type]
    samples: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for point, op, block, depth, cases in runs:  # type: ignore[misc]
            turn = number % len(cases)
            for name, run, options in cases[turn:] + cases[:turn]:
                got = run(file, args.size, op, block, depth, seconds=args.seconds, **options)
                samples.append({"point": point, "op": op, "who": name, **got})
                print(f"round {number + 1}: {point:>5} {op:<6} {name:<32} {got['gb_per_s']:6.2f} GB/s "
                      f"{got['cpu_s_per_gb']:.4f} CPU s/GB", file=sys.stderr, flush=True)  # fmt: skip
    return samples


def medians(samples: list[dict[str, Any]]) -> Medians:
    """By (point, op), then by who."""
    grouped: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for sample in samples:
        grouped.setdefault((sample["point"], sample["op"]), {}).setdefault(sample["who"], []).append(sample)
    return {
        key: {
            who: {
                "gb_per_s": statistics.median(s["gb_per_s"] for s in found),
                "low": min(s["gb_per_s"] for s in found),
                "high": max(s["gb_per_s"] for s in found),
                "cpu_s_per_gb": statistics.median(s["cpu_s_per_gb"] for s in found),
            }
            for who, found in whos.items()
        }
        for key, whos in grouped.items()
    }


def verdicts(found: Medians) -> list[tuple[str, str, str, float, float]]:
    """(point, op, fastest of fio, its GB/s, ours ÷ it), ours being io_uring, what `aio.engine: auto` takes."""
    rows = []
    for (point, op), whos in found.items():
        best = max((who for who in whos if who in FIO), key=lambda who: whos[who]["gb_per_s"])
        ours = whos["ours io_uring, tiles" if point == "tiles" else "ours io_uring"]
        rows.append((point, op, best, whos[best]["gb_per_s"], ours["gb_per_s"] / whos[best]["gb_per_s"]))
    return rows


TITLES = {"128k": "128 KiB × 32", "1m": "1 MiB × 32", "8m": "8 MiB × 8", "tiles": "10 MiB tiles"}


def table(found: Medians, facts: dict[str, Any]) -> str:
    lines = ["# File I/O: infinity beside fio", "", f"`{facts['command']}` on {facts['machine']}. {facts['note']}", ""]
    lines += ["Medians of GB/s (10^9), smallest and largest in brackets; below them CPU seconds per GB of the whole "
              "process. Point: block size × queue depth.", ""]  # fmt: skip
    columns = [*FIO, *OURS]
    for measure, title in (("gb_per_s", "GB/s"), ("cpu_s_per_gb", "CPU seconds per GB")):
        last = " best of fio | ours (io_uring) ÷ it |" if measure == "gb_per_s" else ""
        lines += [f"## {title}", "", f"| point | | {' | '.join(columns)} |{last}",
                  "|---|---|" + "---|" * (len(columns) + (2 if last else 0))]  # fmt: skip
        ratios = {(point, op): (best, ratio) for point, op, best, _, ratio in verdicts(found)}
        for (point, op), whos in found.items():
            cells = []
            for who in columns:
                one = whos.get(f"{who}, tiles" if point == "tiles" and who in OURS else who)
                cells.append("" if one is None else show(one, measure))
            best, ratio = ratios[point, op]
            end = f" {best} | **{ratio:.2f}** |" if last else ""
            lines.append(f"| {TITLES[point]} | {op} | {' | '.join(cells)} |{end}")
        lines.append("")
    lines += [
        "The last row's fio runs are of 1 MiB × 32, mixed; ours are 10 MiB requests that the engine cuts into "
        "blocks of 1 MiB, 32 in flight.",
        "",
        *checksum_lines(found),
        "",
        "![GB/s and CPU](aio.png)",
        "",
    ]
    return "\n".join(lines)


def show(one: dict[str, float], measure: str) -> str:
    if measure == "cpu_s_per_gb":
        return f"{one[measure]:.4f}"
    return f"{one['gb_per_s']:.2f} ({one['low']:.2f}–{one['high']:.2f})"


def checksum_lines(found: Medians) -> list[str]:
    whos = found[("tiles", "mixed")]
    off, on = whos["ours io_uring, tiles"], whos["ours io_uring, tiles, checksum"]
    return [
        "## What checksums cost", "",
        f"`aio.checksum` on the tiles: {on['gb_per_s']:.2f} instead of {off['gb_per_s']:.2f} GB/s "
        f"({on['gb_per_s'] / off['gb_per_s']:.2f} ×), and {on['cpu_s_per_gb']:.4f} instead of "
        f"{off['cpu_s_per_gb']:.4f} CPU seconds per GB; 4 bytes of memory for each block of up to 64 KiB.",
    ]  # fmt: skip


def plot(found: Medians, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = dict(zip([*FIO, *OURS], ["#c9ced6", "#9aa3af", "#6b7280", "#8db8f5", "#2f6fde"], strict=True))
    figure = Figure(figsize=(11.5, 6.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    points = [point for point in TITLES if any(key[0] == point for key in found) and point != "tiles"]
    for row, (measure, title) in enumerate((("gb_per_s", "GB/s"), ("cpu_s_per_gb", "CPU seconds per GB"))):
        for column, op in enumerate(OPS):
            axes = figure.add_axes((0.06 + 0.315 * column, 0.525 - 0.40 * row, 0.285, 0.31))
            groups = points + (["tiles"] if op == "mixed" else [])
            for place, point in enumerate(groups):
                whos = found[point, op]
                for index, (who, colour) in enumerate(colours.items()):
                    one = whos.get(f"{who}, tiles" if point == "tiles" and who in OURS else who)
                    if one is None:
                        continue
                    at = place + (index - 2) * 0.16
                    axes.bar(at, one[measure], width=0.145, color=colour, label=who if place == 0 else None)
                    if measure == "gb_per_s":
                        axes.plot([at, at], [one["low"], one["high"]], color="#1f2430", linewidth=0.9)
            axes.set_xticks(range(len(groups)), [TITLES[point] for point in groups], fontsize=8)
            axes.tick_params(length=0, colors="#374151", labelsize=8)
            axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
            axes.set_axisbelow(True)
            for spine in axes.spines.values():
                spine.set_visible(False)
            if row == 0:
                axes.set_title(op, loc="left", fontsize=11, weight="bold", color="#1f2430")
            if column == 0:
                axes.set_ylabel(title, color="#374151", fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=5, frameon=False, fontsize=9)
    figure.text(0.06, 0.945, "Overwriting and reading a laid-out file", fontsize=13, weight="bold", color="#1f2430")
    figure.text(
        0.06, 0.905, "O_DIRECT, one thread; medians, lines from smallest to largest", fontsize=9, color="#6b7280"
    )
    figure.savefig(path)


def main() -> None:
    args = arguments()
    if args.ours:
        print(json.dumps(run_ours(json.loads(args.ours))))
        return
    target = RESULTS / f"{args.name}.json"
    if args.redraw:
        saved = json.loads(target.read_text())
    else:
        if not shutil.which("fio"):
            sys.exit("fio is missing: apt install fio")
        file = Path(args.path) / f"infinity-aio-bench-{os.getpid()}"
        try:
            lay_out(file, args.size)
            samples = measure(args, file)
        finally:
            file.unlink(missing_ok=True)
        saved = {"facts": facts(args), "samples": samples}
        target.write_text(json.dumps(saved, indent=1) + "\n")
    found = medians(saved["samples"])
    (RESULTS / f"{args.name}.md").write_text(table(found, saved["facts"]))
    plot(found, RESULTS / f"{args.name}.png")
    for point, op, best, speed, ratio in verdicts(found):
        print(f"{TITLES[point]:<13} {op:<6} {ratio:.2f} of {best}'s {speed:.2f} GB/s")


def facts(args: argparse.Namespace) -> dict[str, Any]:
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    note = (
        f"{version}; file of {args.size / 2**30:g} GiB; {args.rounds} rounds of {args.seconds:g} s a run, the kinds "
        "in turn; buffers in huge pages on both sides."
    )
    machine = f"Linux {platform.release()}, {os.cpu_count()} cores"
    options = [argument for argument in sys.argv[1:] if not argument.startswith("--redraw")]
    return {"command": " ".join(["python bench/aio.py", *options]), "machine": machine, "note": note}


if __name__ == "__main__":
    main()
