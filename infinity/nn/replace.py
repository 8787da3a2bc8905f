"""Replaces large layers of a model by tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from infinity.comm.dtensor import is_plain
from infinity.errors import ModelError, UsageError
from infinity.model.hooks import UnitParameters
from infinity.nn import experts
from infinity.nn.experts import TiledExperts
from infinity.nn.pieces import Tiled
from infinity.nn.tiling import TiledLinear, rows_of, size_of
from infinity.observe.log import logger
from infinity.units.compiled import own_name


def tile(model: nn.Module, max_bytes: int | str) -> list[str]:
    """Replace large `nn.Linear` layers and fused experts of `model` by tiles, in place.

    A linear layer is replaced by a `TiledLinear` if its weight is larger than `max_bytes`, and its weight is cut into
    rows: only outputs are split. Fused experts of `transformers`, tensors (E, …), are replaced by `TiledExperts` if
    they are larger together, and cut between experts. max_bytes: largest weight of a tile, or all tensors of a tile of
    experts, in bytes of the present dtype or as text ("256MiB"). Returns the names of the replaced modules.

    Tiles are views of the layer's memory: nothing is copied. Values on the meta device, sources of `load_pretrained`
    and files of `infinity.Init` stay as they are. Call it before an optimizer or an engine gets the parameters, which
    are new ones. The old layer has no values afterwards. A warning names other parameters that are larger.

    Raises, before any change: UsageError for a model that an engine has, ModelError for a layer that cannot be
    replaced: the model itself, one whose parameters are shared (tied) or no plain tensors, one with hooks, gradients or
    a forward of its own, and one of which a row or an expert is larger than `max_bytes`.
    """
    limit = size_of(max_bytes)
    if any(isinstance(module._parameters, UnitParameters) for module in model.modules()):
        raise UsageError("the model already belongs to an engine: call infinity.nn.tile before infinity.initialize")
    found = {module: own_name(name) for name, module in model.named_modules() if _is_large(module, limit)}
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            names.setdefault(id(parameter), []).append(f"{path}.{name}")
    makers: dict[nn.Module, Callable[[], Tiled]] = {}
    for module, name in found.items():
        made = _problem(model, module, names) or _maker(module, limit)
        if isinstance(made, str):
            raise ModelError(f"{name or 'the model'} cannot be replaced by tiles: {made}.")
        makers[module] = made
    replaced = {module: make() for module, make in makers.items()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    _warn(model, limit)
    return list(found.values())


def _warn(model: nn.Module, limit: int) -> None:
    """Name the parameters that are larger than a tile may be."""
    tiled = {name: module for name, module in model.named_modules() if isinstance(module, Tiled)}
    coarse = [name for name, module in tiled.items() if any(_exceeds(p, limit) for p in module.parameters())]
    if coarse:
        logger.warning(
            "infinity.nn.tile: tiles of an earlier call stay, though they are larger than max_bytes: %s. Tile a model "
            "once, with the smaller max_bytes.",
            ", ".join(coarse),
        )
    own = {id(p) for module in tiled.values() for p in module.parameters()}
    left = [name for name, p in model.named_parameters() if _exceeds(p, limit) and id(p) not in own]
    if left:
        logger.warning(
            "infinity.nn.tile: only plain nn.Linear layers and fused experts of transformers are tiled. Larger than "
            "max_bytes remain: %s",
            ", ".join(left),
        )


def _is_large(module: nn.Module, limit: int) -> bool:
    if experts.is_fused(module):
        return experts.nbytes(module) > limit
    # Subclasses compute something else, or have owners that read their weights.
    if type(module) is not nn.Linear or not isinstance(module._parameters.get("weight"), nn.Parameter):
        return False
    return _exceeds(module.weight, limit)


def _exceeds(parameter: torch.Tensor, limit: int) -> bool:
    return parameter.numel() * parameter.element_size() > limit


def _problem(model: nn.Module, module: nn.Module, names: dict[int, list[str]]) -> str | None:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if module is model:
        return f"it is the model itself. Construct infinity.nn.{_counterpart(module).__name__} in its place"
    for parameter in own:
        holders = names[id(parameter)]
        if len(holders) > 1:
            return f"one parameter is {' and '.join(holders)} (tied weights). Untie them, or raise max_bytes"
        if not is_plain(parameter):
            return f"a parameter is a {type(parameter).__name__}. Replace it before parallelize_module or zero.Init"
        if parameter.grad is not None:
            return "it has a gradient. Call zero_grad(set_to_none=True) first"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return "a parameter has hooks. Register them on the tiles' parameters"
    hooks = (value for name, value in vars(module).items() if name.endswith(("_hooks", "_pre_hooks")))
    if "forward" in vars(module) or any(hooks):
        return "it has hooks, or a forward of its own. Call infinity.nn.tile before they are set"
    return None


def _counterpart(module: nn.Module) -> type[Tiled]:
    return TiledLinear if isinstance(module, nn.Linear) else TiledExperts


def _maker(module: nn.Module, limit: int) -> Callable[[], Tiled] | str:
    """Return the function that makes the tiles of a layer, or why there is none."""
    if not isinstance(module, nn.Linear):
        counts = experts.counts_of(module, limit)
        return counts if isinstance(counts, str) else partial(TiledExperts, module, counts)
    if set(module._parameters) != {"weight", "bias"} or module._buffers or module._modules:
        return "it has other parameters, buffers or modules than nn.Linear"
    width = module.in_features * module.weight.element_size()
    if width > limit:
        return f"one row of the weight has {width} bytes, more than max_bytes ({limit})"
    rows = rows_of(module.in_features, module.out_features, module.bias is not None, width, limit)
    return partial(TiledLinear.of_linear, module, rows)
