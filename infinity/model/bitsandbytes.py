"""bitsandbytes' quantised layers, whose code keeps more of a weight than its Parameter.

`Linear4bit` keeps a view of the weight for backward, on the context of its function, where saved-tensor hooks do not
see it: it would hold the unit's buffer until backward. `Linear8bitLt` keeps a second tensor over the weight's memory,
and computes with it. `Codes` replace both outside of the layer's forward: they read the Parameter when they are used,
which fetches its unit. Both layers assign a cast bias to `bias.data`, which a unit would have to store, and put views
of codes and scales, which are in several units, into a `state_dict`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from infinity.units.compiled import eager, own_name
from infinity.units.released import is_released
from infinity.units.stored import is_wrapper, stored
from infinity.units.unit import placeholder


class Codes(torch.Tensor):
    """Stands for the values of a weight: each operation reads the Parameter, which fetches its unit."""

    _weight: nn.Parameter
    _shape: torch.Size

    @classmethod
    def of(cls, weight: nn.Parameter, shape: torch.Size | None = None) -> Codes:
        """shape: of a contiguous view of the weight."""
        shape, device = shape or weight.shape, weight.device
        made: Any = torch.Tensor._make_subclass(cls, placeholder(tuple(shape), weight.dtype, device))
        made._weight, made._shape = weight, shape
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Codes, Codes._values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _values(self) -> torch.Tensor:
        # Read at each use: the unit is in another buffer by then.
        values = self._weight.data
        return values if values.shape == self._shape else values.view(self._shape)


_FUNCTION = "MatMul4BitBackward"
_STEPS = 2
"""Most nodes between a layer's output and its function: the output may be cast."""


def prepare(model: nn.Module, device: torch.device) -> None:
    """Let no layer of `model` refer to the memory of its weight, and move tables to `device`."""
    for module in _layers(model, "Linear8bitLt"):
        weight, state = module.weight, module.state
        if weight.dtype != torch.int8:
            continue  # not quantised yet, or at each forward
        if weight.CB is not None:
            module.init_8bit_state()  # as in the first forward
        if state.CB is not None:
            state.CB = Codes.of(weight)
        weight.SCB = state.SCB  # units store it with the weight (`infinity.units.stored`)
    for module in _layers(model, "Linear4bit"):
        weight = module.weight
        state = getattr(weight, "quant_state", None)
        if state is None:
            continue
        if getattr(state, "packing_format_for_cpu", False):  # a forward in eval mode has packed it
            layers: Any = sys.modules["bitsandbytes.nn.modules"]
            weight.data, weight.quant_state = layers._convert_weight_packed_for_cpu_inverse(weight.data, state)
            module.quant_state = state = weight.quant_state
        for part in (state, state.state2):
            if part is not None:
                part.code = part.code.to(device)


def restore(model: nn.Module) -> None:
    """Undo `prepare` for layers whose weights have values."""
    for module in _layers(model, "Linear8bitLt"):
        if isinstance(module.state.CB, Codes) and not is_released(module.weight):
            module.state.CB = module.weight.data


def follow(model: nn.Module) -> Iterator[Any]:
    """Yield handles, whose `remove` undoes it, of hooks that let layers compute and keep no view of their weights."""
    for module in _layers(model, "Linear8bitLt"):
        if isinstance(codes := module.state.CB, Codes):
            yield module.register_forward_pre_hook(_show_values)
            yield module.register_forward_hook(partial(_hide_values, codes), always_call=True)
            yield _AtEnd(module, codes)
    for module in _layers(model, "Linear4bit"):
        yield module.register_forward_hook(_hold_no_view)
        yield _Unpacked(module)
    for module in (*_layers(model, "Linear4bit"), *_layers(model, "Linear8bitLt")):
        yield _CopiedStates(module)
        if getattr(module, "bias", None) is not None:
            yield module.register_forward_pre_hook(_lend_bias)
            yield module.register_forward_hook(_take_bias, always_call=True)
            yield _AtEnd(module)


class _AtEnd:
    """Undoes what hooks before a layer's forward did, since a Ctrl-C in it leaves those after it uncalled."""

    def __init__(self, module: Any, codes: Codes | None = None) -> None:
        """codes: of a Linear8bitLt."""
        self._module, self._codes = module, codes

    def remove(self) -> None:
        _take_bias(self._module)
        if self._codes is not None:
            _hide_values(self._codes, self._module)


def quantised(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, layer) of quantised layers, whose `state_dict` holds more than parameters."""
    for path, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None and len(stored(weight)) > 1 and not is_wrapper(weight):
            yield own_name(path), module


def _show_values(module: Any, args: Any) -> None:
    module.state.CB = module.weight.data  # the forward ends with weight.data = state.CB


def _hide_values(codes: Codes, module: Any, args: Any = None, output: Any = None) -> None:
    module.state.CB = codes


@eager
def _lend_bias(module: nn.Module, args: Any) -> None:
    """Lend the layer a tensor with the values of its bias."""
    bias = module._parameters["bias"]
    # The layer assigns the bias, cast to the dtype of its input, to `bias.data`.
    if bias is not None and not bias.requires_grad:
        module.__dict__["bias"] = bias.detach()


@eager
def _take_bias(module: nn.Module, args: Any = None, output: Any = None) -> None:
    module.__dict__.pop("bias", None)


class _Unpacked:
    """Prevents a layer from writing its weight in another layout, as it does in eval mode on some CPUs."""

    def __init__(self, module: Any) -> None:
        self._module, self._before = module, getattr(module, "support_avx512bf16_for_cpu", False)
        module.support_avx512bf16_for_cpu = False

    def remove(self) -> None:
        self._module.support_avx512bf16_for_cpu = self._before


class _CopiedStates:
    """Lets a layer put copies of codes and scales into a `state_dict`, each before another unit is fetched."""

    def __init__(self, module: Any) -> None:
        # The layer's own method makes the entries, and their names differ between releases.
        self._module, save = module, module._save_to_state_dict

        def save_copies(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            save(copies := _Copies(), prefix, keep_vars)
            destination.update(copies)

        module._save_to_state_dict = save_copies

    def remove(self) -> None:
        del self._module._save_to_state_dict


class _Copies(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        # A view would keep the buffer of its unit from being used again.
        is_view = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)  # Parameters: keep_vars=True
        super().__setitem__(key, value.clone() if is_view else value)


def _hold_no_view(module: nn.Module, args: Any, output: Any) -> None:
    """Let the function that made `output` refer to the Parameter, not to a view of its values. A forward hook."""
    node: Any = getattr(output, "grad_fn", None)
    for _ in range(_STEPS):
        if node is None or type(node).__name__ == _FUNCTION:
            break
        node = node.next_functions[0][0] if node.next_functions else None
    if type(node).__name__ != _FUNCTION:
        return
    weight: Any = module._parameters["weight"]
    # Releases differ in the view's shape, and backward looks at it: 0.49 keeps (1, codes), 0.50 (codes, 1).
    if getattr(node, "is_empty", False):  # of an input without rows, such as an expert's without tokens
        node.B = Codes.of(weight, node.B.shape)
    elif (codes := getattr(node, "tensors", (None, None))[1]) is not None:
        node.tensors = (None, Codes.of(weight, codes.shape))


def _layers(model: nn.Module, kind: str) -> Iterator[Any]:
    """Yield the layers of `model` of this class of bitsandbytes, if the process has imported it."""
    library: Any = sys.modules.get("bitsandbytes")
    if library is not None:
        yield from (module for module in model.modules() if isinstance(module, getattr(library.nn, kind)))
