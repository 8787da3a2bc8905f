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
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
from checkout import REPOSITORY, checked_out, run_with, use
from report.overhead import show
from report.page import publish

Sample = dict[str, float]


@dataclass(frozen=True)
class Measurement:
    """A model and the tier of its states. device: a device name as in the config; None: the plain loop."""

    model: str
    size: int
    device: str | None
    steps: int = 30
    unit_size: int = 1 << 10
    cache_bytes: int | None = None
    """As in the config; None: its default."""

    @property
    def plain(self) -> Measurement:
        return replace(self, device=None)

    @property
    def plain_name(self) -> str:
        return f"plain: {self.model} {self.size}"


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
    parser = harness.make_parser(__doc__, "overhead")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), help="what to measure")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit too, in the same rounds")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--profile", choices=MEASUREMENTS, help="print where the steps of one measurement spend time")
    parser.add_argument("--out", action="store_true", help="write the result files")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # one measurement, as JSON
    return parser.parse_args()


# -- in the measuring process ------------------------------------------------------------------------------------------


def measure(what: Measurement, nvme_path: str, around: Callable[[Callable[[], None]], None] | None = None) -> Sample:
    """Return median seconds of a step and, for an engine, of `initialize` and `close`.

    around: called with a function that runs the counted steps, instead of timing them; it must call the function.
    """
    import torch

    from overhead_models import build

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
        around(lambda: _repeat(engine_step, what.steps))
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


def _repeat(step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        step()


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


def child(what: Measurement, tree: Path, nvme_path: str) -> Sample:
    request = json.dumps({"what": vars(what), "tree": str(tree)})
    arguments = ["--child", request, "--nvme-path", nvme_path]
    return run_with(tree, __file__, arguments)


def serve(request: dict[str, Any], nvme_path: str) -> Sample:
    what = Measurement(**request["what"])
    if what.device is not None:
        use(Path(request["tree"]))
    return measure(what, nvme_path)


def kinds(names: list[str], trees: dict[str, Path]) -> dict[str, tuple[Measurement, Path]]:
    """Return the runs: the plain loops, and each measurement with each tree, named "<tree>: <measurement>"."""
    found: dict[str, tuple[Measurement, Path]] = {}
    for name in names:
        what = MEASUREMENTS[name]
        found.setdefault(what.plain_name, (what.plain, REPOSITORY))
        found |= {f"{tree}: {name}": (what, path) for tree, path in trees.items()}
    return found


def measure_all(args: argparse.Namespace) -> harness.Result:
    with checked_out(args.against) if args.against else nullcontext(REPOSITORY) as tree:
        trees = {"now": REPOSITORY} | ({args.against: tree} if args.against else {})
        todo = kinds(args.only, trees)
        run = partial(_run_kind, todo, args.nvme_path)
        samples = harness.collect(todo, args.rounds, run, lambda found: f"{1e3 * found['step']:9.2f} ms")
    rows = [
        {"measurement": name, "tree": tree, "plain": MEASUREMENTS[name].plain_name}
        for name in args.only
        for tree in trees
    ]
    return {**harness.head("overhead", path=args.nvme_path), "rows": rows, "samples": samples}


def _run_kind(todo: dict[str, tuple[Measurement, Path]], nvme_path: str, kind: str) -> Sample:
    return child(*todo[kind], nvme_path)


def main() -> None:
    args = arguments()
    target = harness.target(args)
    if args.child:
        print(json.dumps(serve(json.loads(args.child), args.nvme_path)))
    elif args.profile:
        profile(MEASUREMENTS[args.profile], args.nvme_path)
    elif args.redraw:
        publish(target)
    else:
        result = measure_all(args)
        show(result)
        if args.out:
            harness.write_json(target, result)
            publish(target)


if __name__ == "__main__":
    main()
