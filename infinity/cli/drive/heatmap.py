"""Draws the sweep of `infinity tune`: a heat map of GB/s for each engine and number of threads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.cli.console import GRID, INK, MUTED
from infinity.cli.drive.search import Setting
from infinity.sizes import format_size

_SHADES = ("#eef4fe", "#a9c6f8", "#2f6fde", "#123a86")
_BEST = "#e4572e"
_CELL_WIDTH, _CELL_HEIGHT = 0.78, 0.5
"""Inches."""


def plot_sweep(
    path: str | os.PathLike[str], gb_per_s: Mapping[Setting, float], *, best: Setting, title: str, subtitle: str = ""
) -> None:
    """Write a picture of `gb_per_s` in the format of `path`'s suffix, with `best` marked. Missing cells stay empty.

    Engine and threads of a setting select the panel, queue depth and block size the cell.
    title, subtitle: plain text. Raises ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyplot would look for a display
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    engines, threads = sorted({c.engine for c in gb_per_s}), sorted({c.threads for c in gb_per_s})
    blocks, depths = sorted({c.block_size for c in gb_per_s}), sorted({c.queue_depth for c in gb_per_s})
    panel_width, panel_height = _CELL_WIDTH * len(blocks), _CELL_HEIGHT * len(depths)
    left, right, top, bottom, gap_x, gap_y = 0.85, 1.15, 1.35, 0.8, 0.3, 0.55
    width = max(left + len(threads) * (panel_width + gap_x) - gap_x + right, 6.4)
    height = top + len(engines) * (panel_height + gap_y) - gap_y + bottom
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    shades = LinearSegmentedColormap.from_list("infinity", _SHADES)
    low, high = min(gb_per_s.values()), max(gb_per_s.values())
    scale = Normalize(low, high if high > low else low + 1e-9)

    for row, engine in enumerate(engines):
        for column, count in enumerate(threads):
            x = left + column * (panel_width + gap_x)
            y = height - top - (row + 1) * panel_height - row * gap_y
            box = (x / width, y / height, panel_width / width, panel_height / height)
            axes: Any = figure.add_axes(box)
            figures = {
                (depths.index(c.queue_depth), blocks.index(c.block_size)): value
                for c, value in gb_per_s.items()
                if (c.engine, c.threads) == (engine, count)
            }
            _draw(axes, figures, (len(depths), len(blocks)), shades, scale)
            if (engine, count) == (best.engine, best.threads):
                corner = blocks.index(best.block_size) + 0.03, depths.index(best.queue_depth) + 0.04
                axes.add_patch(Rectangle(corner, 0.94, 0.92, fill=False, edgecolor=_BEST, linewidth=2.4, zorder=5))
            axes.set_title(f"{engine}, {count} thread{'s' * (count > 1)}", color=INK, fontsize=10, loc="left", pad=6)
            _label(axes, blocks if row == len(engines) - 1 else [], depths if column == 0 else [])
    _key(
        figure, (width - right + 0.3) / width, bottom / height, 0.14 / width, 1 - (top + bottom) / height, shades, scale
    )
    figure.text(left / width, 1 - 0.45 / height, title, color=INK, fontsize=13, weight="bold", parse_math=False)
    figure.text(left / width, 1 - 0.73 / height, subtitle, color=MUTED, fontsize=9.5, parse_math=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters without a glyph are drawn as boxes
        figure.savefig(path)


def _draw(axes: Any, figures: Mapping[tuple[int, int], float], shape: tuple[int, int], shades: Any, scale: Any) -> None:
    from matplotlib.patches import Rectangle

    for row in range(shape[0]):
        for column in range(shape[1]):
            value = figures.get((row, column))
            face = shades(scale(value)) if value is not None else "white"
            axes.add_patch(
                Rectangle((column + 0.03, row + 0.04), 0.94, 0.92, facecolor=face, edgecolor=GRID, linewidth=0.6)
            )
            if value is None:
                axes.text(column + 0.5, row + 0.5, "–", ha="center", va="center", color=GRID, fontsize=9)
            else:
                ink = "white" if scale(value) > 0.45 else INK
                axes.text(
                    column + 0.5,
                    row + 0.48,
                    f"{value:.2f}" if value < 10 else f"{value:.1f}",
                    ha="center",
                    va="center",
                    color=ink,
                    fontsize=9,
                )
    axes.set_xlim(0, shape[1])
    axes.set_ylim(0, shape[0])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=MUTED, length=0, labelsize=9)


def _label(axes: Any, blocks: list[int], depths: list[int]) -> None:
    axes.set_xticks([index + 0.5 for index in range(len(blocks))], [_short(size) for size in blocks])
    axes.set_yticks([index + 0.5 for index in range(len(depths))], [str(depth) for depth in depths])
    if blocks:
        axes.set_xlabel("block size", color=INK, fontsize=9.5)
    if depths:
        axes.set_ylabel("queue depth", color=INK, fontsize=9.5)


def _key(figure: Any, x: float, y: float, width: float, height: float, shades: Any, scale: Any) -> None:
    from matplotlib.cm import ScalarMappable

    axes: Any = figure.add_axes((x, y, width, height))
    bar = figure.colorbar(ScalarMappable(scale, shades), cax=axes)
    bar.outline.set_visible(False)
    axes.tick_params(colors=MUTED, length=0, labelsize=9)
    axes.set_title("GB/s", color=MUTED, fontsize=9, pad=6, loc="left")


def _short(nbytes: int) -> str:
    """ "1MiB" -> "1 MiB"."""
    text = format_size(nbytes)
    digits = text.rstrip("KMGTPiB")
    return f"{digits} {text[len(digits) :]}" if text != digits else text
