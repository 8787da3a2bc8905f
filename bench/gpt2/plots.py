"""The loss curve of a training run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from report.style import GRID, INK, MUTED

TRAIN, HELD_OUT = "#2f6fde", "#e4572e"


def plot_loss(
    path: str | os.PathLike[str],
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    *,
    title: str,
    subtitle: str = "",
    chance: float | None = None,
) -> None:
    """Write a PNG of (step, loss in nats) of the training batches, their running mean, and the held-out text.

    `chance` is the loss of a uniform guess, drawn as a line. Needs matplotlib (ImportError without it).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: no display is looked for
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0.075, 0.115, 0.865, 0.735))
    steps, losses = [s for s, _ in train], [loss for _, loss in train]
    axes.plot(steps, losses, color=TRAIN, alpha=0.22, linewidth=1)
    axes.plot(steps, running_mean(losses), color=TRAIN, linewidth=2.2, label="training, running mean")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=HELD_OUT, linewidth=1.8, marker="o", markersize=5,
                  markeredgecolor="white", markeredgewidth=1, label="held-out text")  # fmt: skip
        step, loss = held_out[-1]
        axes.annotate(f"{loss:.2f}", (step, loss), xytext=(-2, 12), textcoords="offset points", color=HELD_OUT,
                      ha="right", weight="bold")  # fmt: skip
    if chance is not None:
        axes.axhline(chance, color=MUTED, linewidth=1, linestyle=(0, (4, 4)))
        axes.annotate(f"uniform guess, {chance:.2f}", (0.995, chance), xycoords=("axes fraction", "data"),
                      xytext=(0, -12), textcoords="offset points", ha="right", color=MUTED, fontsize=9)  # fmt: skip
    _dress(axes, steps, losses, [loss for _, loss in held_out], chance)
    figure.text(0.075, 0.945, title, color=INK, fontsize=13, weight="bold")
    figure.text(0.075, 0.895, subtitle, color=MUTED, fontsize=9.5)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _dress(
    axes: Any, steps: Sequence[int], losses: Sequence[float], held_out: Sequence[float], chance: float | None
) -> None:
    shown = [loss for loss in (*losses, *held_out) if math.isfinite(loss)] or [1.0]
    low, high = min(shown), max(*shown, chance or 0.0)
    margin = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - margin, high + margin)
    if steps:
        axes.set_xlim(steps[0] - 1, max(steps[-1], steps[0] + 1))
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("cross entropy, nats a byte", color=INK)
    bits = axes.secondary_yaxis("right", functions=(lambda nats: nats / math.log(2), lambda b: b * math.log(2)))
    bits.set_ylabel("bits a byte", color=MUTED)
    for side in (axes, bits):
        side.tick_params(colors=MUTED, length=0)
        for spine in side.spines.values():
            spine.set_visible(False)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, labelcolor=INK, loc="center right", bbox_to_anchor=(1, 0.62))


def running_mean(values: Sequence[float], window: int = 15) -> list[float]:
    """Means over `window` values around each one; over fewer at the ends, without lagging behind a steep start."""
    means, sums = [], [0.0, *accumulate(values)]
    for index in range(len(values)):
        before = min(window // 2, index)
        after = min(window // 2, index, len(values) - 1 - index)
        means.append((sums[index + after + 1] - sums[index - before]) / (before + 1 + after))
    return means
