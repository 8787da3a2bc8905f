"""A data-parallel step beside DistributedDataParallel's and FSDP2's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Result, grouped, median, spread
from report.page import RATIOS, Report, ratio, setup, table
from report.style import MUTED, OURS, PEER, Bar, draw_bars, new_figure, save
from zero_contenders import CONTENDERS, Contender

COLLECTIVES = {
    "all-gather": "all_gather_bytes",
    "reduce-scatter": "reduce_scatter_bytes",
    "all-reduce": "all_reduce_bytes",
}
Row = dict[str, Any]
BYTES_LEGEND = """\
MB a step, counted as whole tensors: the collectives that were issued, and in theory if no unit stays between \
forward and backward (stage 3: 2 × all-gather + 1 × reduce-scatter).
Infinity does not gather units again that are still in a buffer when backward needs them; FSDP2 does not gather its \
root again.
On the wire: bytes that each rank sent by the kernel's counters, in theory, and as needed for the issued collectives."""


def theory(args: dict[str, Any], contender: Contender, numel: int) -> dict[str, float]:
    """Bytes of whole tensors that a step has to gather and reduce, where no unit stays between forward and backward."""
    param = numel * (2 if args["dtype"] == "bf16" else 4)
    grad = param if contender.kind == "ddp" else numel * 4
    if contender.stage == 0:
        return {"all_reduce_bytes": grad, "all_gather_bytes": 0, "reduce_scatter_bytes": 0}
    gathers = 2 if contender.stage == 3 else 1
    return {"all_reduce_bytes": 0, "all_gather_bytes": gathers * param, "reduce_scatter_bytes": grad}


def on_the_wire(issued: dict[str, float], ranks: int) -> float:
    """Bytes that each of the ranks has to send for collectives of whole tensors of these bytes."""
    whole = issued["all_gather_bytes"] + issued["reduce_scatter_bytes"] + 2 * issued["all_reduce_bytes"]
    return whole * (ranks - 1) / ranks


def rows(result: Result) -> list[Row]:
    """Figures of each contender."""
    args = result["args"]
    samples = grouped(result["samples"], "name")  # in the order of rounds
    found = []
    for name in args["only"]:
        contender, mine, facts = CONTENDERS[name], samples[name,], result["facts"][name]
        expected = theory(args, contender, facts.get("numel", result["parameters"]))
        issued = {key: mine[0]["traffic"][key] for key in expected} if facts else None
        row: Row = {
            "name": name,
            "title": contender.title,
            "seconds": median(mine, "seconds"),
            "cpu_seconds": median(mine, "cpu_seconds"),
            "peak_rss": max(s["peak_rss"] for s in mine),
            "wire": median(mine, "wire"),
            "wire_theory": on_the_wire(expected, args["ranks"]),
            "wire_issued": on_the_wire(issued, args["ranks"]) if issued else None,
            "theory": expected,
            "issued": issued,
        }
        if peer := samples.get((contender.against,)):
            row["ratios"] = [s["seconds"] / other["seconds"] for s, other in zip(mine, peer, strict=True)]
            row["peer_seconds"] = median(peer, "seconds")
            row["against"] = contender.against
        found.append(row)
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


def beside(row: Row) -> str:
    if "ratios" not in row:
        return ""
    of, _, span = ratio(f"{row['seconds'] * 1e3:.0f}", f"{row['peer_seconds'] * 1e3:.0f}", row["ratios"]).partition(" ")
    return f"**{of}** {span} × {CONTENDERS[row['against']].title}"


def steps_table(found: list[Row]) -> str:
    cells = [
        [row["title"], f"{row['seconds'] * 1e3:.0f}", beside(row), f"{row['cpu_seconds'] * 1e3:.0f}",
         f"{row['peak_rss'] / 1e9:.2f}"]
        for row in found
    ]  # fmt: skip
    return table(["", "step, ms", "÷ peer", "CPU of a rank, ms", "peak RSS of a rank, GB"], cells)


def bytes_table(found: list[Row]) -> str:
    header = [""]
    for collective in COLLECTIVES:
        header += [collective, "theory"]
    return table([*header, "on the wire", "theory", "needed for what was issued"], map(bytes_cells, found))


def bytes_cells(row: Row) -> list[str]:
    cells = [row["title"]]
    for key in COLLECTIVES.values():
        cells += [f"{row['issued'][key] / 1e6:.1f}" if row["issued"] else "", f"{row['theory'][key] / 1e6:.1f}"]
    needed = f"{row['wire_issued'] / 1e6:.1f}" if row["issued"] else ""
    return [*cells, f"{row['wire'] / 1e6:.1f}", f"{row['wire_theory'] / 1e6:.1f}", needed]


def recipe(result: Result) -> list[str]:
    args = result["args"]
    return [
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, {args['heads']} heads, vocabulary {args['vocab']}, "
        f"sequence {args['sequence']}, batch {args['batch']} a rank; AdamW; gloo over the loopback device; "
        f"{result['threads']} of torch's threads a rank.",
        f"Medians of {args['rounds']} rounds of {args['steps']} steps, interleaved.",
        RATIOS,
        f"All losses agree within {result['apart']:.0e}.",
    ]


def title(result: Result) -> str:
    args = result["args"]
    millions = result["parameters"] / 1e6
    return f"A data-parallel step of {millions:.1f} M parameters on {args['ranks']} ranks, {args['dtype']}"


def fragments(result: Result) -> dict[str, str]:
    found = rows(result)
    return {
        "setup": setup(result, *recipe(result)),
        "steps": steps_table(found),
        "bytes": f"{BYTES_LEGEND}\n\n{bytes_table(found)}",
    }


def figures(result: Result) -> dict[str, float]:
    return {
        f"{row['name']} ÷ {row['against']}": spread(row["ratios"]).median for row in rows(result) if "ratios" in row
    }


# -- the plot ----------------------------------------------------------------------------------------------------------


def plot(result: Result, path: Path) -> None:
    """Step times on the left, bytes on the wire on the right."""
    found = rows(result)
    height = 0.42 * len(found) + 1.9
    figure = new_figure(12, height, title=title(result), left=0.02)
    bottom, top = 0.45 / height, 1.05 / height
    left = figure.add_axes((0.25, bottom, 0.42, 1 - bottom - top))
    right = figure.add_axes((0.71, bottom, 0.27, 1 - bottom - top))
    draw_bars(left, [time_bar(row) for row in found], room=1.5)
    draw_bars(right, [bytes_bar(row) for row in found], names=False, room=1.2)
    figure.text(0.25, 1 - 0.88 / height, "ms a step", fontsize=9, color=MUTED)
    figure.text(0.71, 1 - 0.88 / height, "MB that a rank sends; black lines: the theory", fontsize=9, color=MUTED)
    save(figure, path)


def time_bar(row: Row) -> Bar:
    milliseconds = row["seconds"] * 1e3
    label = f"{milliseconds:.0f} ms"
    if "ratios" in row:
        peer = CONTENDERS[row["against"]].title.split(",")[0].replace("DistributedDataParallel", "DDP")
        label += f", {row['seconds'] / row['peer_seconds']:.2f} × {peer}"
    return Bar(row["title"], milliseconds, label, colour(row))


def bytes_bar(row: Row) -> Bar:
    sent = row["wire"] / 1e6
    return Bar(row["title"], sent, f"{sent:.0f}", colour(row), bound=row["wire_theory"] / 1e6)


def colour(row: Row) -> str:
    return OURS if row["name"].startswith("infinity") else PEER


REPORT = Report(title, fragments, figures, plot, "Step time and bytes")
