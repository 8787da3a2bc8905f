"""Names and values that a model under peft's LoRA has once the adapters are merged, without a change of the model.

peft's own code merges: `merge` runs on a copy of one layer, whose parameters are copies, so every value has the bits of
`merge_and_unload()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.nn.experts import ExpertsTile
from infinity.nn.pieces import Tiled
from infinity.nn.tiling import LinearTile
from infinity.units.compiled import own_name

_BASE = "base_layer."
Read = Callable[[nn.Parameter], torch.Tensor]
_UNMERGED = "pass merge_adapters=False, which yields the base and the adapters under their own names"


@dataclass(frozen=True)
class Merge:
    """The merge of a layer's active adapters into one parameter of its base layer."""

    layer: Any
    adapters: tuple[str, ...]
    name: str
    """Name of the parameter in the base layer."""

    def _written(self) -> list[str]:
        """Return the parameters of the base layer that peft's `merge` writes."""
        base, wrapped = self.layer.get_base_layer(), getattr(self.layer, "parameter_name", None)
        return [wrapped] if wrapped else [name for name in ("weight", "bias") if getattr(base, name, None) is not None]

    @torch.no_grad()
    def value(self, read: Read) -> torch.Tensor:
        """Return the merged parameter. Needs memory for three of the parameter. read: returns a copy of a parameter."""
        base = self.layer.get_base_layer()
        owned = {name: _own(read(getattr(base, name))) for name in self._written()}
        # The adapters too, since peft assigns them again after a cast to fp32.
        children = {name: _copy(child, read) for name, child in self.layer._modules.items() if name != "base_layer"}
        children["base_layer"] = _like(base, _parameters={**base._parameters, **owned})
        layer: Any = _like(self.layer, _modules=children, merged_adapters=[], _caches={})
        layer.merge(adapter_names=list(self.adapters))
        return owned[self.name].data


def _own(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _like(module: nn.Module, **attributes: Any) -> nn.Module:
    """Return a module with the attributes of `module`, but for these."""
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__ | attributes)
    return copied


def _copy(module: nn.Module | None, read: Read) -> nn.Module | None:
    """Return a module whose parameters, also those of its children, are copies."""
    if module is None:
        return None
    parameters = {name: None if p is None else _own(read(p)) for name, p in module._parameters.items()}
    return _like(
        module, _parameters=parameters, _modules={name: _copy(child, read) for name, child in module._modules.items()}
    )


class Adapters:
    """The adapters in a model. Raises ModelError, which names the layer, if peft cannot merge one.

    merge: False: keep all names, merge nothing, and refuse nothing.
    """

    def __init__(self, model: nn.Module, *, merge: bool) -> None:
        self.merges: dict[int, Merge] = {}
        """id(parameter of a base layer) → how it is merged."""
        self._rules: dict[str, Callable[[str], str | None]] = {}
        """Path of a module → the new name below it, for a name below it; None: it does not exist after a merge."""
        tuners: Any = sys.modules.get("peft.tuners.tuners_utils") if merge else None
        if tuners is None:
            return
        from peft import PeftMixedModel, PeftModel
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        for path, module in model.named_modules(remove_duplicate=False):
            path = own_name(f"{path}.").removesuffix(".")
            if isinstance(module, (PeftModel, PeftMixedModel)):
                if isinstance(module, PeftModel) and module.active_peft_config.is_prompt_learning:
                    raise _refusal(path or "the model", f"has {module.peft_type} prompts, which are no weights")
                self._rules[path] = _after("base_model.model.")
            elif isinstance(module, ModulesToSaveWrapper):
                _check_enabled(path, module)
                active = module.active_adapters
                self._rules[path] = _after(f"modules_to_save.{active[0]}." if active else "original_module.")
            elif isinstance(module, AuxiliaryTrainingWrapper):
                raise _refusal(path, f"is a {type(module).__name__}")
            elif isinstance(module, tuners.BaseTunerLayer):
                self._rules[path] = _after(_BASE)
                for found in _merges(path, module):
                    key = id(getattr(module.get_base_layer(), found.name))
                    if self.merges.setdefault(key, found).layer is not module:
                        raise _refusal(path, f"adapts {found.name}, which another adapted layer shares,")

    def name(self, name: str) -> str | None:
        """Return the name that a parameter or buffer has after the merge; None if it does not exist then."""
        parts = name.split(".")
        for depth in reversed(range(len(parts))):  # the inner module first: it renames what follows its own path
            rule = self._rules.get(".".join(parts[:depth]))
            if rule is not None:
                rest = rule(".".join(parts[depth:]))
                if rest is None:
                    return None
                parts[depth:] = rest.split(".")
        return ".".join(parts)


def _after(prefix: str) -> Callable[[str], str | None]:
    return lambda rest: rest.removeprefix(prefix) if rest.startswith(prefix) else None


def _merges(path: str, layer: Any) -> Iterator[Merge]:
    """Yield the merges of a layer. Raises ModelError if peft cannot merge it."""
    from peft.tuners.lora import layer as lora

    if type(layer) not in (lora.Linear, lora.Embedding, lora.Conv1d, lora.Conv2d, lora.Conv3d, lora.ParamWrapper):
        raise _refusal(path, f"is a {type(layer).__module__}.{type(layer).__name__}")
    _check_enabled(path, layer)
    active = tuple(
        name
        for name in dict.fromkeys(layer.active_adapters)
        if (name in layer.lora_A or name in layer.lora_embedding_A) and name not in layer.merged_adapters
    )
    if not active:
        return
    base, variants = layer.get_base_layer(), {name: layer.lora_variant.get(name) for name in active}
    for variant in filter(None, variants.values()):
        kind = variant.__name__ if isinstance(variant, type) else type(variant).__name__
        if not kind.startswith("Dora"):
            raise _refusal(path, f"has adapters of the variant {kind}")
    if isinstance(base, (Tiled, LinearTile, ExpertsTile)):
        raise _refusal(path, "is cut into tiles, or is a tile,")
    if getattr(base, "groups", 1) > 1:
        raise _refusal(path, f"is a convolution in {base.groups} groups")
    yield Merge(layer, active, getattr(layer, "parameter_name", "weight"))
    if any(layer.lora_bias.get(name) for name in active):
        if getattr(base, "bias", None) is None:
            raise _refusal(path, "has adapters with a bias, and its base layer has none")
        yield Merge(layer, active, "bias")


def _check_enabled(path: str, layer: Any) -> None:
    if layer.disable_adapters:
        raise ModelError(
            f"the adapters of {path} are disabled, so merged weights would differ from the model's forward: call "
            f"stream_weights() outside of disable_adapter(), or {_UNMERGED}"
        )


def _refusal(path: str, reason: str) -> ModelError:
    return ModelError(f"{path} {reason}, and stream_weights() cannot merge it: {_UNMERGED}")
