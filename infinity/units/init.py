"""Bring a model's values into their tiers unit by unit, so that construction needs no more memory than training.

A model built on the meta device is initialised here: each unit's modules are given real parameters on the host, initialised, moved to
their tier and let go before the next unit's are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.optim.cpu_adam import split_master
from infinity.tiers.base import Tier
from infinity.tiers.memory import host_tensor
from infinity.tiers.placement import Placement, State, StateFormat, tiles
from infinity.units.layout import UnitLayout


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """How `model` initialises one module: `model.initialize_module`, transformers' `_init_weights`, or `reset_parameters`."""
    for name in ("initialize_module", "_init_weights"):
        own = getattr(model, name, None)
        if callable(own):
            return own  # type: ignore[no-any-return]

    def reset(module: nn.Module) -> None:
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]
        elif next(module.parameters(recurse=False), None) is not None:
            raise ModelError(
                f"{type(module).__name__} was built on the meta device and has no reset_parameters(): give it one, give the model an "
                "initialize_module(module) method, or build the model on the cpu."
            )

    return reset


def materialize(model: nn.Module, root: str, roots: set[str]) -> dict[nn.Parameter, nn.Parameter]:
    """Give the modules that stand at `root`, other units' subtrees left out, real initialised parameters instead of meta ones.

    Returns meta parameter → new parameter. Shared parameters stay shared over the whole model.
    """
    scope = list(_scope(model.get_submodule(root), root, roots))
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in scope:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta and parameter not in replaced:
                real = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                replaced[parameter] = nn.Parameter(real, requires_grad=parameter.requires_grad)
    if not replaced:
        return replaced
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in replaced:
                module._parameters[name] = replaced[parameter]
    initialize = initializer(model)
    for module in scope:
        initialize(module)
    return replaced


def _scope(module: nn.Module, path: str, roots: set[str]) -> Iterator[nn.Module]:
    """Children before parents, as `Module.apply` goes."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path not in roots:
            yield from _scope(child, child_path, roots)
    yield module


def check_buffers(model: nn.Module) -> None:
    """Buffers are not initialised here: one that is still on the meta device is an error."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name} is on the meta device, and only its module knows its values. Compute it under "
                "`with torch.device('cpu')`, or build the model on the cpu."
            )


def stream_in(
    layout: UnitLayout,
    values: Sequence[torch.Tensor],
    placement: Placement,
    tier_of: Callable[[str], Tier],
    states: StateFormat,
    tile_size: int,
    rank: int,
    share: Callable[[torch.Tensor], None],
) -> None:
    """Write one unit's initial values, in slot order, to its tiers: parameters, master or remainder, zero moments.

    share(flat): makes the flat tensor that of the first rank. Peak host memory: the unit in fp32 and in its own dtype.
    """
    source_dtype = torch.float32 if layout.trainable else layout.dtype
    flat = host_tensor(layout.numel * source_dtype.itemsize).view(source_dtype)
    for slot, value in zip(layout.slots, values, strict=True):
        flat[slot.offset : slot.stop].view(slot.shape).copy_(value)
    share(flat)
    low, high = layout.shard_range(rank)
    shard = flat[low:high]
    param_extent = placement.of(layout.index, State.PARAM)
    param_tier = tier_of(param_extent.tier)
    if not layout.trainable:
        param_tier.write(param_extent, shard.view(torch.uint8)).wait()
        return
    kept: torch.Tensor | None = None
    if layout.dtype == torch.float32:
        param = shard
    elif states.kind == "remainder":
        param, kept = split_master(shard)
    else:
        param, kept = split_master(shard)[0], shard
    if param.data_ptr() % 4096 == 0:
        param_tier.write(param_extent, param.view(torch.uint8)).wait()
    else:
        aligned = host_tensor(layout.shard_nbytes)
        aligned.copy_(param.view(torch.uint8))
        param_tier.write(param_extent, aligned).wait()
    _write_states(layout, kept, placement, tier_of, states, tile_size)


def _write_states(
    layout: UnitLayout,
    kept: torch.Tensor | None,
    placement: Placement,
    tier_of: Callable[[str], Tier],
    states: StateFormat,
    tile_size: int,
) -> None:
    extent = placement.of(layout.index, State.OPTIM)
    tier = tier_of(extent.tier)
    cut = tiles(layout.shard_numel, tile_size, states)
    buffer = host_tensor(cut[0].nbytes)
    for tile in cut:
        record = buffer[: tile.nbytes]
        if kept is not None:
            name = states.states[0][0]
            first, length, dtype = tile.state_ranges(states)[name]
            record[first : first + length].view(dtype).copy_(kept[tile.start : tile.stop])
            record[first + length :].zero_()
        tier.write(extent, record, tile.offset).wait()
