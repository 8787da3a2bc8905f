"""The quality cost of formats of optimizer states: a GPT-2 trained with each of them, by the same recipe.

    python bench/quality.py                                   # 6 kinds × 3 seeds; under 30 minutes on 2 cores
    python bench/quality.py --formats reference 8bit --seeds 1 --steps 600 --name trial

3.3 M parameters learn the source of the Python standard library byte by byte; every tenth file is held out. The same
seed gives every format the same initial weights and the same batches, and seeds the stochastic rounding. `reference` is
bf16 training with an fp32 master and fp32 moments; `torch` is the same without the engine, a plain PyTorch loop: its
master is cast to bf16 by torch (ties to even) and its AdamW rounds at other places, so it shows how far apart rounding
alone drives two runs. `fp32` trains in fp32 altogether, as context.

Runs are processes with one thread each, side by side. A finished run is kept in bench/results/quality.json and not
repeated, so that the study can be stopped and gone on with. Draws quality.md and quality.png from it.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import harness
from gpt2.data import load_corpus
from quality_recipe import FORMATS, Recipe
from quality_train import Run, traffic, train
from report.page import load, publish
from report.quality import is_identical

# -- the study ---------------------------------------------------------------------------------------------------------


class Study:
    """The runs done so far, in a file."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path = path
        self.result: harness.Result = (
            load(path) if path.exists() else {"bench": "quality", "recipe": asdict(recipe), "runs": []}
        )
        self.runs: list[Run] = self.result["runs"]
        self.recipe = recipe
        if self.result["recipe"] != asdict(recipe):
            sys.exit(f"{path} was made with other settings. Give this study another --name, or remove the file.")

    def has(self, name: str, seed: int) -> bool:
        return any((run["format"], run["seed"]) == (name, seed) for run in self.runs)

    def add(self, run: Run) -> None:
        """Keep a run, in the order of formats and seeds; on disk when this returns."""
        order = list(FORMATS)
        self.runs.append(run)
        self.runs.sort(key=lambda run: (order.index(run["format"]), run["seed"]))
        self.save()

    def save(self) -> None:
        """A line for each run. Replaces the file at once, so that being stopped loses nothing."""
        head = json.dumps({key: value for key, value in self.result.items() if key != "runs"}, indent=1)
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        harness.replace_text(self.path, f'{head[:-2]},\n "runs": [\n{lines}\n]\n}}\n')


def child(recipe: Recipe, name: str, seed: int) -> Run:
    """A run in a process of its own, with one thread: two side by side use two cores better than one with two."""
    task = json.dumps({"recipe": asdict(recipe), "name": name, "seed": seed})
    return harness.run_child(__file__, ["--only", task], environment={"OMP_NUM_THREADS": "1"})


def carry_out(study: Study, formats: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
    """All runs that are still to be done, `jobs` at a time."""
    todo = [(name, seed) for name in formats for seed in seeds if not study.has(name, seed)]
    began = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(child, study.recipe, *one) for one in todo]
        try:
            for number, future in enumerate(as_completed(running), 1):
                study.add(future.result())
                minutes = (time.perf_counter() - began) / 60
                left = minutes / number * (len(todo) - number)
                print(f"{number} of {len(todo)} runs, {minutes:.1f} minutes; about {left:.0f} to go", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# -- the command -------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "quality")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="beside the reference")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each format, with seeds 0, 1, ...")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--jobs", type=int, default=harness.cores(), help="runs side by side")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def facts(recipe: Recipe, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return the facts on the page besides the runs: machine, text and traffic."""
    head = harness.head("quality", arguments=arguments)
    hardware = "with" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "without"
    corpus = load_corpus()
    size = f"{len(corpus.train) / 1e6:.1f} MB, {corpus.files} files"
    text = f"the Python {platform.python_version()} standard library ({size})"
    moved = {name: traffic(recipe, name) for name, kind in FORMATS.items() if kind.in_engine}
    machine = f"{head['machine']}, {hardware} instructions for bf16"
    return head | {"machine": machine, "text": text, "traffic": moved}


def main(arguments: Sequence[str] | None = None) -> None:
    logging.getLogger("infinity").setLevel(logging.WARNING)
    args = parse(arguments)
    if args.only:
        torch.set_num_threads(1)
        task = json.loads(args.only)
        print(json.dumps(train(Recipe(**task["recipe"]), task["name"], task["seed"])))
        return
    target = harness.target(args)
    if not args.redraw:
        study = Study(target, Recipe(steps=args.steps))
        if "command" not in study.result:
            study.result |= facts(study.recipe, arguments)
        formats = [name for name in FORMATS if name == "reference" or name in args.formats]
        carry_out(study, formats, range(args.seeds), args.jobs)
    publish(target)
    if not is_identical(load(target), "remainder"):
        sys.exit("remainder and fp32 master differ: they must be the same to the bit")


if __name__ == "__main__":
    main()
