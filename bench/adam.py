"""The optimizer step in host memory: G parameters/s and GB/s of every format, beside a bare pass and torch.

    python bench/adam.py                              # 1e6, 1e7, 1e8 parameters: 9 GB of memory, about 5 minutes
    python bench/adam.py --sizes 1e6 --repeats 3      # a trial; --name keeps it apart

The bare pass (`infinity.native._adam.bare`) goes over as many streams of the same sizes, with one addition for each
word: the time that memory sets.
"today" is what an engine without such kernels does with bf16 gradients and parameters: convert
the gradient to fp32, torch's fused AdamW in fp32, cast the parameter to bf16, three passes of 40 bytes. All of a case
take turns, round by round, in an order that rotates, each in arrays of its own in huge pages; a turn is several calls
where n is small, so that each finds its arrays as it left them. Times are medians, ratios are medians of the ratios
within a round, so that what else the machine does cancels. Writes bench/results/adam.json, adam.md and adam.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# torch's threads otherwise spin for a while after each call, on the processors of whoever is measured next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from infinity.native import _adam
from infinity.plan.formats import BLOCK
from infinity.rules import MOMENTS
from infinity.tiers.memory import host_tensor

RESULTS = Path(__file__).parent / "results"
HYPER: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GRADIENTS = {"fp32": "fp32", "remainder": "bf16", "master": "bf16", "master_fp16": "fp16"}
TITLES = {
    "fp32": "fp32",
    "remainder": "bf16 + remainder",
    "master": "bf16 + fp32 master",
    "master_fp16": "fp16 + fp32 master",
}
MASTERS = {"fp32": 0, "remainder": 2, "master": 4, "master_fp16": 4}
TORCH = ("torch AdamW, fused", "torch AdamW, default")
TODAY_BYTES, TORCH_BYTES = 40, 28
WHOLE = (("fp32", "fp32"), ("remainder", "fp32"), ("master", "fp32"), ("remainder", "8bit"))  # (format, moments)
CACHES = (
    "The aims are for arrays that no cache holds. Those of 1e6 parameters take 8 to 16 MB: what stays in the "
    "third-level cache from call to call, the bare pass reads at the cache's speed, beside which arithmetic shows; and "
    "a part of those of 1e7 is there too. A ratio above 1 says that the bare pass, not the update, fell short of what "
    "memory allows."
)
PER_TURN = 10**7  # parameters that a turn goes over at least, in one call or several
Sample = dict[str, Any]


@dataclass(frozen=True)
class Case:
    rule: Any
    format: Any
    moments: Any

    @property
    def gradient(self) -> Any:
        return GRADIENTS[self.format]

    @property
    def name(self) -> str:
        return f"{self.rule} | {TITLES[self.format]} | {self.gradient} | {self.moments}"

    def streams(self) -> dict[str, tuple[float, bool]]:
        """Bytes per parameter of each array, and whether the update writes it."""
        width = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0}[self.moments]
        arrays: dict[str, tuple[float, bool]] = {"param": (4 if self.format == "fp32" else 2, True)}
        if MASTERS[self.format]:
            arrays["master"] = (MASTERS[self.format], True)
        arrays["grad"] = (DTYPES[self.gradient].itemsize, False)
        for k in range(MOMENTS[self.rule]):
            arrays[f"moment{k}"] = (width, True)
            if self.moments == "8bit":
                arrays[f"scale{k}"] = (1 / BLOCK, True)
        return arrays

    def bytes(self) -> float:
        """Read and written per parameter. Where there is a master, the parameter is written only."""
        total = sum(size * (2 if written else 1) for size, written in self.streams().values())
        return total - (2 if self.format.startswith("master") else 0)


CASES = [Case("adamw", format, moments) for format in TITLES for moments in ("fp32", "bf16", "8bit")]
CASES += [Case(rule, "remainder", "fp32") for rule in ("lion", "sgd", "adagrad")]


# -- what is measured --------------------------------------------------------------------------------------------------


def allocate(case: Case, n: int) -> dict[str, torch.Tensor]:
    """Zeroed arrays, uint8; rounded up, so that a scale is never short of its last block."""
    arrays = {name: host_tensor(int(size * n) + 64) for name, (size, _) in case.streams().items()}
    for array in arrays.values():
        array.zero_()
    return arrays


def update(case: Case, n: int, isa: str, threads: int) -> Callable[[], object]:
    arrays = allocate(case, n)
    arrays["grad"][: n * DTYPES[case.gradient].itemsize].view(DTYPES[case.gradient]).normal_(0, 1e-3)
    count = MOMENTS[case.rule]
    given: dict[str, Any] = {name: arrays[name].data_ptr() if name in arrays else 0 for name in ("param", "master")}
    given |= {"grad": arrays["grad"].data_ptr(), "moments": [arrays[f"moment{k}"].data_ptr() for k in range(count)]}
    given["scales"] = [arrays[f"scale{k}"].data_ptr() for k in range(count) if f"scale{k}" in arrays]
    given |= {"format": case.format, "grad_dtype": case.gradient, "moment_format": case.moments}
    step = 0

    def run(kept: object = arrays) -> None:
        nonlocal step
        step += 1
        _adam.update(case.rule, n=n, step=step, key=step, isa=isa, threads=threads, **given, **HYPER)

    return run


def bare(case: Case, n: int, threads: int) -> Callable[[], object]:
    arrays = allocate(case, n)
    streams = [(arrays[name].data_ptr(), int(size * n), written) for name, (size, written) in case.streams().items()]

    def run(kept: object = arrays) -> None:
        _adam.bare(streams, threads)

    return run


def by_torch(n: int, **options: Any) -> Callable[[], object]:
    """torch.optim.AdamW in fp32: 28 bytes if it were one pass."""
    param = torch.nn.Parameter(host_tensor(4 * n).view(torch.float32).zero_())
    param.grad = host_tensor(4 * n).view(torch.float32).normal_(0, 1e-3)
    betas = HYPER["beta1"], HYPER["beta2"]
    return torch.optim.AdamW([param], HYPER["lr"], betas, HYPER["eps"], HYPER["weight_decay"], **options).step


def today(n: int) -> Callable[[], object]:
    """The three passes: read 2 and write 4, read 16 and write 12, read 4 and write 2 bytes of each parameter."""
    gradient = host_tensor(2 * n).view(torch.bfloat16).normal_(0, 1e-3)
    low = host_tensor(2 * n).view(torch.bfloat16).zero_()
    param = torch.nn.Parameter(host_tensor(4 * n).view(torch.float32).zero_())
    param.grad = host_tensor(4 * n).view(torch.float32).zero_()
    betas = HYPER["beta1"], HYPER["beta2"]
    optimizer = torch.optim.AdamW([param], HYPER["lr"], betas, HYPER["eps"], HYPER["weight_decay"], fused=True)

    def run() -> None:
        assert param.grad is not None
        param.grad.copy_(gradient)
        optimizer.step()
        low.copy_(param.detach())

    return run


def measure(n: int, args: argparse.Namespace) -> list[Sample]:
    """Seconds of one call, of every candidate in every round. One round first, to touch memory."""
    samples: list[Sample] = []
    calls = -(-PER_TURN // n)
    passes = today(n)
    for case in CASES:
        runs = {"update": update(case, n, args.isa, args.threads), "bare": bare(case, n, args.threads), "today": passes}
        if case == CASES[0]:
            runs |= {TORCH[0]: by_torch(n, fused=True), TORCH[1]: by_torch(n)}
        order = list(runs)
        for number in range(-1, args.repeats):
            turn = number % len(order)
            for what in order[turn:] + order[:turn]:
                began = time.perf_counter()
                for _ in range(calls):
                    runs[what]()
                seconds = (time.perf_counter() - began) / calls
                if number >= 0:
                    samples.append({"n": n, "case": case.name, "what": what, "round": number, "seconds": seconds})
        print(f"{n:.0e} {case.name}", file=sys.stderr, flush=True)
    return samples


# -- what came of it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Medians of one candidate. ratios: its speed over that of the bare pass, of today's passes and of torch's default
    AdamW, by parameters/s; None where they were not measured in the same rounds."""

    n: int
    name: str
    bytes: float
    seconds: float
    over_bare: float
    over_today: float
    over_torch: float | None = None

    @property
    def rate(self) -> float:
        return self.n / self.seconds / 1e9


