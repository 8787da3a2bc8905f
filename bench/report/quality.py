"""The page of `quality.py`: losses of runs that differ only in the formats of optimizer states."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.plots import running_mean
from harness import Result
from quality_recipe import FORMATS, Recipe
from report.page import Report, setup, table
from report.style import GRID, INK, MUTED, OURS, PALE, PEER, dress, new_figure, save

COLOURS = {"reference": INK, "remainder": PALE, "bf16": OURS, "8bit": "#e4572e", "torch": PEER, "fp32": "#c9a227"}
LEGEND = """\
State: bytes of the master or remainder and of the moments, without the parameter itself.
Moved: bytes of the state that a step reads and writes for a parameter, measured with the states on NVMe.
Difference: mean over seeds, in brackets the smallest and the largest.
Spread: largest less smallest loss, in % of the mean."""
Run = dict[str, Any]


# -- the runs ----------------------------------------------------------------------------------------------------------


def runs_of(result: Result, name: str) -> list[Run]:
    """Runs of a format by seed."""
    return sorted((run for run in result["runs"] if run["format"] == name), key=lambda run: int(run["seed"]))


def formats(result: Result) -> list[str]:
    """Return the formats that were run with all seeds."""
    seeds = len(runs_of(result, "reference"))
    return [name for name in FORMATS if seeds and len(runs_of(result, name)) == seeds]


def pairs(result: Result, name: str) -> list[tuple[Run, Run]]:
    """(run, reference run of the same seed)"""
    references = {run["seed"]: run for run in runs_of(result, "reference")}
    return [(run, references[run["seed"]]) for run in runs_of(result, name) if run["seed"] in references]


def differences(result: Result, name: str, at: int = -1) -> list[float]:
    """Held-out loss of the format less that of the reference with the same seed, in % of the latter, by seed."""
    return [100 * (run["held_out"][at][1] / other["held_out"][at][1] - 1) for run, other in pairs(result, name)]


def differing(result: Result, name: str) -> int:
    """Runs in which a loss of any step, or the states left at the end, are not those of the reference to the bit."""
    keys = ("losses", "held_out", "fingerprint")
    return sum(any(run[key] != other[key] for key in keys) for run, other in pairs(result, name))


def is_identical(result: Result, name: str) -> bool:
    return differing(result, name) == 0


# -- the page ----------------------------------------------------------------------------------------------------------


def recipe_text(result: Result) -> list[str]:
    recipe = Recipe(**result["recipe"])
    last = ", but for the last row" if "fp32" in formats(result) else ""
    return [
        f"GPT-2 of {recipe.shape.num_parameters / 1e6:.2f} M parameters ({recipe.layers} layers, hidden "
        f"{recipe.hidden}, sequence {recipe.sequence}), {recipe.steps} steps of {recipe.batch * recipe.sequence:,} "
        f"bytes of {result['text']}.",
        f"AdamW, lr {recipe.lr:g} with warm-up and cosine, betas 0.9 and 0.95, weight decay 0.1, gradient clipping "
        f"1.0; parameters and gradients in bf16{last}.",
        f"Held-out loss, in nats a byte, over {recipe.held_out_windows * recipe.sequence:,} bytes of files that are "
        "not trained on.",
        "Runs with the same seed have the same initial weights and batches.",
    ]


def difference(result: Result, name: str) -> str:
    if name == "reference":
        return "—"
    if name == "remainder" and is_identical(result, name):
        return "0, every bit equal"
    found = differences(result, name)
    return f"{statistics.fmean(found):+.2f} % ({min(found):+.2f} to {max(found):+.2f})"


def cells(result: Result, name: str) -> list[str]:
    kind, losses = FORMATS[name], [run["held_out"][-1][1] for run in runs_of(result, name)]
    mean, moved = statistics.fmean(losses), result["traffic"].get(name)
    return [
        f"{kind.title}{' (reference)' if name == 'reference' else ''}",
        f"{kind.state_bytes:.4g}",
        "—" if moved is None else f"{moved:.2f}",
        *(f"{loss:.4f}" for loss in losses),
        f"**{mean:.4f}**",
        difference(result, name),
        f"{100 * (max(losses) - min(losses)) / mean:.2f} %",
    ]


def losses_table(result: Result) -> str:
    seeds = [f"seed {run['seed']}" for run in runs_of(result, "reference")]
    header = ["format", "state, bytes a parameter", "moved a step", *seeds, "mean", "difference to the reference"]
    return table([*header, "spread between seeds"], [cells(result, name) for name in formats(result)])


def cost(result: Result) -> str:
    """CPU time of all runs, and of a step."""
    found = {name: [run["cpu_seconds"] for run in runs_of(result, name)] for name in formats(result)}
    dtypes = {"reference": "bf16", "fp32": "fp32"}
    a_step = " and ".join(
        f"{statistics.fmean(found[name]) / result['recipe']['steps']:.2f} s in {dtype}"
        for name, dtype in dtypes.items()
        if name in found
    )
    return (
        f"The {sum(map(len, found.values()))} runs took {sum(map(sum, found.values())) / 60:.1f} minutes of CPU time, "
        f"one thread each.\nA step takes {a_step}, including its share of measuring held-out loss."
    )


def fragments(result: Result) -> dict[str, str]:
    losses = f"{losses_table(result)}\n\n{LEGEND}"
    return {"setup": setup(result, *recipe_text(result)), "losses": losses, "cost": cost(result)}


def figures(result: Result) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in formats(result):
        if name != "reference":
            found[f"{name}: |difference|, %"] = abs(statistics.fmean(differences(result, name)))
            found[f"{name}: runs that differ in a bit"] = differing(result, name)
    return found


# -- the plot ----------------------------------------------------------------------------------------------------------


def plot(result: Result, path: Path) -> None:
    """Loss curves of all formats, and their held-out loss less that of the reference."""
    recipe = Recipe(**result["recipe"])
    subtitle = (
        f"GPT-2 of {recipe.shape.num_parameters / 1e6:.2f} M parameters, {recipe.steps} steps; lines are means of "
        f"{len(runs_of(result, 'reference'))} seeds, bands go from the lowest to the highest seed"
    )
    figure = new_figure(11.5, 5.6, title="Quality of the formats of optimizer states", subtitle=subtitle)
    draw_losses(result, figure.add_axes((0.06, 0.21, 0.415, 0.585)))
    draw_differences(result, figure.add_axes((0.56, 0.21, 0.415, 0.585)))
    for axes in figure.axes:
        axes.set_xlabel("step", color=INK, fontsize=9)
        axes.set_xlim(0, recipe.steps * 1.02)
        dress(axes)
    handles, labels = figure.axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=9,
                  labelcolor=INK)  # fmt: skip
    save(figure, path)


def draw_losses(result: Result, axes: Any) -> None:
    """Training and held-out loss. Curves that lie on one another show as dashes in turn, dots as rings."""
    axes.set_title("loss, nats a byte", loc="left", fontsize=10.5, weight="bold", color=INK)
    axes.annotate("dots: held-out text\nlines: training, running mean", (0.985, 0.965), xycoords="axes fraction",
                  ha="right", va="top", color=MUTED, fontsize=8.5, linespacing=1.5)  # fmt: skip
    names = formats(result)
    window, lowest = max(15, result["recipe"]["steps"] // 16), float("inf")
    for place, name in enumerate(names):
        runs, colour = runs_of(result, name), COLOURS[name]
        means, lows, highs = over_seeds([running_mean(run["losses"], window) for run in runs])
        lowest = min(lowest, *lows)
        steps = range(1, len(means) + 1)
        if name == "reference":
            axes.fill_between(steps, lows, highs, color=colour, alpha=0.12, linewidth=0)
        dashes = (4 * place, (4, 4 * (len(names) - 1)))
        axes.plot(steps, means, color=colour, linewidth=2.2, linestyle=dashes, dash_capstyle="butt")
        held_out = over_seeds([[loss for _, loss in run["held_out"]] for run in runs])[0]
        axes.plot([step for step, _ in runs[0]["held_out"]], held_out, color=colour, linestyle="none", marker="o",
                  markersize=11 - 1.7 * place, markeredgewidth=0, clip_on=False)  # fmt: skip
    axes.set_ylim(0.97 * lowest, 1.6 * lowest)  # the first steps fall from chance


def draw_differences(result: Result, axes: Any) -> None:
    """Draw each format's held-out loss, relative to the reference."""
    axes.set_title("held-out loss, % from the reference", loc="left", fontsize=10.5, weight="bold", color=INK)
    axes.axhline(0, color=GRID, linewidth=2)
    for name in formats(result):
        runs, colour = runs_of(result, name), COLOURS[name]
        steps = [step for step, _ in runs[0]["held_out"]]
        by_step = [differences(result, name, at) for at in range(len(steps))]
        means, lows, highs = over_seeds(list(zip(*by_step, strict=True)))
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.12, linewidth=0)
        axes.plot(steps, means, color=colour, linewidth=4 if name == "reference" else 1.9, marker="o", markersize=4.5,
                  markeredgecolor="white", markeredgewidth=0.8, label=FORMATS[name].title)  # fmt: skip
    furthest = max(abs(limit) for limit in axes.get_ylim())
    axes.set_ylim(-furthest, furthest)


def over_seeds(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """(mean, lowest, highest) of curves, point by point."""
    points = list(zip(*curves, strict=True))
    return [statistics.fmean(p) for p in points], [min(p) for p in points], [max(p) for p in points]


REPORT = Report(
    lambda result: "Quality of the formats of optimizer states", fragments, figures, plot, "Loss curves of all formats"
)
