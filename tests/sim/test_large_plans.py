"""Plans of large models on nodes of 16 V100, 1.5 TB of host memory and 28 TB of NVMe: 1 T on one node, 32 T on 32."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from infinity.config import Config
from infinity.engine.optimizer.unit_optimizer import param_groups
from infinity.plan.plan import Plan, make_plan
from infinity.plan.policy import DeviceInfo, RankInfo, compute_dtype
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.units.discover import discover_model, unit_size_of

NODE_GPUS = 16
NODE = {"device": NODE_GPUS * 32 * 10**9, "host": 15 * 10**11, "nvme": 28 * 10**12}
"""Bytes of each memory of a DGX-2."""
V100 = DeviceInfo("cuda", host_addressable=False, nbytes=NODE["device"] // NODE_GPUS)
TILE = 1 << 30
"""Largest bytes of a tile of a linear layer in fp16."""


@dataclass(frozen=True)
class Shape:
    """Transformer of `layers` blocks, trained on `batch` sequences at once on each device."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 1024
    batch: int = 1

    @property
    def checkpoints(self) -> int:
        """Bytes of each block's input in fp16."""
        return 2 * self.batch * self.sequence * self.hidden * self.layers

    @property
    def activation_working_memory(self) -> int:
        """Bytes of one block's activations in fp16."""
        return self.batch * self.sequence * (16 * self.hidden + 2 * self.heads * self.sequence)


ONE_NODE = Shape(128, 25_600, 256, batch=2)
MANY_NODES = Shape(621, 65_536, 512)
"""32 T parameters. One sequence a GPU: the checkpoints of 32 sequences of a node would
be larger than its host memory."""


class Tile(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, device="meta"))
        self.bias = nn.Parameter(torch.empty(rows, device="meta"))


def cut(model: nn.Module, max_bytes: int) -> None:
    """Replace linear layers, `ResidualLinear` too, that are larger than `max_bytes` in fp16 by tiles of their rows."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and 2 * layer.weight.numel() > max_bytes:
                rows, parts = layer.out_features, math.ceil(2 * layer.weight.numel() / max_bytes)
                sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
                setattr(parent, name, nn.ModuleList(Tile(size, layer.in_features) for size in sizes))


@dataclass(frozen=True)
class Planned:
    shape: Shape
    nodes: int
    config: Config
    plan: Plan
    parameters: int

    def on_node(self) -> dict[str, int]:
        """Return the bytes of each memory of a node: states, buffers, checkpoints on the host, one block's activations
        on each device."""
        peak = {tier: NODE_GPUS * nbytes for tier, nbytes in self.plan.peak_nbytes().items()}
        peak["host"] += NODE_GPUS * self.shape.checkpoints
        peak["device"] += NODE_GPUS * self.shape.activation_working_memory
        return peak


def plan_on_nvme(shape: Shape, nodes: int, *, precision: str = "fp16", tile: int | None = TILE) -> Planned:
    """Plan a GPT-2 of `shape` with all states on nvme, in fp32 moments."""
    with torch.device("meta"):
        model = GPT2(
            GPT2Config(
                num_layers=shape.layers,
                hidden_size=shape.hidden,
                num_attention_heads=shape.heads,
                seq_length=shape.sequence,
                tie_word_embeddings=tile is None,
            )
        )
    if tile is not None:
        cut(model, tile)
    ranks, nvme = nodes * NODE_GPUS, {"device": "nvme", "nvme_path": "/states"}
    config = Config.load(
        {
            precision: {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "train_batch_size": ranks * shape.batch,
            "train_micro_batch_size_per_gpu": shape.batch,
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
            "infinity": {"speculate": False},
        }
    )
    groups, dtype = param_groups(model, None), compute_dtype(config)
    unit_size = unit_size_of("auto", model, 2, V100.usable)
    units = discover_model(model, unit_size, groups, dtype=dtype, copies=lambda parameter: 1)
    plan = make_plan(config, units.discovered, RankInfo(ranks, ranks, "nccl"), V100)
    return Planned(shape, nodes, config, plan, sum(p.numel() for p in model.parameters()))


def fits(needed: dict[str, int]) -> dict[str, bool]:
    return {tier: nbytes <= NODE[tier] for tier, nbytes in needed.items()}


@pytest.fixture(scope="module")
def trillion() -> Planned:
    return plan_on_nvme(ONE_NODE, 1)


def test_a_trillion_parameters_fit_one_node(trillion: Planned) -> None:
    needed = trillion.on_node()
    assert trillion.parameters > 1e12
    assert all(fits(needed).values()), needed
    assert 16 * trillion.parameters <= needed["nvme"] <= 16.01 * trillion.parameters


def test_bf16_takes_fourteen_bytes_a_parameter() -> None:
    found = plan_on_nvme(replace(ONE_NODE, batch=1), 1, precision="bf16")
    needed = found.on_node()
    assert all(fits(needed).values()), needed
    assert 14 * found.parameters <= needed["nvme"] <= 14.01 * found.parameters


def test_layers_of_a_trillion_parameters_fit_no_device_whole() -> None:
    """Four gradients and three weights of 25,600 × 102,400 are on the device at once: 37 GB."""
    needed = plan_on_nvme(ONE_NODE, 1, tile=None).on_node()
    assert fits(needed) == {"device": False, "host": True, "nvme": True}


@pytest.mark.campaign
@pytest.mark.slow  # as many units as the model of one node, five times over
def test_32_trillion_parameters_fit_32_nodes() -> None:
    found = plan_on_nvme(MANY_NODES, 32, tile=2 * TILE)
    needed = found.on_node()
    assert found.parameters > 32e12
    assert all(fits(needed).values()), needed
    assert 32 * needed["nvme"] <= 16.1 * found.parameters
