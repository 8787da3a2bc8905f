"""The page of `durability.py`: the cost of durable states, how soon a killed run goes on, and what faults did to it.

Faults and growth are those of the published results of `campaign.py` and `soak.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import RESULTS, Result, spread
from report import campaign, soak, style
from report.page import RATIOS, Report, load, ratio, setup, table

SCHEDULES = {"0": "during backward", "1": "clipping, next forward"}
"""Value of clipping → schedule of the updates."""


def runs_of(result: Result, save: str, clip: str) -> list[dict[str, Any]]:
    return list(result["runs"][f"{save}, clip {clip}"])


def seconds(runs: list[dict[str, Any]]) -> float:
    return spread(step for run in runs for step in run["steps"]).median


def ratios(result: Result, clip: str) -> list[float]:
    """Return each round's ratio of the medians with and without durable states."""
    above, below = runs_of(result, "durable", clip), runs_of(result, "without", clip)
    return [seconds([one]) / seconds([other]) for one, other in zip(above, below, strict=True)]


def parameters(result: Result) -> int:
    return int(next(iter(result["runs"].values()))[0]["parameters"])


def title(result: Result) -> str:
    return f"Durable states of {parameters(result) / 1e6:.0f} M parameters on NVMe"


def fragments(result: Result) -> dict[str, str]:
    args = result["args"]
    text = setup(
        result,
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}, sequence "
        f"{args['sequence']}, batch {args['batch']}, bf16, AdamW, untied head.",
        f"Medians of {args['rounds']} processes of {args['steps']} steps each, kinds interleaved.",
        RATIOS,
    )
    return {
        "setup": text,
        "cost": cost(result),
        "recovery": recovery(result),
        "faults": faults(RESULTS / "campaign.json"),
        "soak": growth(RESULTS / "soak.json"),
    }


def cost(result: Result) -> str:
    rows = []
    for clip, schedule in SCHEDULES.items():
        without, durable = runs_of(result, "without", clip), runs_of(result, "durable", clip)
        rows.append(
            [
                schedule,
                f"{seconds(without):.2f}",
                f"{seconds(durable):.2f}",
                ratio(f"{seconds(durable):.2f}", f"{seconds(without):.2f}", ratios(result, clip)),
                f"{without[0]['nvme'] / 1e9:.2f}",
                f"{durable[0]['nvme'] / 1e9:.2f}",
                f"{max(run['peak_rss'] for run in without) / 1e9:.2f}",
                f"{max(run['peak_rss'] for run in durable) / 1e9:.2f}",
            ]
        )
    head = ["updates", "step, s", "durable, s", "ratio", "on NVMe, GB", "durable, GB", "peak RSS, GB", "durable, GB"]
    return table(head, rows)


def recovery(result: Result) -> str:
    rows = []
    for clip, schedule in SCHEDULES.items():
        runs = runs_of(result, "durable", clip)
        found = (spread(run[key] for run in runs).median for key in ("construction", "resume"))
        rows.append([schedule, *(f"{each:.2f}" for each in found), f"{runs[0]['record'] / 1e3:.0f}"])
    return table(["updates", "construction, s", "engine.resume(), s", "record of a commit, kB"], rows)


def faults(path: Path) -> str:
    """Table of the campaign's sums."""
    if not path.exists():
        return "The campaign (`python bench/campaign.py`) has no published result yet."
    found = load(path)
    outcomes = [outcome for _, _, outcome, _ in found["failed"]]
    rows = [
        ["trainings under random faults", f"{campaign.total(found, 'runs'):,}"],
        ["of them on two ranks", f"{campaign.total(found, 'two ranks'):,}"],
        ["classes of faults", f"{len(found['kinds'])}"],
        ["processes killed", f"{campaign.total(found, 'kills'):,}"],
        ["trainings that went on from a commit", f"{campaign.total(found, 'resumed'):,}"],
        ["ended with the same numbers", f"{campaign.total(found, campaign.SAME):,}"],
        ["refused with an error that names the cause", f"{campaign.total(found, campaign.REFUSED):,}"],
        ["wrong numbers", f"{outcomes.count('wrong numbers')}"],
        ["files left over", f"{outcomes.count('left over')}"],
        ["other failures", f"{sum(each not in ('wrong numbers', 'left over') for each in outcomes)}"],
        ["median seconds until a killed process has its states back", f"{campaign.middle(found):.2f}"],
    ]
    return table(["[campaign](campaign.md)", "number"], rows)


def growth(path: Path) -> str:
    """Table of the soak's growth."""
    if not path.exists():
        return "The soak of two hours (`python bench/soak.py`) has no published result yet."
    return soak.fragments(load(path))["table"]


def figures(result: Result) -> dict[str, float]:
    return {
        f"{schedule}: durable ÷ without": spread(ratios(result, clip)).median for clip, schedule in SCHEDULES.items()
    }


def plot(result: Result, path: Path) -> None:
    subtitle = "seconds a step, median and range of all counted steps; lower is better"
    figure = style.new_figure(9, 3.6, title=title(result), subtitle=subtitle)
    axes = figure.add_axes((0.32, 0.12, 0.62, 0.66))
    names, place = [], 0
    for clip, schedule in SCHEDULES.items():
        for save, colour in (("without", "#9ca3af"), ("durable", "#2f6fde")):
            steps = [step for run in runs_of(result, save, clip) for step in run["steps"]]
            middle = spread(steps).median
            axes.barh(place, middle, color=colour, height=0.7)
            axes.plot([min(steps), max(steps)], [place, place], color="#374151", linewidth=1)
            axes.text(max(steps), place, f"  {middle:.2f}", va="center")
            names.append(f"{schedule}, {save}")
            place += 1
    axes.set_yticks(range(place), names)
    axes.invert_yaxis()
    axes.set_xlim(0, None)
    style.dress(axes, "x")
    style.save(figure, path)


REPORT = Report(title, fragments, figures, plot, "Seconds of a step with and without durable states")
