"""Models of the user's own to plan for: a function in a Python file that returns a module, built on the meta device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.engine.vertical.checks import call
from infinity.errors import ConfigError
from infinity.nn import tile
from infinity.sim.gpt2 import WITH_COMPILER, PlannedModel, language_model

_FORM = "--module takes FILE.py:FUNCTION"
_NAME = "_infinity_planned"
"""Name in sys.modules of the user's file, where dataclasses and pickles look it up."""
_ONLY_SHAPES = ". A plan has shapes and no values: no shape may depend on values"
_OF_VALUES = ("meta tensor", "Meta tensor", "item()", "data-dependent", "DataDependent", "nonzero", "no data!")
"""Parts of torch's errors on the meta device for operations that need values."""


def of_file(
    spec: str, *, sequence: int | None = None, checkpoint: bool = False, tile_bytes: int | None = None
) -> PlannedModel:
    """Return the model that a function of a Python file makes. Runs the file.

    spec: `FILE.py:FUNCTION`. The function is called without arguments under `torch.device("meta")`. It returns
    `(module, inputs)`, where `inputs(batch)` returns the arguments of a forward that returns the loss, for `batch`
    samples, positional ones or a mapping of keyword arguments; or a causal language model of transformers alone, also
    wrapped by PEFT. sequence, checkpoint: as of `of_transformers`, for a language model only. tile_bytes: as of
    `gpt2`. Raises ConfigError, which names the problem.
    """
    file, _, name = spec.rpartition(":")
    if not file or not name.isidentifier():
        raise ConfigError(f"{_FORM}, such as model.py:build, not {spec!r}.")
    make = getattr(_imported(Path(file), spec), name, None)
    if not callable(make):
        raise ConfigError(f"--module {spec}: {file} has no function {name}.")
    made = _called(f"--module {spec}: {name}()", make)
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"--module {spec}: {name}() returns {_kind(made)}. Return (module, inputs), where module is an nn.Module "
            "and inputs(batch) the arguments of its forward."
        )
    _check_on_meta(spec, module)
    if tile_bytes is not None:
        tile(module, tile_bytes)
    title = type(module).__name__
    if inputs is None:
        if not hasattr(getattr(module, "config", None), "vocab_size"):
            raise ConfigError(
                f"--module {spec}: {name}() returns {title} without inputs. Return (module, inputs), where "
                "inputs(batch) returns the arguments of its forward; only language models of transformers need none."
            )
        return language_model(title, module, sequence=sequence, checkpoint=checkpoint)
    given = [flag for flag, value in (("--seq-length", sequence), ("--checkpoint-activations", checkpoint)) if value]
    if given:
        raise ConfigError(f"{' and '.join(given)}: {name}() decides on it, as it returns inputs: change {file}.")
    if not callable(inputs):
        raise ConfigError(f"--module {spec}: the second value of {name}() is {_kind(inputs)}. Return a function.")

    def arguments(batch: int) -> tuple[Any, ...] | dict[str, Any]:
        found = _called(f"--module {spec}: inputs({batch})", inputs, batch)
        if isinstance(found, Mapping):
            return dict(found)
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    # torch.utils.checkpoint imports torch's compiler when it is called.
    found = PlannedModel(title, module.train(), arguments, 1)
    checkpoints = "utils.checkpoint" in Path(file).read_text(errors="replace")
    return replace(found, process=WITH_COMPILER) if checkpoints else found


def check_forward(model: PlannedModel, option: str) -> None:
    """Run a forward of one sample on the meta device. Raises ConfigError if it fails or returns no scalar loss.

    option: of the command, for errors.
    """
    where = f"{option}: forward of {model.name} on the meta device"
    with _Ones():  # type: ignore[no-untyped-call]
        output = _called(where, call, model.module, model.inputs(1))
    found = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else _kind(output)
        raise ConfigError(
            f"{where} returns {shown}. Return the loss, a scalar: wrap the model in a module whose forward computes it."
        )
    if not found.requires_grad:
        raise ConfigError(f"{where} returns a loss without gradients: leave some parameters trainable.")


class _Ones(TorchDispatchMode):
    """Makes the value of each tensor 1, as the simulator does: `if (mask == 0).all():` is true."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def _imported(file: Path, spec: str) -> ModuleType:
    """Run `file` as a module, with its folder on the path, as `python FILE.py` has it."""
    if not file.is_file():
        raise ConfigError(f"--module {spec}: {file} is no file. {_FORM}.")
    found = importlib.util.spec_from_file_location(_NAME, file)
    if found is None or found.loader is None:
        raise ConfigError(f"--module {spec}: {file} is no Python file. {_FORM}.")
    module = importlib.util.module_from_spec(found)
    sys.modules[_NAME] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    _called(f"--module {spec}: {file}", found.loader.exec_module, module, device=None)
    return module


def _called(what: str, function: Callable[..., Any], *arguments: Any, device: str | None = "meta") -> Any:
    """Return the result of a call. Turns its exception into a ConfigError that begins with `what`."""
    try:
        if device is None:
            return function(*arguments)
        with torch.device(device):
            return function(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        text = str(error).partition("\n")[0].rstrip(".")
        reason = f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
        hint = ""
        if any(part in f"{type(error).__name__} {error}" for part in _OF_VALUES):
            hint = f"{_ONLY_SHAPES}, and no weights may be loaded"
        if "nonzero" in str(error):  # a routing of experts, of which torch advises a switch
            reason = f"{type(error).__name__} for nonzero(), whose shape follows from values"
            hint = f"{_ONLY_SHAPES}. For experts, plan a stand-in that gives each as many tokens"
        raise ConfigError(f"{what} raises {reason}{hint}.") from error
    except SystemExit as error:
        raise ConfigError(f'{what} exits ({error.code}). Guard what trains by if __name__ == "__main__".') from error


def _check_on_meta(spec: str, module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    elsewhere = [(name, tensor) for name, tensor in tensors if not tensor.is_meta]
    if elsewhere:
        name, tensor = elsewhere[0]
        raise ConfigError(
            f"--module {spec}: {name} is on {tensor.device}, not on the meta device: construct the model from its "
            "config, without a device of its own and without weights that are loaded."
        )


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
