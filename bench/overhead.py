"""Host overhead per unit: time of a training step in excess of the plain PyTorch loop's, with tiny units.

    python bench/overhead.py                              # about 3 minutes on 2 cores
    python bench/overhead.py --against 0fdcab5            # interleaved with another commit, about 6 minutes
    python bench/overhead.py --only memory --rounds 3     # one measurement
    python bench/overhead.py --profile memory             # the functions of the model's thread that take longest

Overhead = (median step of the engine - median step of `plain`) / units, where `plain` is the same model with
torch.optim.AdamW. One unit is a Linear of 1 kB; everything runs on one thread of torch. Every measurement runs in a
process of its own, because the engine's saved-tensor hooks would slow the plain loop down. Machines are shared, so the
measurements alternate round by round: compare medians and ratios. CPU time covers all threads of the process.

`--against` checks out the commit's Python sources into a temporary folder and uses this installation's compiled
modules with them, whose interface must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

RESULTS = Path(__file__).parent / "results"
REPOSITORY = Path(__file__).resolve().parent.parent
WIDTH = 16  # a Linear(16, 16) without bias: 1 kB
Sample = dict[str, float]


@dataclass(frozen=True)
class Measurement:
    """A model and the tier of its states. device: a device name as in the config; None: the plain loop."""

    model: str
    size: int
    device: str | None
    steps: int = 30
    unit_size: int = 4 * WIDTH**2
    cache_bytes: int | None = None
    """As in the config; None: its default."""

    @property
    def plain(self) -> Measurement:
        return replace(self, device=None)


MEASUREMENTS = {
    "memory": Measurement("units", 250, "none"),
    "nvme": Measurement("units", 250, "nvme"),
    "memory, none cached": Measurement("units", 250, "none", cache_bytes=0),
    "nvme, none cached": Measurement("units", 250, "nvme", cache_bytes=0),
    "memory, 1,000 units": Measurement("units", 1000, "none", steps=10),
    "memory, 4,000 units": Measurement("units", 4000, "none", steps=4),
    "nvme, 4,000 units": Measurement("units", 4000, "nvme", steps=4),
    "20,000 parameters in a unit": Measurement("parameters", 20_000, "none", steps=4, unit_size=64 << 20),
    "cell unrolled 1,600 times": Measurement("cell", 1600, "none", steps=4),
    "cell unrolled 1,600 times, nvme": Measurement("cell", 1600, "nvme", steps=4),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), help="what to measure")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit too, in the same rounds")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--profile", choices=MEASUREMENTS, help="print where the steps of one measurement spend time")
    parser.add_argument("--out", action="store_true", help="write bench/results/overhead.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # one measurement, as JSON
    return parser.parse_args()


# -- models ------------------------------------------------------------------------------------------------------------


def build(kind: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    """A model and its batch."""
    import torch
    from torch import nn

    def linears(count: int) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    class Units(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = linears(size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    class Parameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.cat(list(self.weights)) * x.sum()).square().mean()

    class Cell(nn.Module):
        """Alternate between the cell's two units; the layers before and after it are used once."""

        def __init__(self) -> None:
            super().__init__()
            self.ends = linears(2)
            self.cell = linears(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = x = self.ends[0](x)
            for _ in range(size):
                state = torch.tanh(self.cell[0](x) + self.cell[1](state))
            end: torch.Tensor = self.ends[1](state).square().mean()
            return end

    torch.manual_seed(0)
    model = {"units": Units, "parameters": Parameters, "cell": Cell}[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.05)
    return model, torch.randn(4, WIDTH)


# -- in the measuring process ------------------------------------------------------------------------------------------


def measure(what: Measurement, nvme_path: str, around: Callable[[Callable[[], None]], None] | None = None) -> Sample:
    """Return median seconds of a step and, for an engine, of `initialize` and `close`.

    around: called with a function that runs the counted steps, instead of timing them; it must call the function.
    """
    import torch

    torch.set_num_threads(1)
    model, batch = build(what.model, what.size)
    sample: Sample = {}
    if what.device is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        sample |= _time(step, what.steps)
        return sample

    import infinity

    began = time.perf_counter()
    engine, *_ = infinity.initialize(model=model, config=_config(what, nvme_path))
    sample["initialize"] = time.perf_counter() - began

    def engine_step() -> None:
        engine.backward(engine(batch))
        engine.step()

    if around is not None:
        _time(engine_step, 1)
        around(lambda: [engine_step() for _ in range(what.steps)] and None)
    else:
        sample |= _time(engine_step, what.steps)
    sample["units"] = len(engine.units)
    began = time.perf_counter()
    engine.close()
    sample["close"] = time.perf_counter() - began
    return sample


def _config(what: Measurement, nvme_path: str) -> dict[str, Any]:
    offload = {"device": what.device, **({"nvme_path": nvme_path} if what.device == "nvme" else {})}
    cache = {} if what.cache_bytes is None else {"cache_bytes": what.cache_bytes}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"adam_threads": 1, "unit_size": what.unit_size, **cache},
    }