def rows(samples: list[Sample]) -> list[Row]:
    grouped: dict[tuple[int, str], dict[str, list[float]]] = {}
    for s in samples:  # rounds are in order
        grouped.setdefault((s["n"], s["case"]), {}).setdefault(s["what"], []).append(s["seconds"])
    sizes = {case.name: case.bytes() for case in CASES}
    found = []
    for (n, case), times in grouped.items():

        def ratio(base: str, what: str, times: dict[str, list[float]] = times) -> float:
            return statistics.median(b / own for b, own in zip(times[base], times[what], strict=True))

        for what, seconds in times.items():
            if what in TORCH:
                name, size = f"{what} | fp32 | fp32 | fp32", float(TORCH_BYTES)
            elif what == "update":
                name, size = case, sizes[case]
            else:
                continue
            beside = ratio("bare", what), ratio("today", what), ratio(TORCH[1], what) if TORCH[1] in times else None
            found.append(Row(n, name, size, statistics.median(seconds), *beside))
    for n in dict.fromkeys(row.n for row in found):
        passes = statistics.median(s["seconds"] for s in samples if s["n"] == n and s["what"] == "today")
        bare_rates = [
            s["seconds"] for s in samples if s["n"] == n and s["what"] == "bare" and s["case"] == CASES[0].name
        ]
        own = TODAY_BYTES / passes, CASES[0].bytes() / statistics.median(bare_rates)
        name = "today: convert, fused AdamW, cast | bf16 + fp32 master | bf16 | fp32"
        found.append(Row(n, name, TODAY_BYTES, passes, own[0] / own[1], 1.0))
    return found


