"""Memory and bandwidth of transformers by the equations of the ZeRO-Infinity paper, and its tables. Pure.

    python -m infinity.sim.paper    # the tables and the results of the equations, in Markdown

Source: Rajbhandari, Ruwase, Rasley, Smith and He, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
Learning", SC 2021, arXiv 2104.07857. Sections, equations, figures and tables below are those of the paper.

The values in the column "paper" have not been compared with the published PDF yet.

The paper's TB and GB of memory are 2^40 and 2^30 bytes, and its K is 1024. Its bandwidths are decimal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING

import torch

from infinity.errors import ConfigError
from infinity.plan.formats import StateFormat, StateKind
from infinity.plan.grad_dtypes import GradDtypes
from infinity.plan.io import plan_io
from infinity.plan.placement import place
from infinity.plan.plan import Plan
from infinity.rules import RULES

if TYPE_CHECKING:
    from infinity.config import Config

K, GIB, TIB = 1 << 10, 1 << 30, 1 << 40
SEQUENCE = 1024
"""Tokens of a sequence in all figures of sections 3 and 4."""
PEAK = 70e12
"""FLOP/s that a V100 reaches without waiting for data: section 4.2."""
NODE_GPUS = 16
"""GPUs of a DGX-2."""
NODE = {"device": 16 * 32 * 10**9, "host": 15 * 10**11, "nvme": 28 * 10**12}
"""Bytes of each memory of a DGX-2, figure 2b, as the makers of memory and drives count them: no fewer than these."""

BYTES = 20
"""Bytes of model states of a parameter, section 3: parameter and gradient in fp16, and `STATES`."""
STATES = StateFormat(tuple(StateKind(name, torch.float32) for name in ("master", "gradient", "exp_avg", "exp_avg_sq")))
"""Optimizer states as the paper counts them: 16 bytes a parameter, which include a gradient in fp32."""


@dataclass(frozen=True)
class Shape:
    """Transformer of `layers` blocks, and the sequences that it trains on. batch: sequences at once on one device."""

    layers: int
    hidden: int
    heads: int
    sequence: int = SEQUENCE
    batch: int = 1
    interval: int = 1
    """Blocks from one activation checkpoint to the next."""

    @property
    def parameters(self) -> int:
        """Parameters of the blocks' linear layers: equation (1)."""
        return 12 * self.layers * self.hidden**2

    @property
    def model_states(self) -> int:
        """Bytes of parameters, gradients and optimizer states: equation (2)."""
        return BYTES * self.parameters

    @property
    def checkpoints(self) -> int:
        """Bytes of activation checkpoints of `batch` sequences, in fp16: equation (3)."""
        return 2 * self.batch * self.sequence * self.hidden * self.layers // self.interval

    @property
    def model_state_working_memory(self) -> int:
        """Bytes of parameters and gradients of the largest linear layer, hidden → 4 hidden, in fp16: equation (4)."""
        return 4 * self.hidden * 4 * self.hidden

    @property
    def activation_working_memory(self) -> int:
        """Bytes of the activations between two checkpoints: equation (5)."""
        width = 16 * self.hidden + 2 * self.heads * self.sequence
        return self.batch * self.sequence * self.interval * width

    @property
    def activations(self) -> int:
        """Bytes of all activations: equation (5) for every block."""
        return replace(self, interval=1).activation_working_memory * self.layers


def intensity_of_parameters(batch: int, sequence: int = SEQUENCE) -> float:
    """Return FLOPs per byte of parameters and gradients moved: equation (9). batch: sequences on a device."""
    return float(sequence * batch)


def intensity_of_optimizer_states(batch: int, sequence: int = SEQUENCE) -> float:
    """Return FLOPs per byte of optimizer states moved: equation (10)."""
    return sequence * batch / 4


def intensity_of_checkpoints(hidden: int, interval: int = 1) -> float:
    """Return FLOPs per byte of activation checkpoints moved: equation (11)."""
    return 24.0 * hidden * interval


