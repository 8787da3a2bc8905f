"""A simulated step of a model on many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Result
from report import style
from report.page import Report, setup, table


def title(result: Result) -> str:
    return f"A simulated step of {result['parameters'] / 1e12:.2f} T parameters on {result['ranks'][0]} GPUs"


def figures(result: Result) -> dict[str, float]:
    return {"processor seconds of a simulated step": result["process_seconds"]["simulation"] / result["steps"]}


def fragments(result: Result) -> dict[str, str]:
    return {"setup": setup(result, *recipe(result)), "step": step(result), "lanes": lanes(result)}


def recipe(result: Result) -> list[str]:
    shape, links, device, (ranks, per_node) = result["shape"], result["links"], result["device"], result["ranks"]
    drive = "/".join(f"{links[key] / 1e9:g}" for key in ("nvme_read", "nvme_write", "nvme_mixed"))
    return [
        f"GPT-2: hidden {shape['hidden_size']}, {shape['num_layers']} layers, sequence {shape['seq_length']}, "
        f"{result['batch']} sequences a GPU, checkpointed activations, bf16, all states on nvme, linear layers in "
        f"tiles of {result['tile']} (`infinity.nn.tile`).",
        f"{ranks} GPUs, {per_node} a node, which share its drive of {drive} GB/s (read/written/mixed) and its memory "
        f"of {links['memory'] / 1e9:g} GB/s.",
        f"A GPU: {links['flops']['bfloat16'] / 1e12:g} TFLOP/s in bf16, {device['nbytes'] / 2**30:g} GiB of "
        f"{device['bandwidth'] / 1e12:g} TB/s, "
        f"{links['host_to_device'] / 1e9:g} GB/s to and from it, {links['collective'] / 1e9:g} GB/s of collectives.",
    ]


def step(result: Result) -> str:
    used, whole = result["process_seconds"], result["step_seconds"]
    exposed = {lane: value for lane, value in result["exposed"].items() if lane != "compute"}
    longest = max(exposed, key=exposed.__getitem__)
    rows = [
        ["step, s", f"{whole:.1f}"],
        ["compute, s", f"{result['compute_seconds']:.1f} ({result['compute_seconds'] / whole:.0%})"],
        ["TFLOP/s a GPU", f"{result['flops'] / whole / 1e12:.1f}"],
        ["longest wait", f"{longest}, {exposed[longest]:.1f} s"],
        ["units", str(result["units"])],
        *([f"peak of the plan on {tier}, GB a rank", f"{n / 1e9:.2f}"] for tier, n in result["peak_bytes"].items()),
        ["peak of activations on device, GB a rank", f"{result['activation_bytes'] / 1e9:.2f}"],
        ["processor seconds: model", f"{used['model']:.1f}"],
        [f"processor seconds: {result['steps']} simulated steps", f"{used['simulation']:.1f}"],
        ["processor seconds of a simulated step", f"{used['simulation'] / result['steps']:.1f}"],
    ]
    return table(["", ""], rows)


def lanes(result: Result) -> str:
    rows = [
        [
            lane,
            f"{sum(shares) / len(shares):.0%}",
            f"{result['exposed'].get(lane, 0.0):.1f}" if lane != "compute" else "–",
            f"{result['moved'][lane] / 1e9:.1f}" if result["moved"].get(lane) else "–",
        ]
        for lane, shares in result["busy"].items()
    ]
    return table(["lane of a rank", "busy", "exposed, s", "moved, GB"], rows)


def plot(result: Result, path: Path) -> None:
    """One strip a lane, as dark as the lane is busy."""
    busy, whole = result["busy"], result["step_seconds"]
    figure = style.new_figure(
        9, 1.3 + 0.34 * len(busy), title=title(result), subtitle="lanes of one rank: the darker, the busier"
    )
    axes: Any = figure.add_axes((0.14, 0.16, 0.82, 0.84 - 0.9 / (1.3 + 0.34 * len(busy))))
    for place, shares in enumerate(reversed(busy.values())):
        axes.imshow([shares], extent=(0, whole, place - 0.36, place + 0.36), cmap="Blues", vmin=0, vmax=1.2)
    axes.set(xlim=(0, whole), ylim=(-0.6, len(busy) - 0.4), xlabel="seconds", aspect="auto")
    axes.set_yticks(range(len(busy)), list(reversed(busy)))
    style.dress(axes, grid="x")
    style.save(figure, path)


REPORT = Report(title, fragments, figures, plot, "busy lanes of one rank in the simulated step")