def _time(step: Callable[[], None], steps: int) -> Sample:
    """Time steps after two warm-up steps: the first records the trace, the second follows it."""
    wall, cpu = [], []
    for _ in range(steps + 2):
        began, spent = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - spent)
    return {"step": statistics.median(wall[2:]), "cpu": statistics.median(cpu[2:])}


def profile(what: Measurement, nvme_path: str) -> None:
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    measure(what, nvme_path, around=lambda steps: profiler.runcall(steps))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


# -- the rounds --------------------------------------------------------------------------------------------------------


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the commit's sources and this installation's compiled modules."""
    from infinity.native import _adam, _aio

    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            for module in (_adam, _aio):
                assert module.__file__ is not None
                compiled = Path(module.__file__)
                (tree / "infinity" / compiled.name).symlink_to(compiled)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def child(what: Measurement, tree: Path, nvme_path: str) -> Sample:
    request = json.dumps({"what": vars(what), "tree": str(tree)})
    command = [sys.executable, __file__, "--child", request, "--nvme-path", nvme_path]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def serve(request: dict[str, Any], nvme_path: str) -> Sample:
    if Path(request["tree"]) != REPOSITORY:  # an editable installation would be found first
        sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    what = Measurement(**request["what"])
    sample = measure(what, nvme_path)
    if what.device is not None:
        import infinity

        assert Path(infinity.__file__ or "").is_relative_to(request["tree"]), infinity.__file__
    return sample


def rounds(args: argparse.Namespace, trees: dict[str, Path]) -> dict[str, list[Sample]]:
    """Samples of each measurement: of "plain" loops and of each tree, named "<tree>: <measurement>"."""
    kinds: dict[str, tuple[Measurement, Path]] = {}
    for name in args.only:
        what = MEASUREMENTS[name]
        kinds.setdefault(f"plain: {what.model} {what.size}", (what.plain, REPOSITORY))
        kinds |= {f"{tree}: {name}": (what, path) for tree, path in trees.items()}
    samples: dict[str, list[Sample]] = {kind: [] for kind in kinds}
    for number in range(args.rounds):
        for kind, (what, tree) in kinds.items():
            samples[kind].append(child(what, tree, args.nvme_path))
            print(f"round {number + 1}/{args.rounds}  {kind:45} {1e3 * samples[kind][-1]['step']:9.2f} ms", flush=True)
    return samples


# -- the table ---------------------------------------------------------------------------------------------------------


def summarize(args: argparse.Namespace, samples: dict[str, list[Sample]], trees: list[str]) -> list[dict[str, Any]]:
    def median(kind: str, key: str) -> float:
        return statistics.median(sample[key] for sample in samples[kind])

    rows = []
    for name in args.only:
        what = MEASUREMENTS[name]
        plain = f"plain: {what.model} {what.size}"
        for tree in trees:
            kind = f"{tree}: {name}"
            units = median(kind, "units")
            row = {key: median(kind, key) for key in ("initialize", "close", "step", "cpu", "units")}
            row |= {"plain_step": median(plain, "step"), "plain_cpu": median(plain, "cpu")}
            row["overhead"] = (row["step"] - row["plain_step"]) / units
            row["cpu_overhead"] = (row["cpu"] - row["plain_cpu"]) / units
            rows.append({"measurement": name, "tree": tree, **row})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Host overhead")
    titles = "measurement", "code", "units", "initialize s", "close s", "step ms", "plain ms", "ratio to plain"
    for title in (*titles, "overhead ms per unit", "CPU ms per unit", "overhead ratio"):
        table.add_column(title, justify="left" if title in ("measurement", "code") else "right")
    own = {row["measurement"]: row["overhead"] for row in rows if row["tree"] == "now"}
    for row in rows:
        table.add_row(
            row["measurement"],
            row["tree"],
            f"{row['units']:.0f}",
            f"{row['initialize']:.2f}",
            f"{row['close']:.2f}",
            f"{1e3 * row['step']:.1f}",
            f"{1e3 * row['plain_step']:.1f}",
            f"{row['step'] / row['plain_step']:.2f}",
            f"{1e3 * row['overhead']:.3f}",
            f"{1e3 * row['cpu_overhead']:.3f}",
            "" if row["tree"] == "now" else f"now is {own[row['measurement']] / row['overhead']:.2f} of it",
        )
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def main() -> None:
    args = arguments()
    if args.child:
        print(json.dumps(serve(json.loads(args.child), args.nvme_path)))
        return
    if args.profile:
        profile(MEASUREMENTS[args.profile], args.nvme_path)
        return
    trees = {"now": REPOSITORY}
    if args.against:
        with checked_out(args.against) as tree:
            samples = rounds(args, {**trees, args.against: tree})
        trees[args.against] = tree
    else:
        samples = rounds(args, trees)
    rows = summarize(args, samples, list(trees))
    if args.out:
        RESULTS.mkdir(exist_ok=True)
        saved = {"command": f"python bench/overhead.py {' '.join(sys.argv[1:])}", "rows": rows, "samples": samples}
        (RESULTS / "overhead.json").write_text(json.dumps(saved, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