def efficiency(intensity: float, bandwidth: float, peak: float = PEAK) -> float:
    """Return the share of the time that computes if nothing overlaps: equation (6).

    intensity: FLOPs per byte moved. bandwidth: bytes/s. peak: FLOP/s.
    """
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(share: float, intensity: float, peak: float = PEAK) -> float:
    """Return the bytes/s at which `efficiency` is `share`."""
    return share / (1 - share) * peak / intensity


def plan_as_paper(plan: Plan, config: Config) -> Plan:
    """Return `plan` with the paper's formats of gradients and optimizer states. Its buffers are those of the engine.

    Raises ConfigError for a config with other formats, or with a budget, which is filled with the engine's.
    """
    problems = tuple(_contradictions(config))
    if problems:
        raise ConfigError([f"--formats paper: {problem}" for problem in problems])
    policy = replace(
        plan.policy,
        states=lambda dtype: STATES,
        grads=lambda dtype: GradDtypes(dtype, dtype, dtype),
        grads_pass=False,
    )
    placement = place(plan.units, policy)
    return replace(plan, policy=policy, placement=placement, io=plan_io(config, placement, train=True))


def _contradictions(config: Config) -> Iterator[str]:
    """Yield the settings that name other formats than the paper's."""
    section = config.infinity
    if not (config.fp16.enabled or config.bf16.enabled):
        yield 'the paper trains in 16 bits: set "fp16" or "bf16": {"enabled": true}'
    if section.moments != "fp32":
        yield f'infinity.moments is "{section.moments}", and the paper\'s are fp32: remove it'
    if section.master != "fp32" and "master" in section.model_fields_set:
        yield f'infinity.master is "{section.master}", and the paper\'s is fp32: remove it'
    if not RULES[config.optimizer.rule].is_adam:
        yield f'optimizer.type is "{config.optimizer.type}", and the paper trains with Adam: set "Adam" or "AdamW"'
    budgets = section.memory.model_dump(include={"device", "device_optimizer", "host", "host_params"})
    for name in (name for name, value in budgets.items() if value is not None):
        yield f"infinity.memory.{name} is filled with the engine's formats: remove it"


# -- the paper's tables ------------------------------------------------------------------------------------------------

COLUMNS = {
    "parameters (T)": "(1)",
    "model states (TB)": "(2)",
    "activations (TB/node)": "(5) × layers",
    "activation checkpoints (TB/node)": "(3)",
    "model state working memory (GB/GPU)": "(4)",
    "activation working memory (GB/GPU)": "(5)",
}
"""Columns of figure 2a, and the equation of each."""
_NODE_BATCH = 32
"""Sequences of a node for activation checkpoints: section 3."""
_GPU_BATCH = 4
"""Sequences of a GPU for working memory. Section 3 says 2 to 4; the printed digits are those of 4. Activations of a
node are those of 16 GPUs, so of 64 sequences, which the paper does not say."""

FIGURE_2A: dict[Shape, tuple[str, ...]] = {
    Shape(80, 10 * K, 128): ("0.10", "1.83", "2.03", "0.05", "1.95", "1.63"),
    Shape(100, 20 * K, 160): ("0.50", "9.16", "3.91", "0.12", "6.25", "2.50"),
    Shape(128, 25 * K, 256): ("1.01", "18.31", "7.13", "0.20", "9.77", "3.56"),
    Shape(195, 64 * K, 512): ("10.05", "182.81", "24.38", "0.76", "64.00", "8.00"),
    Shape(315, 160 * K, 1024): ("101.47", "1845.70", "88.59", "3.08", "400.00", "18.00"),
}
"""Shape → printed digits, by column."""
UNEXPLAINED = {(80, "model state working memory (GB/GPU)"): "1.95 is 20 × hidden²; equation (4) is 16 × hidden²"}
"""(layers, column) → digits of figure 2a that no reading of the equations gives, and why."""


def figure_2a(shape: Shape) -> tuple[str, ...]:
    """Return the digits of figure 2a that the equations give, by column."""
    gpu = replace(shape, batch=_GPU_BATCH)
    return (
        digits(shape.parameters, 10**12),
        digits(shape.model_states, TIB),
        digits(NODE_GPUS * gpu.activations, TIB),
        digits(replace(shape, batch=_NODE_BATCH).checkpoints, TIB),
        digits(shape.model_state_working_memory, GIB),
        digits(gpu.activation_working_memory, GIB),
    )