def targets(found: list[Row]) -> list[str]:
    """What was aimed for, beside what was measured at each size; * marks what fell short."""
    eights = tuple(case.name for case in CASES if case.moments == "8bit")
    others = tuple(case.name for case in CASES if case.moments != "8bit")
    fp32, remainder, master, eight = (Case("adamw", *kept).name for kept in WHOLE)
    aims: list[tuple[str, float, Callable[[Row], float | None], tuple[str, ...]]] = [
        ("fp32, beside the bare pass", 0.97, lambda row: row.over_bare, (fp32,)),
        ("fp32, beside torch's default AdamW", 5.0, lambda row: row.over_torch, (fp32,)),
        ("bf16 + remainder, beside today's passes", 1.45, lambda row: row.over_today, (remainder,)),
        ("bf16 + fp32 master, beside today's passes", 1.35, lambda row: row.over_today, (master,)),
        ("bf16 + remainder with 8-bit moments, beside today's passes", 2.0, lambda row: row.over_today, (eight,)),
        ("the slowest of all without 8-bit moments, beside the bare pass", 0.90, lambda row: row.over_bare, others),
        ("the slowest with 8-bit moments, beside the bare pass", 0.75, lambda row: row.over_bare, eights),
    ]
    sizes = list(dict.fromkeys(row.n for row in found))
    lines = ["| aim | at least |" + "".join(f" {short(n)} |" for n in sizes), "|---|---|" + "---|" * len(sizes)]
    for what, least, measured, names in aims:
        line = f"| {what} | {least:.2f} |"
        for n in sizes:
            reached = min(value for row in found if row.n == n and row.name in names if (value := measured(row)))
            line += f" {reached:.2f}{'*' if reached < least else ''} |"
        lines.append(line)
    return lines


def memory(samples: list[Sample]) -> str:
    """How fast memory was while all else was measured: a shared machine's changes from minute to minute."""
    sizes = {case.name: case.bytes() for case in CASES}
    speeds: dict[int, list[float]] = {}
    for s in samples:
        if s["what"] == "bare":
            speeds.setdefault(s["n"], []).append(s["n"] * sizes[s["case"]] / s["seconds"] / 1e9)
    tenths = {n: statistics.quantiles(found, n=10) for n, found in speeds.items()}
    ranges = ", ".join(f"{low[0]:.0f} to {low[-1]:.0f} GB/s of {short(n)}" for n, low in tenths.items())
    return f"Eight in ten of the bare passes went over {ranges} parameters."


def short(n: int) -> str:
    return f"{n:.0e}".replace("e+0", "e")


