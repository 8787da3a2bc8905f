"""Draws the rooms of the package and who imports whom: docs/imports.svg.

    python docs/draw_imports.py

Arrows come from the import statements. Rooms stand in the order of `[tool.importlinter]` in pyproject.toml. An arrow
that runs upwards would be red; `make lint` allows none.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "infinity"
INK, MUTED, UP = "#1f2430", "#9aa5b8", "#e4572e"
SAYS = {
    "cli": "command line, benchmarks",
    "sim": "the engine on a virtual clock",
    "deepspeed": "DeepSpeed's interface, launcher",
    "integrations": "Lightning, DeepSpeed's checkpoints",
    "engine": "engines, step, wiring, optimizer",
    "durable": "runs that outlive a crash",
    "checkpoint": "save, load, export",
    "nn": "layers",
    "construction": "Init, meta device, pretrained values",
    "grads": "collect and store gradients",
    "model": "hooks, saved tensors, graphs",
    "units": "discover, fetch, evict",
    "activations": "saved tensors in host memory or on nvme",
    "update": "stream states through the optimizer",
    "comm": "collectives, agreement, DTensor",
    "optim": "Adam and the other rules",
    "tiers": "device, host, nvme; pools; files",
    "plan": "layouts, placement, pools: pure",
    "config": "JSON to Config",
    "schedule": "trace, phases of a step: pure",
    "observe": "ledger, log",
    "interrupts": "Ctrl-C",
    "concurrency": "threads, locks",
    "rules": "names of optimizer rules",
    "tier_kind": "names of tiers",
    "sizes": "bytes as text",
    "sums": "sums of floats",
    "inputs": "files and variables from outside",
    "outputs": "files that appear whole",
    "errors": "errors",
    "native": "compiled modules",
}


def rooms() -> list[str]:
    """Return the rooms from top to bottom."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers: list[str] = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return layers


def imports() -> Counter[tuple[str, str]]:
    """Return (importing room, imported room) → number of import statements."""
    found: Counter[tuple[str, str]] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _modules(node):
                parts = name.split(".")
                if parts[0] == "infinity" and len(parts) > 1 and parts[1] != room and room != "__init__":
                    found[room, parts[1]] += 1
    return found


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "infinity" else [node.module]
    return []


def draw(path: Path) -> int:
    """Write the picture. Returns the number of upward arrows."""
    order = rooms()
    height = {room: len(order) - 1 - number for number, room in enumerate(order)}
    arrows = {pair: count for pair, count in imports().items() if pair[0] in height and pair[1] in height}
    upward = [pair for pair in arrows if height[pair[1]] >= height[pair[0]]]
    figure = Figure(figsize=(8.2, 10.2), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-5.2, 6.0)
    axes.set_ylim(-0.7, len(order) - 0.1)
    axes.axis("off")
    for room in order:
        y = height[room]
        axes.add_patch(
            FancyBboxPatch(
                (-1.1, y - 0.3), 2.2, 0.6, boxstyle="round,pad=0.02,rounding_size=0.12", facecolor="#eef4fe",
                edgecolor="#2f6fde", linewidth=1.1, zorder=3,
            )
        )  # fmt: skip
        axes.text(0, y, room, ha="center", va="center", fontsize=11, color=INK, zorder=4)
        axes.text(-1.35, y, SAYS[room], ha="right", va="center", fontsize=8.5, color="#56607a")
    for (source, target), count in sorted(arrows.items()):
        start, end = height[source], height[target]
        bad = end >= start
        bend = 0.16 + 0.024 * abs(start - end)
        axes.add_patch(
            FancyArrowPatch(
                (1.14, start), (1.14, end + 0.08), connectionstyle=f"arc3,rad={-bend if not bad else bend}",
                arrowstyle="-|>", mutation_scale=8, linewidth=0.6 + min(count, 40) / 25,
                color=UP if bad else MUTED, alpha=0.75, zorder=2,
            )
        )  # fmt: skip
    said = f"{sum(arrows.values())} imports between rooms, {len(arrows)} arrows, {len(upward)} upwards"
    axes.text(5.9, len(order) - 0.5, said, ha="right", fontsize=10, color=INK)
    mpl.rcParams["svg.hashsalt"] = "infinity"
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return len(upward)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "imports.svg"
    upward = draw(target)
    print(f"{target}: {upward} upward arrows")
    sys.exit(upward > 0)