def digits(nbytes: int, unit: int, places: int = 2) -> str:
    """Return `nbytes` in `unit`, rounded half up."""
    return str((Decimal(nbytes) / unit).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper about bandwidth. holds: the equations agree with it."""

    place: str
    says: str
    gives: str
    """Result of the equations."""
    holds: bool


def claims() -> Iterator[Claim]:
    """Yield the sentences about bandwidths in sections 4.2 and 5.2, and those of table 3."""
    one, two = intensity_of_parameters(1), intensity_of_optimizer_states(2)
    found = efficiency(one, 70e9)
    says = "parameters and gradients, batch 1: over 50 % at 70 GB/s"
    yield Claim("4.2", says, f"{found:.1%}", found > 0.5)
    ratio = bandwidth_for(0.5, intensity_of_optimizer_states(1)) / bandwidth_for(0.5, one)
    yield Claim("4.2", "optimizer states: nearly 4 × that bandwidth for 50 %", f"{ratio:.1f} ×", round(ratio) == 4)
    needed, found = bandwidth_for(0.9, two) / 1e12, efficiency(two, 1.5e12)
    says = "optimizer states, batch 2: 90 % needs nearly 1.5 TB/s"
    yield Claim("4.2", says, f"{needed:.2f} TB/s; {found:.1%} at 1.5 TB/s", f"{needed:.1f}" == "1.5")
    found = efficiency(intensity_of_checkpoints(2 * K), 2e9)
    yield Claim("4.2", "checkpoints, hidden 2K: over 50 % at 2 GB/s", f"{found:.1%}", found > 0.5)
    needed = bandwidth_for(0.5, intensity_of_checkpoints(8 * K)) / 1e9
    yield Claim("4.2", "checkpoints, hidden 8K: 50 % needs less than 1 GB/s", f"{needed:.2f} GB/s", needed < 1)
    found = efficiency(intensity_of_checkpoints(8 * K), 3e9)
    yield Claim("5.2", "checkpoints, hidden 8K: over 80 % at 3 GB/s of PCIe", f"{found:.1%}", found > 0.8)
    for factor in (1, 10, 100):
        peak, device = factor * PEAK, factor * 70e9
        found = efficiency(one, device, peak)
        says = f"{peak / 1e15:.2f} PFLOP/s a device: {device / 1e9:.1f} GB/s from GPU to GPU"
        yield Claim("table 3", says, f"{found:.1%} with batch 1", found > 0.5)
        each = factor * 3e9
        found = efficiency(two, 512 * each, peak)
        says = f"{peak / 1e15:.2f} PFLOP/s a device: {each / 1e9:.1f} GB/s of slow memory, on each of 512"
        yield Claim("table 3", says, f"{found:.1%} for optimizer states, batch 2", found > 0.9)


def tables() -> Iterator[str]:
    """Yield the lines of both tables in Markdown. Digits in bold are those that differ."""
    yield _row(("layers", "hidden", "heads", "from", *COLUMNS))
    yield _row(("---:",) * 3 + ("---",) + ("---:",) * len(COLUMNS))
    for shape, printed in FIGURE_2A.items():
        computed = figure_2a(shape)
        marked = [mine if mine == theirs else f"**{mine}**" for mine, theirs in zip(computed, printed, strict=True)]
        yield _row((str(shape.layers), f"{shape.hidden // K}K", str(shape.heads), "paper", *printed))
        yield _row(("", "", "", "equations", *marked))
    yield ""
    for (layers, column), reason in UNEXPLAINED.items():
        yield f"{layers} layers, {column}: {reason}."
    yield ""
    yield _row(("section", "paper", "equations", "agree"))
    yield _row(("---",) * 4)
    for claim in claims():
        yield _row((claim.place, claim.says, claim.gives, "yes" if claim.holds else "**no**"))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(*tables(), sep="\n")
