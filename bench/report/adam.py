"""The optimizer step in host memory, beside a bare pass over the same streams and torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adam_cases import CASES, PASSES_BYTES, TORCH, TORCH_BYTES, Case
from harness import Result, grouped, median_ratio, spread
from report.page import Report, setup, table
from report.style import LABEL, OURS, PEER, dress, mark, new_figure, save

HEADER = ("rule", "parameter", "gradient", "moments", "bytes", "G/s", "GB/s", "÷ bare", "÷ three passes", "÷ torch")
LEGEND = """\
Medians.
G/s: 10^9 parameters per second.
GB/s: parameters per second × the bytes that one pass has to read and write for each (40 for the three passes).
÷ bare: speed relative to the bare pass, which reads and writes the same streams with one addition a word; for torch \
and the three passes, GB/s relative to the bare pass of fp32.
÷ three passes: parameters per second relative to three passes: convert to fp32, fused AdamW, cast to bf16.
÷ torch: parameters per second relative to torch's default AdamW in fp32."""
THREE_PASSES = "convert, fused AdamW, cast | bf16 + fp32 master | bf16 | fp32"
BYTES = {case.name: case.bytes() for case in CASES}
Times = Mapping[str, list[float]]


@dataclass(frozen=True)
class Row:
    """Medians of one candidate.

    Ratios are speeds over those of the bare pass, of the three passes and of torch's default AdamW, by parameters/s;
    None where they were not measured in the same rounds.
    """

    n: int
    name: str
    bytes: float
    seconds: float
    over_bare: float
    over_passes: float
    over_torch: float | None = None

    @property
    def rate(self) -> float:
        """10^9 parameters per second."""
        return self.n / self.seconds / 1e9

    @property
    def is_ours(self) -> bool:
        return self.name in BYTES


def times_of(result: Result) -> dict[tuple[int, str], dict[str, list[float]]]:
    """Seconds of a call in the order of rounds, by (n, case), then by candidate."""
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for (n, case, what), samples in grouped(result["samples"], "n", "case", "what").items():
        found.setdefault((n, case), {})[what] = [sample["seconds"] for sample in samples]
    return found


def row(n: int, case: str, what: str, times: Times) -> Row:
    name, size = (f"{what} | fp32 | fp32 | fp32", float(TORCH_BYTES)) if what in TORCH else (case, BYTES[case])
    own, base = times[what], times.get(TORCH[1])
    beside = median_ratio(times["bare"], own), median_ratio(times["today"], own)
    return Row(n, name, size, spread(own).median, *beside, None if base is None else median_ratio(base, own))


def passes_row(n: int, found: Mapping[tuple[int, str], Times]) -> Row:
    """Return the row of the three passes, which take turns with every case."""
    first = CASES[0].name
    seconds = spread(one for (size, _), times in found.items() if size == n for one in times["today"]).median
    bare_rate = BYTES[first] / spread(found[n, first]["bare"]).median
    return Row(n, THREE_PASSES, PASSES_BYTES, seconds, PASSES_BYTES / seconds / bare_rate, 1.0)


def rows(result: Result) -> list[Row]:
    found = times_of(result)
    own = [row(*key, what, times) for key, times in found.items() for what in times if what in ("update", *TORCH)]
    return own + [passes_row(n, found) for n in dict.fromkeys(n for n, _ in found)]


def short(n: int) -> str:
    return f"{n:.0e}".replace("e+0", "e")


# -- the page ----------------------------------------------------------------------------------------------------------


def bandwidth(result: Result) -> str:
    """How fast memory was while all else was measured: a shared machine's changes from minute to minute."""
    speeds: dict[int, list[float]] = {}
    for (n, case), times in times_of(result).items():
        speeds.setdefault(n, []).extend(n * BYTES[case] / seconds / 1e9 for seconds in times["bare"])
    tenths = {n: statistics.quantiles(found, n=10) for n, found in speeds.items()}
    ranges = ", ".join(f"{low[0]:.0f} to {low[-1]:.0f} GB/s with {short(n)}" for n, low in tenths.items())
    return f"Bare passes, 10th to 90th percentile: {ranges} parameters."


def cells(row: Row) -> list[str]:
    over_torch = "" if row.over_torch is None else f"{row.over_torch:.1f}"
    speed = [f"{row.bytes:.3g}", f"{row.rate:.2f}", f"{row.rate * row.bytes:.1f}"]
    return [*row.name.split(" | "), *speed, f"**{row.over_bare:.2f}**", f"{row.over_passes:.2f}", over_torch]


