"""Constructs the optimizers of torch.optim that a config names in `optimizer.type`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.engine.optimizer.unit_optimizer import ParamGroups, param_groups
from infinity.errors import ConfigError
from infinity.rules import RULES

if TYPE_CHECKING:
    from infinity.config import Config

_OF_ADAM = {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "lr": 3e-4}
_OF_MUON = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.0, "lr": 0.02}
"""Keys of the type Muon, with the defaults of DeepSpeed 0.19.8 (`runtime/zero/muon`)."""
_RATES = {"muon_lr", "adam_lr"}
_METHODS = ("standard", "gram")
_OTHERS = ("embed", "lm_head")
"""Parts of the names of matrices that are not updated by Muon, as in DeepSpeed."""


def configured_optimizers(
    config: Config, model: nn.Module, parameters: ParamGroups | None
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of torch.optim that a config names; none if a native rule updates."""
    # Here, since pydantic takes as long to import as the engine.
    from infinity.config.optimization import TorchOptimizer

    section = config.optimizer
    if isinstance(section, TorchOptimizer):
        return torch_optimizers(section.type, section.params.model_dump(exclude_unset=True), model, parameters)
    if config.infinity.optimizer == "native":
        return []
    if not RULES[section.rule].torch:
        raise ConfigError(
            f'infinity.optimizer is "torch", and torch.optim has no {section.type}: remove it, or pass the optimizer'
        )
    return torch_optimizers(RULES[section.rule].torch, section.hyper().by_key(), model, parameters)


def torch_optimizers(
    kind: str, values: dict[str, Any], model: nn.Module, parameters: ParamGroups | None
) -> list[torch.optim.Optimizer]:
    """Return optimizers of the class `kind`, with the arguments `values`.

    parameters: `model_parameters`. Raises ConfigError for arguments that the class does not take.
    """
    groups = param_groups(model, parameters)
    if kind == "Muon":
        return _muon(values, model, groups)
    try:
        return [getattr(torch.optim, kind)(groups, **values)]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params does not suit torch.optim.{kind}: {error}") from error


def _muon(values: dict[str, Any], model: nn.Module, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    """Return torch.optim.Muon for matrices and AdamW for the rest.

    `use_muon` of a parameter decides, as in DeepSpeed; by default matrices outside of embeddings and the head have it.
    """
    unknown = sorted(values.keys() - _OF_ADAM.keys() - _OF_MUON.keys() - _RATES - {"ns_method"})
    if unknown:
        known = ", ".join(sorted({*_OF_ADAM, *_OF_MUON, *_RATES, "ns_method"}))
        raise ConfigError(f"optimizer.params has {', '.join(unknown)}, and the type Muon takes {known}")
    if values.get("ns_method", "standard") not in _METHODS:
        raise ConfigError(f"optimizer.params.ns_method is {values['ns_method']!r}: give one of {', '.join(_METHODS)}")
    names = {id(p): name for name, p in model.named_parameters()}
    found: list[torch.optim.Optimizer] = []
    for is_muon, defaults, rate in ((True, _OF_MUON, "muon_lr"), (False, _OF_ADAM, "adam_lr")):
        given = {name: values.get(name, default) for name, default in defaults.items()}
        given["lr"] = values.get(rate, given["lr"])
        own = [
            {**group, "params": [p for p in group["params"] if _uses_muon(names[id(p)], p) is is_muon]}
            for group in groups
        ]
        own = [group for group in own if group["params"]]
        if own:
            make = torch.optim.Muon if is_muon else torch.optim.AdamW
            try:
                found.append(make(own, **given))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"optimizer.params does not suit torch.optim.{make.__name__}: {error}") from error
    return found


def _uses_muon(name: str, parameter: nn.Parameter) -> bool:
    chosen = getattr(parameter, "use_muon", None)
    if chosen is None:
        return parameter.dim() == 2 and not any(part in name.lower() for part in _OTHERS)
    if chosen and parameter.dim() != 2:
        raise ConfigError(
            f"{name} has use_muon and the shape {list(parameter.shape)}, and torch.optim.Muon updates matrices: set "
            "use_muon to False"
        )
    return bool(chosen)
