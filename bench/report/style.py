"""Figures in one style: no frames, grey grids, a title and a subtitle at the top left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

INK, MUTED, GRID, LABEL = "#1f2430", "#6b7280", "#e5e7eb", "#374151"
OURS, PALE, PEER = "#2f6fde", "#8db8f5", "#9aa3af"
"""Colours of Infinity, of a lighter variant of it, and of what it is compared with."""


def new_figure(width: float, height: float, *, title: str, subtitle: str = "", left: float = 0.06) -> Any:
    """A matplotlib figure of width × height inches. left: of the titles, from 0 to 1. Raises ImportError without it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: no display is looked for
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(left, 1 - 0.36 / height, title, fontsize=13, weight="bold", color=INK)
    figure.text(left, 1 - 0.62 / height, subtitle, fontsize=9, color=MUTED)
    return figure


def dress(axes: Any, grid: Literal["both", "x", "y"] = "both") -> None:
    """Remove the frame, draw the grid behind the data."""
    axes.tick_params(length=0, colors=LABEL, labelsize=8)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


@dataclass(frozen=True)
class Bar:
    """A horizontal bar: its name at the axis, its length, the text at its end, and a bound to mark."""

    name: str
    value: float
    label: str
    colour: str = OURS
    bound: float | None = None

    @property
    def reach(self) -> float:
        return max(self.value, self.bound or 0.0)


def draw_bars(axes: Any, bars: Sequence[Bar], *, names: bool = True, room: float = 1.3) -> None:
    """Draw `bars` from top to bottom. room: the axis's length ÷ the longest bar, for the texts."""
    places = range(len(bars))[::-1]
    for place, bar in zip(places, bars, strict=True):
        axes.barh(place, bar.value, height=0.66, color=bar.colour)
        if bar.bound is not None:
            mark(axes, bar.bound, place)
        axes.text(bar.reach, place, f"  {bar.label}", va="center", fontsize=8, color=LABEL)
    axes.set_yticks(places, [bar.name for bar in bars] if names else [""] * len(bars), fontsize=8)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_xlim(0, room * max(bar.reach for bar in bars))
    dress(axes, "x")


def mark(axes: Any, value: float, place: float) -> None:
    """A black line across the horizontal bar at `place`: a bound."""
    axes.plot([value, value], [place - 0.33, place + 0.33], color=INK, linewidth=1.4)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path)
