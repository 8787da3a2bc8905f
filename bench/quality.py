"""What the formats of optimizer states cost in quality: a GPT-2 trained with each of them, by the same recipe.

    python bench/quality.py                                   # 6 kinds × 3 seeds; under 30 minutes on 2 cores
    python bench/quality.py --formats reference 8bit --seeds 1 --steps 600 --name trial

3.3 M parameters learn the source of the Python standard library byte by byte; every tenth file is held out. The same
seed gives every format the same initial weights and the same batches, and seeds the stochastic rounding. `reference` is
bf16 training with an fp32 master and fp32 moments; `torch` is the same without the engine, a plain PyTorch loop: its
master is cast to bf16 by torch (ties to even) and its AdamW rounds at other places, so it shows how far apart rounding
alone drives two runs. `fp32` trains in fp32 altogether, as context.

Runs are processes with one thread each, side by side. A finished run is kept in bench/results/quality.json and not
repeated, so that the study can be stopped and gone on with. Writes quality.json, quality.md and quality.png there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import infinity
from infinity.config import Config
from infinity.engine.lr import make_scheduler
from infinity.gpt2.data import VOCAB_SIZE, TokenDataset, load_corpus
from infinity.gpt2.model import GPT2, GPT2Config
from infinity.gpt2.plots import GRID, INK, MUTED, running_mean
from infinity.plan.formats import MasterFormat, state_format
from infinity.rules import MomentFormat

RESULTS = Path(__file__).parent / "results"
MEASUREMENTS = 10
"""How often a run measures its held-out loss."""
ALLOWED = 1.0
"""Per cent of the reference's final held-out loss that the mean of a format may differ by."""
Run = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How a run keeps its parameters and optimizer states."""

    title: str
    colour: str
    dtype: torch.dtype = torch.bfloat16
    master: MasterFormat = "remainder"
    moments: MomentFormat = "fp32"
    in_engine: bool = True

    @property
    def state_bytes(self) -> float:
        """Of a parameter, beside the parameter itself."""
        return state_format(self.dtype, self.master, "adamw", self.moments).bytes_per_element


FORMATS = {
    "reference": Format("fp32 master, fp32 moments", INK, master="fp32"),
    "remainder": Format("remainder, fp32 moments", "#8db8f5"),
    "bf16": Format("remainder, bf16 moments", "#2f6fde", moments="bf16"),
    "8bit": Format("remainder, 8-bit moments", "#e4572e", moments="8bit"),
    "torch": Format("plain PyTorch, fp32 master and moments", "#9aa3af", master="fp32", in_engine=False),
    "fp32": Format("fp32 throughout", "#c9a227", dtype=torch.float32),
}


@dataclass(frozen=True)
class Recipe:
    """What all runs have in common."""

    steps: int = 800
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    sequence: int = 128
    batch: int = 8
    lr: float = 1e-3
    held_out_windows: int = 512

    @property
    def shape(self) -> GPT2Config:
        return GPT2Config(
            vocab_size=VOCAB_SIZE,
            seq_length=self.sequence,
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
        )

    def config(self, kind: Format, seed: int, place: dict[str, str] | None = None) -> Config:
        """The engine's configuration. place: where optimizer states live."""
        schedule = {"total_num_steps": self.steps, "warmup_num_steps": self.steps // 10}
        return Config.load(
            {
                "steps_per_print": 0,
                "train_batch_size": self.batch,
                "gradient_clipping": 1.0,
                "bf16": {"enabled": kind.dtype == torch.bfloat16},
                "optimizer": {"type": "AdamW", "params": {"lr": self.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": schedule | {"warmup_type": "linear", "cos_min_ratio": 0.1},
                },
                "zero_optimization": {"stage": 3, "offload_optimizer": place or {"device": "cpu"}},
                "infinity": {"master": kind.master, "moments": kind.moments, "seed": seed, "adam_threads": 1},
            }
        )


# -- one run -----------------------------------------------------------------------------------------------------------


class EngineLoop:
    """Training in the engine."""

    def __init__(self, model: GPT2, config: Config) -> None:
        self.engine, *_ = infinity.initialize(model, config)

    def learn(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())

    def loss(self, inputs: Tensor, targets: Tensor) -> float:
        return float(self.engine(inputs, targets).item())

    def fingerprint(self) -> str:
        """Of the exact fp32 values of all parameters and of their moments: of the bytes of a checkpoint."""
        digest = hashlib.sha256()
        with tempfile.TemporaryDirectory() as folder:
            path = self.engine.save_checkpoint(folder)
            for file in sorted(path.glob("unit-*.safetensors")):
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def close(self) -> None:
        self.engine.close()


class PlainLoop:
    """The same by hand: a bf16 model, fp32 masters, torch's fused AdamW, clipping and cast."""

    def __init__(self, model: GPT2, config: Config) -> None:
        params = config.optimizer.params.model_dump()
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, **params, fused=True)
        self.schedule = make_scheduler(self.optimizer, config.scheduler, params["lr"])
        self.clip = config.gradient_clipping
        self.model = model.bfloat16()

    def learn(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self.model(inputs, targets)
        loss.backward()
        parameters = list(self.model.parameters())
        for parameter, master in zip(parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        assert self.schedule is not None
        self.schedule.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, self.masters, strict=True):
                parameter.copy_(master)
        return float(loss.item())

    def loss(self, inputs: Tensor, targets: Tensor) -> float:
        return float(self.model(inputs, targets).item())

    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(master.detach().numpy().tobytes() for master in self.masters)).hexdigest()

    def close(self) -> None:
        pass


def train(recipe: Recipe, name: str, seed: int) -> Run:
    """One run: its training losses, held-out losses as (step, loss), and what it took."""
    kind, corpus = FORMATS[name], load_corpus()
    text = TokenDataset(corpus.train, recipe.sequence, seed)
    held_out = TokenDataset(corpus.held_out, recipe.sequence).spread(recipe.held_out_windows)
    torch.manual_seed(seed)
    loop = (EngineLoop if kind.in_engine else PlainLoop)(GPT2(recipe.shape), recipe.config(kind, seed))
    began, cpu_began = time.perf_counter(), time.process_time()
    losses: list[float] = []
    measured: list[tuple[int, float]] = []
    between = max(1, recipe.steps // MEASUREMENTS)
    for step in range(1, recipe.steps + 1):
        losses.append(loop.learn(*text.batch((step - 1) * recipe.batch, recipe.batch)))
        if step % between == 0 or step == recipe.steps:
            measured.append((step, measure(loop, held_out)))
            print(f"{name:>9}, seed {seed}: step {step:4}, held-out loss {measured[-1][1]:.4f}", file=sys.stderr)
    run = {
        "format": name,
        "seed": seed,
        "losses": [float(str(np.float32(loss))) for loss in losses],  # the fewest digits that are this fp32 value
        "held_out": measured,
        "fingerprint": loop.fingerprint(),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
    }
    loop.close()
    return run


@torch.no_grad()
def measure(loop: EngineLoop | PlainLoop, held_out: tuple[Tensor, Tensor], rows: int = 32) -> float:
    """Mean loss over the windows, in nats; all runs measure the same ones."""
    parts = list(zip(*(half.split(rows) for half in held_out), strict=True))
    return sum(loop.loss(inputs, targets) * len(inputs) for inputs, targets in parts) / len(held_out[0])


def traffic(recipe: Recipe, name: str, steps: int = 3) -> float:
    """Bytes of optimizer state that a step reads and writes, per parameter: measured with the states on NVMe, without
    clipping, whose waiting gradients would be counted too.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = recipe.config(FORMATS[name], 0, {"device": "nvme", "nvme_path": folder})
        loop = EngineLoop(GPT2(recipe.shape), config.model_copy(update={"gradient_clipping": 0.0}))
        tokens = torch.zeros(recipe.batch, recipe.sequence, dtype=torch.int64)
        loop.learn(tokens, tokens)
        loop.engine.settle()
        before = loop.engine.ledger.snapshot()
        for _ in range(steps):
            loop.learn(tokens, tokens)
        loop.engine.settle()
        moved = loop.engine.ledger.snapshot() - before
        loop.close()
    return (moved.nvme_bytes_read + moved.nvme_bytes_written) / steps / recipe.shape.num_parameters


# -- the study ---------------------------------------------------------------------------------------------------------


class Study:
    """The runs done so far, in a file."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path = path
        saved = json.loads(path.read_text()) if path.exists() else {}
        if saved and saved["recipe"] != asdict(recipe):
            sys.exit(f"{path} was made with other settings: give this study another --name, or remove the file")
        self.head: dict[str, Any] = saved.get("head", {})
        self.runs: list[Run] = saved.get("runs", [])
        self.recipe = recipe

    def has(self, name: str, seed: int) -> bool:
        return any((run["format"], run["seed"]) == (name, seed) for run in self.runs)

    def of(self, name: str) -> list[Run]:
        return sorted((run for run in self.runs if run["format"] == name), key=lambda run: int(run["seed"]))

    def formats(self) -> list[str]:
        """Those that were run with all seeds."""
        seeds = len(self.of("reference"))
        return [name for name in FORMATS if seeds and len(self.of(name)) == seeds]

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.save()

    def save(self) -> None:
        """One line for each run; a file that is there is replaced at once, so that being stopped loses nothing."""
        order = list(FORMATS)
        runs = sorted(self.runs, key=lambda run: (order.index(run["format"]), run["seed"]))
        text = ",\n".join(json.dumps(run) for run in runs)
        recipe, head = json.dumps(asdict(self.recipe)), json.dumps(self.head)
        partial = self.path.with_suffix(".partial")
        partial.write_text(f'{{"recipe": {recipe},\n"head": {head},\n"runs": [\n{text}\n]}}\n')
        partial.replace(self.path)


def child(recipe: Recipe, name: str, seed: int) -> Run:
    """A run in a process of its own, with one thread: two side by side use two cores better than one with two."""
    task = json.dumps({"recipe": asdict(recipe), "name": name, "seed": seed})
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--only", task]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


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


def differences(study: Study, name: str, at: int = -1) -> list[float]:
    """Held-out loss of the format less that of the reference with the same seed, in % of the latter, by seed."""
    found = []
    for run, reference in pairs(study, name):
        found.append(100 * (run["held_out"][at][1] / reference["held_out"][at][1] - 1))
    return found


def pairs(study: Study, name: str) -> list[tuple[Run, Run]]:
    """(run, reference run of the same seed)"""
    references = {run["seed"]: run for run in study.of("reference")}
    return [(run, references[run["seed"]]) for run in study.of(name) if run["seed"] in references]


def is_identical(study: Study, name: str) -> bool:
    """Every loss of every step, and the states left at the end, are those of the reference, to the bit."""
    keys = ("losses", "held_out", "fingerprint")
    return all(run[key] == reference[key] for run, reference in pairs(study, name) for key in keys)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(study: Study) -> str:
    recipe, head = study.recipe, study.head
    names = study.formats()
    seeds = [run["seed"] for run in study.of("reference")]
    tokens = recipe.batch * recipe.sequence
    cpu = sum(run["cpu_seconds"] for name in names for run in study.of(name))
    steps_take = " and ".join(
        f"{seconds_a_step(study, name):.2f} s in {dtype}"
        for name, dtype in (("reference", "bf16"), ("fp32", "fp32"))
        if name in names
    )
    lines = [
        "# Quality of the formats of optimizer states",
        "",
        f"`{head['command']}` on {head['machine']}.",
        "",
        f"GPT-2 of {recipe.shape.num_parameters / 1e6:.2f} M parameters ({recipe.layers} layers, hidden "
        f"{recipe.hidden}, sequence {recipe.sequence}), {recipe.steps} steps of {tokens:,} bytes of {head['text']}. "
        f"AdamW, lr {recipe.lr:g} with warm-up and cosine, betas 0.9 and 0.95, weight decay 0.1, gradient clipping "
        f"1.0; parameters and gradients in bf16{', but for the last row' if 'fp32' in names else ''}. Held-out loss, "
        f"in nats a byte, over {recipe.held_out_windows * recipe.sequence:,} bytes of files that are not trained on. "
        "Same seed, same initial weights and batches.",
        "",
        f"| format | state, bytes a parameter | moved a step | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | "
        "difference to the reference | spread between seeds |",
        "|---|---|---|" + "---|" * (len(seeds) + 3),
        *(row(study, name) for name in names),
        "",
        "State: master or remainder, and moments, beside the parameter itself. Moved: bytes of it read and written a "
        "step and parameter, measured with the states on NVMe. Difference: mean over seeds, in brackets the smallest "
        "and the largest. Spread: largest less smallest loss, in % of the mean.",
        "",
        *verdicts(study, names),
        "",
        f"The {len(names) * len(seeds)} runs took {cpu / 60:.1f} minutes of CPU time, one thread each, so about "
        f"{cpu / 120:.0f} minutes on two cores that do nothing else. For a step, that is {steps_take}, its share of "
        "measuring held-out loss included.",
        "",
        "![Loss curves](quality.png)",
        "",
    ]
    return "\n".join(lines)


def row(study: Study, name: str) -> str:
    kind, finals = FORMATS[name], finals_of(study, name)
    mean = statistics.fmean(finals)
    found = differences(study, name)
    seen = f"{statistics.fmean(found):+.2f} % ({min(found):+.2f} to {max(found):+.2f})" if name != "reference" else "—"
    if name == "remainder" and is_identical(study, name):
        seen = "0, every bit equal"
    moved = study.head["traffic"].get(name)
    cells = [
        f"{kind.title}{' (reference)' if name == 'reference' else ''}",
        f"{kind.state_bytes:.4g}",
        "—" if moved is None else f"{moved:.2f}",
        *(f"{loss:.4f}" for loss in finals),
        f"**{mean:.4f}**",
        seen,
        f"{100 * (max(finals) - min(finals)) / mean:.2f} %",
    ]
    return f"| {' | '.join(cells)} |"


def finals_of(study: Study, name: str) -> list[float]:
    return [run["held_out"][-1][1] for run in study.of(name)]


def seconds_a_step(study: Study, name: str) -> float:
    return statistics.fmean(run["cpu_seconds"] for run in study.of(name)) / study.recipe.steps


def verdicts(study: Study, names: Sequence[str]) -> list[str]:
    """What was expected, and what was seen."""
    lines = []
    if "remainder" in names:
        count = sum(len(run["losses"]) for run in study.of("remainder"))
        lines.append(
            "- **Remainder: the same bits as an fp32 master.** Expected: both hold the same fp32 value, and both round "
            "the parameter that the model sees half away from zero, so nothing can differ. Seen: all "
            f"{count:,} training losses, all held-out losses, and master and moments at the end (the bytes of "
            f"checkpoints) are {'equal' if is_identical(study, 'remainder') else '**NOT equal**'}. A master that torch "
            "casts differs in ties only, which torch rounds to even: for 32,640 of the 2^32 bit patterns of fp32 "
            "ours is the larger in magnitude of two bf16 that are equally near. Reconstruction is tested for all 2^32 "
            "patterns, and by name for zeros, subnormals, ties, the largest finite values, infinities and NaN (which "
            "becomes 0x7FC00000): `tests/optim/test_remainder.py`."
        )
    for name, expected in (
        ("bf16", "8 significant bits, rounded stochastically: each moment is right on average, and a step averages "
                 "over millions of them"),
        ("8bit", "4 or 5 significant bits, a scale for each 256 elements, exp_avg_sq as its root, rounded "
                 "stochastically: still right on average, and noisier"),
    ):  # fmt: skip
        if name in names:
            found = statistics.fmean(differences(study, name))
            verdict = f"within {ALLOWED:g} %" if abs(found) <= ALLOWED else f"**NOT within {ALLOWED:g} %**"
            lines.append(
                f"- **{'bf16' if name == 'bf16' else '8-bit'} moments: {verdict}.** Expected: {expected}. Seen: "
                f"{found:+.2f} % of the reference's final held-out loss."
            )
    if "torch" in names:
        furthest = max(abs(difference) for difference in differences(study, "torch"))
        lines.append(
            "- **How much is noise.** The plain PyTorch loop has the formats of the reference and other last bits; its "
            f"runs end up to {furthest:.2f} % from the reference's of the same seed. Differences of this size say "
            "nothing about a format."
        )
    if "fp32" in names:
        found = statistics.fmean(differences(study, "fp32"))
        lines.append(f"- **bf16 itself.** fp32 throughout ends {found:+.2f} % from the reference.")
    return lines


# -- the picture -------------------------------------------------------------------------------------------------------


def plot(study: Study, path: Path) -> None:
    """Loss curves of all formats, and their held-out loss less that of the reference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    draw_losses(study, figure.add_axes((0.06, 0.21, 0.415, 0.585)))
    draw_differences(study, figure.add_axes((0.56, 0.21, 0.415, 0.585)))
    for axes in figure.axes:
        axes.set_xlabel("step", color=INK, fontsize=9)
        axes.tick_params(colors=MUTED, length=0, labelsize=8.5)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(0, study.recipe.steps * 1.02)
        for spine in axes.spines.values():
            spine.set_visible(False)
    handles, labels = figure.axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=9,
                  labelcolor=INK)  # fmt: skip
    title = "What the formats of optimizer states cost in quality"
    subtitle = (
        f"GPT-2 of {study.recipe.shape.num_parameters / 1e6:.2f} M parameters, {study.recipe.steps} steps; lines are "
        f"means of {len(study.of('reference'))} seeds, bands go from the lowest to the highest seed"
    )
    figure.text(0.06, 0.94, title, fontsize=13, weight="bold", color=INK)
    figure.text(0.06, 0.895, subtitle, fontsize=9.5, color=MUTED)
    figure.savefig(path)


def draw_losses(study: Study, axes: Any) -> None:
    """Training and held-out loss. Curves that lie on one another show as dashes in turn, dots as rings."""
    axes.set_title("loss, nats a byte", loc="left", fontsize=10.5, weight="bold", color=INK)
    axes.annotate("dots: held-out text\nlines: training, running mean", (0.985, 0.965), xycoords="axes fraction",
                  ha="right", va="top", color=MUTED, fontsize=8.5, linespacing=1.5)  # fmt: skip
    names = study.formats()
    window, lowest = max(15, study.recipe.steps // 16), float("inf")
    for place, name in enumerate(names):
        kind, runs = FORMATS[name], study.of(name)
        means, lows, highs = over_seeds([running_mean(run["losses"], window) for run in runs])
        lowest = min(lowest, *lows)
        steps = range(1, len(means) + 1)
        if name == "reference":
            axes.fill_between(steps, lows, highs, color=kind.colour, alpha=0.12, linewidth=0)
        dashes = (4 * place, (4, 4 * (len(names) - 1)))
        axes.plot(steps, means, color=kind.colour, linewidth=2.2, linestyle=dashes, dash_capstyle="butt")
        held_out = over_seeds([[loss for _, loss in run["held_out"]] for run in runs])[0]
        axes.plot([step for step, _ in runs[0]["held_out"]], held_out, color=kind.colour, linestyle="none", marker="o",
                  markersize=11 - 1.7 * place, markeredgewidth=0, clip_on=False)  # fmt: skip
    axes.set_ylim(0.97 * lowest, 1.6 * lowest)  # the first steps fall from chance


def draw_differences(study: Study, axes: Any) -> None:
    """What each format loses or gains, and what is allowed."""
    axes.set_title("held-out loss, % from the reference", loc="left", fontsize=10.5, weight="bold", color=INK)
    axes.axhspan(-ALLOWED, ALLOWED, color=GRID, alpha=0.45, linewidth=0)
    axes.annotate(f"asked for: within {ALLOWED:g} % at the end", (study.recipe.steps, -ALLOWED), xytext=(-4, 6),
                  textcoords="offset points", ha="right", color=MUTED, fontsize=8.5)  # fmt: skip
    for name in study.formats():
        kind, runs = FORMATS[name], study.of(name)
        steps = [step for step, _ in runs[0]["held_out"]]
        by_step = [differences(study, name, at) for at in range(len(steps))]
        means, lows, highs = over_seeds(list(zip(*by_step, strict=True)))
        axes.fill_between(steps, lows, highs, color=kind.colour, alpha=0.12, linewidth=0)
        axes.plot(steps, means, color=kind.colour, linewidth=4 if name == "reference" else 1.9, marker="o",
                  markersize=4.5, markeredgecolor="white", markeredgewidth=0.8, label=kind.title)  # fmt: skip
    furthest = max(abs(limit) for limit in axes.get_ylim())
    axes.set_ylim(-furthest, furthest)


def over_seeds(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """(mean, lowest, highest) of curves, point by point."""
    points = list(zip(*curves, strict=True))
    return [statistics.fmean(p) for p in points], [min(p) for p in points], [max(p) for p in points]


# -- the command -------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="beside the reference")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each format, with seeds 0, 1, ...")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs side by side")
    parser.add_argument("--name", default="quality", help="name of the result files")
    parser.add_argument("--redraw", action="store_true", help="write page and picture of the runs that there are")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def facts(recipe: Recipe, command: str) -> dict[str, Any]:
    """What the page says beside the runs."""
    hardware = "with" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "without"
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores {hardware} instructions for bf16, torch {torch.__version__}"
    corpus = load_corpus()
    size = f"{len(corpus.train) / 1e6:.1f} MB, {corpus.files} files"
    text = f"the Python {platform.python_version()} standard library ({size})"
    moved = {name: traffic(recipe, name) for name, kind in FORMATS.items() if kind.in_engine}
    return {"command": command, "machine": machine, "text": text, "traffic": moved}


def main(arguments: Sequence[str] | None = None) -> None:
    logging.getLogger("infinity").setLevel(logging.WARNING)
    args = parse(arguments)
    if args.only:
        torch.set_num_threads(1)
        task = json.loads(args.only)
        print(json.dumps(train(Recipe(**task["recipe"]), task["name"], task["seed"])))
        return
    study = Study(RESULTS / f"{args.name}.json", Recipe(steps=args.steps))
    if not args.redraw:
        given = sys.argv[1:] if arguments is None else arguments
        study.head = study.head or facts(study.recipe, " ".join(["python bench/quality.py", *given]))
        formats = [name for name in FORMATS if name == "reference" or name in args.formats]
        carry_out(study, formats, range(args.seeds), args.jobs)
    text = page(study)
    study.path.with_suffix(".md").write_text(text)
    plot(study, study.path.with_suffix(".png"))
    print("\n" + text)
    if not is_identical(study, "remainder"):
        sys.exit("remainder and fp32 master differ: they must be the same to the bit")


if __name__ == "__main__":
    main()