def tables(result: Result) -> str:
    found = rows(result)
    parts = [LEGEND]
    for n in dict.fromkeys(row.n for row in found):
        parts += [f"## {short(n)} parameters", table(HEADER, [cells(row) for row in found if row.n == n])]
    return "\n\n".join(parts)


def beside_fused(result: Result) -> list[tuple[str, int, float, float, float, float]]:
    """Tensors, threads, ms of CPUAdam and of torch's fused AdamW, and the ratios of their time and processor time."""
    found = []
    for (kind, threads), samples in grouped(result.get("optimizers", []), "tensors", "threads").items():
        of = {
            (what, key): [sample[key] for sample in samples if sample["what"] == what]
            for what in ("CPUAdam", "fused")
            for key in ("seconds", "processor")
        }
        ours, theirs = (1e3 * spread(of[what, "seconds"]).median for what in ("CPUAdam", "fused"))
        ratios = (median_ratio(of["CPUAdam", key], of["fused", key]) for key in ("seconds", "processor"))
        found.append((f"{kind}, {samples[0]['n']:,} parameters", threads, ours, theirs, *ratios))
    return found


def optimizers(result: Result) -> str:
    header = ("tensors, parameters", "threads", "CPUAdam, ms", "fused, ms", "time ÷ fused", "processor time ÷ fused")
    lines = [
        (kind, str(threads), *(f"{x:.1f}" for x in times), *(f"{x:.2f}" for x in ratios))
        for kind, threads, *rest in beside_fused(result)
        for times, ratios in [(rest[:2], rest[2:])]
    ]
    return table(header, lines)


def fragments(result: Result) -> dict[str, str]:
    found = {"setup": setup(result, bandwidth(result)), "tables": tables(result)}
    return found | ({"optimizers": optimizers(result)} if "optimizers" in result else {})


def figures(result: Result) -> dict[str, float]:
    """Speeds beside other passes, by the number of parameters."""
    found = rows(result)
    eights = [case.name for case in CASES if case.moments == "8bit"]
    others = [case.name for case in CASES if case.moments != "8bit"]
    fp32, remainder, master, eight = (
        [Case("adamw", *kept).name]
        for kept in (("fp32", "fp32"), ("remainder", "fp32"), ("master", "fp32"), ("remainder", "8bit"))
    )
    wanted: dict[str, tuple[Callable[[Row], float | None], list[str]]] = {
        "fp32 ÷ bare": (lambda row: row.over_bare, fp32),
        "fp32 ÷ torch": (lambda row: row.over_torch, fp32),
        "remainder ÷ three passes": (lambda row: row.over_passes, remainder),
        "master ÷ three passes": (lambda row: row.over_passes, master),
        "remainder, 8bit ÷ three passes": (lambda row: row.over_passes, eight),
        "slowest without 8bit ÷ bare": (lambda row: row.over_bare, others),
        "slowest with 8bit ÷ bare": (lambda row: row.over_bare, eights),
    }
    return {
        f"{short(n)}: {what}": min(
            v for row in found if row.n == n and row.name in names and (v := of(row)) is not None
        )
        for n in dict.fromkeys(row.n for row in found)
        for what, (of, names) in wanted.items()
    }


# -- the plot ----------------------------------------------------------------------------------------------------------


def plot(result: Result, path: Path) -> None:
    """Bars of the largest size."""
    found = rows(result)
    n = max(row.n for row in found)
    shown = [row for row in found if row.n == n][::-1]
    height = 0.34 * len(shown) + 1.6
    subtitle = "rule, parameter, gradient, moments; black lines: the bare pass"
    figure = new_figure(
        11.5, height, title=f"10⁹ parameters per second, {n:,} parameters", subtitle=subtitle, left=0.02
    )
    axes = figure.add_axes((0.37, 0.09, 0.6, 1 - 0.09 - 0.85 / height))
    for place, row in enumerate(shown):
        axes.barh(place, row.rate, height=0.66, color=OURS if row.is_ours else PEER)
        bare = row.rate / row.over_bare if row.is_ours else row.rate
        label = f"{row.rate:.2f}   {row.over_bare:.2f} of bare, {row.over_passes:.1f} × three passes"
        axes.text(max(row.rate, bare), place, f"  {label}", va="center", fontsize=8, color=LABEL)
        if row.is_ours:
            mark(axes, bare, place)
    axes.set_yticks(range(len(shown)), [row.name.replace(" | ", ", ") for row in shown], fontsize=8)
    axes.set_xlim(0, 1.5 * max(row.rate / min(row.over_bare, 1.0) for row in shown))
    dress(axes, "x")
    save(figure, path)


REPORT = Report(
    lambda result: "The optimizer step in host memory", fragments, figures, plot, "10⁹ parameters per second"
)