def table(found: list[Row], facts: dict[str, Any], spread: str) -> str:
    lines = [
        "# The optimizer step in host memory",
        "",
        f"`{facts['command']}` on {facts['machine']}. {facts['note']}",
        "",
    ]
    lines += [
        "Medians. G/s: 10^9 parameters per second; GB/s: with the bytes that one pass has to read and write (40 for "
        "today's three passes). ÷ bare: speed beside a pass over the same streams with one addition a word, which is "
        "what memory allows (for today's passes and torch: by GB/s, beside the bare pass of fp32). ÷ today: "
        "parameters/s beside today's three passes. ÷ torch: beside torch's default AdamW in fp32.",
        "",
        "## What was aimed for",
        "",
        *targets(found),
        "",
        f"\\* less than aimed for. {CACHES} {spread} The faster memory is, the more of the arithmetic shows, most "
        "where moments have 8 bits, which are decoded and encoded besides.",
        "",
        *([facts["remark"], ""] if "remark" in facts else []),
    ]
    for n in dict.fromkeys(row.n for row in found):
        lines += [f"## {short(n)} parameters", ""]
        lines += ["| rule | parameter | gradient | moments | bytes | G/s | GB/s | ÷ bare | ÷ today | ÷ torch |"]
        lines += ["|---|---|---|---|---|---|---|---|---|---|"]
        for row in found:
            if row.n == n:
                speed = f"{row.bytes:.3g} | {row.rate:.2f} | {row.rate * row.bytes:.1f}"
                beside = f"**{row.over_bare:.2f}** | {row.over_today:.2f}"
                torch_too = "" if row.over_torch is None else f"{row.over_torch:.1f}"
                lines.append(f"| {row.name} | {speed} | {beside} | {torch_too} |")
        lines.append("")
    return "\n".join([*lines, f"![G parameters/s]({facts['name']}.png)", ""])


def plot(found: list[Row], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n = max(row.n for row in found)
    shown = [row for row in found if row.n == n][::-1]
    figure = Figure(figsize=(11.5, 0.34 * len(shown) + 1.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.37, 0.09, 0.6, 0.79))
    for place, row in enumerate(shown):
        ours = not row.name.startswith(("torch", "today"))
        axes.barh(place, row.rate, height=0.66, color="#2f6fde" if ours else "#9aa3af")
        floor = row.rate / row.over_bare if ours else row.rate
        label = f"{row.rate:.2f}   {row.over_bare:.2f} of bare, {row.over_today:.1f} × today"
        axes.text(max(row.rate, floor), place, f"  {label}", va="center", fontsize=8, color="#374151")
        if ours:
            axes.plot([floor, floor], [place - 0.33, place + 0.33], color="#1f2430", linewidth=1.4)
    axes.set_yticks(range(len(shown)), [row.name.replace(" | ", ", ") for row in shown], fontsize=8)
    axes.set_xlim(0, 1.35 * max(row.rate / min(row.over_bare, 1.0) for row in shown))
    axes.tick_params(length=0, colors="#374151", labelsize=8)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.text(
        0.02, 0.955, f"10⁹ parameters per second, {n:,} parameters", fontsize=13, weight="bold", color="#1f2430"
    )
    figure.text(
        0.02, 0.92, "rule, parameter, gradient, moments; black lines: the bare pass", fontsize=9, color="#6b7280"
    )
    figure.savefig(path)


def facts(args: argparse.Namespace) -> dict[str, Any]:
    isa = _adam.default_isa() if args.isa == "auto" else args.isa
    machine = f"Linux {platform.release()}, {processor()}, {os.cpu_count()} cores"
    note = f"{isa}, {args.threads} threads, torch {torch.__version__}, {args.repeats} rounds, arrays in huge pages."
    return {"command": "python bench/adam.py", "machine": machine, "note": note, "name": args.name}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8], help="parameters")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--threads", type=int, default=_adam.default_threads(), help="one per processor by default")
    parser.add_argument("--isa", default="auto", choices=["auto", *_adam.available_isas()])
    parser.add_argument("--name", default="adam", help="name of the result files")
    parser.add_argument("--remark", help="what the table is to say besides, of this run")
    parser.add_argument("--redraw", action="store_true", help="write table and plot of an earlier run's JSON again")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    target = RESULTS / f"{args.name}.json"
    if args.redraw:
        saved = json.loads(target.read_text())
    else:
        torch.set_num_threads(args.threads)
        samples = [sample for size in args.sizes for sample in measure(int(size), args)]
        saved = {"facts": facts(args), "samples": samples}
        target.write_text(json.dumps(saved, indent=1) + "\n")
    if args.remark is not None:
        saved["facts"]["remark"] = args.remark
        target.write_text(json.dumps(saved, indent=1) + "\n")
    found = rows(saved["samples"])
    text = table(found, saved["facts"], memory(saved["samples"]))
    (RESULTS / f"{args.name}.md").write_text(text)
    plot(found, RESULTS / f"{args.name}.png")
    print(text)


if __name__ == "__main__":
    main()
