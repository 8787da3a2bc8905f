"""Figures in one style: no frames, grey grids, a title and a subtitle at the top left."""

from __future__ import annotations

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


def mark(axes: Any, value: float, place: float) -> None:
    """A black line across the horizontal bar at `place`: a bound."""
    axes.plot([value, value], [place - 0.33, place + 0.33], color=INK, linewidth=1.4)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path)
