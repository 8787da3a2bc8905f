"""`zero.Init`, `zero.GatheredParameters`, external parameters and `parameter_offload`, with DeepSpeed's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import torch
from torch import nn

import infinity.construction.init_context as init_context
import infinity.engine.gather as gather
from infinity.deepspeed.built import building, gathered
from infinity.deepspeed.comm import init_distributed
from infinity.deepspeed.parameter_names import ZeroParamStatus as ZeroParamStatus
from infinity.deepspeed.settings import make_config, read_settings, without_auto_schedule
from infinity.engine.base import BaseEngine, open_engines
from infinity.errors import ConfigError, user_level
from infinity.units.unit import Unit


class Init:
    """Build a model in the memory of a few units: `with zero.Init(config_dict_or_path=config): model = Model(...)`.

    On several ranks `initialize` broadcasts rank 0's values, so the other ranks drop theirs at the end of the block:
    until `initialize` they have values in `GatheredParameters` only, and elsewhere a use of one raises UsageError.

    config_dict_or_path, config: the config that `initialize` gets; states without nvme stay in memory while the model
    is built. dtype: default dtype in the block, by default float16 or bfloat16 if the config enables them, as in
    DeepSpeed. module: a model that is built already; it stays as it is. enabled: False makes a block without effect.
    remote_device, pin_memory, mem_efficient_linear, data_parallel_group: accepted without effect, since `initialize`
    places the parameters. Quantised weights and secondary partitions raise ConfigError.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | PathLike[str] | None = None,
        config: Mapping[str, Any] | str | PathLike[str] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        refused = {
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        for name in (name for name, value in refused.items() if value):
            raise ConfigError(f"zero.Init({name}=…) has no counterpart here: leave it out")
        source = config_dict_or_path if config_dict_or_path is not None else config
        settings = {} if source is None else read_settings(source)
        self._enabled = enabled
        self._config = make_config(without_auto_schedule(settings), nn.Module())  # no batch sizes yet
        self._dtype = dtype or _DTYPES.get((self._config.bf16.enabled, self._config.fp16.enabled))
        self._blocks: list[ExitStack] = []
        """Callbacks that end the open blocks, since one object may be entered several times."""

    def __enter__(self) -> Init:
        with ExitStack() as stack:
            if self._enabled:
                init_distributed()  # as DeepSpeed; transformers asks for the rank when it fills in the weights
                stack.enter_context(building())
                stack.enter_context(init_context.Init(self._config))
                _outside.append(torch.get_default_dtype())
                stack.callback(_outside.pop)
                if self._dtype is not None:
                    stack.enter_context(_default_dtype(self._dtype))
            self._blocks.append(stack.pop_all())
        return self

    def __exit__(self, *error: object) -> None:
        self._blocks.pop().close()


_outside: list[torch.dtype] = []
"""Default dtype at the start of each open block of `Init`."""


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def outside_of_init() -> Iterator[None]:
    """Undo the default dtype of open blocks of `Init`, while an engine is constructed."""
    with _default_dtype(_outside[0] if _outside else torch.get_default_dtype()):
        yield


_DTYPES = {(True, False): torch.bfloat16, (False, True): torch.float16}


class _Gathered(gather.GatheredParameters):
    """Discards edits without `modifier_rank` of parameters that stage 3 shards, as DeepSpeed does.

    If blocks that hold a parameter are nested, the outermost decides on its edits. It keeps those of an inner block
    with `modifier_rank`.
    """

    def __enter__(self) -> gather.GatheredParameters:
        super().__enter__()
        for engine, units in self._read_only():
            engine.parts.runner.edits.hold_back(units)
        return self

    def _hold(self, engine: BaseEngine, units: list[Unit]) -> None:
        # Edits in place are discarded by a copy of the bytes of before.
        copied = sum(unit.layout.nbytes for unit in units if engine.parts.store.buffers.in_place(unit))
        if copied and self._modifier is None:
            gather.check_room(engine, copied)
        super()._hold(engine, units)

    def __exit__(self, *raised: object) -> None:
        held_back = list(self._read_only())
        try:
            super().__exit__(*raised)
        finally:
            for engine, units in held_back:
                engine.parts.runner.edits.end_hold_back(units)

    def _share_edits(self) -> None:
        super()._share_edits()
        for engine, unit in self._held if self._modifier is not None else ():
            if unit not in self._ours and engine in open_engines:
                engine.parts.runner.edits.write([unit])  # the outer block then discards what is edited from now on
        for engine, units in self._read_only():
            discarded = engine.parts.runner.discard_edits(units)
            if discarded:
                warnings.warn(
                    f"edits of unit {discarded[0].name} in GatheredParameters without modifier_rank were discarded, as "
                    "in DeepSpeed: pass modifier_rank=0 to keep the edits of rank 0",
                    stacklevel=user_level(),
                )

    def _read_only(self) -> Iterator[tuple[BaseEngine, list[Unit]]]:
        """Yield the open engines of stage 3 with their units whose edits this block discards."""
        for engine in self._units if self._modifier is None else ():
            if engine in open_engines and engine.config.zero_optimization.stage == 3:
                yield engine, [unit for owner, unit in self._held if owner is engine and unit in self._ours]


class GatheredParameters:
    """Gather parameters unsharded until the block ends: `with zero.GatheredParameters(params, modifier_rank=0):`.

    params: one or more parameters, of an engine or built under `Init`. Others are ignored, since every rank has their
    values. modifier_rank: rank whose edits are broadcast. None: edits of parameters that stage 3 shards are discarded,
    with a warning. Before `initialize` they are kept, and all ranks must make the same edits.
    fwd_module: accepted without effect. enabled: False makes a block without effect.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        listed: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = listed if enabled else []
        self._modifier = modifier_rank
        self._blocks: list[ExitStack] = []
        """Callbacks that end the open blocks, since one object may be entered several times."""

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_Gathered(self._params, self._modifier))
            stack.enter_context(gathered(self._params, self._modifier))
            self._blocks.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> None:
        self._blocks.pop().__exit__(*raised)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: torch.dtype) -> Callable[..., Any]:
    """Return `fn`. transformers replaces this function for a while; here `Init` sets torch's default dtype instead."""
    return fn


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that is used outside of its module is fetched when it is read."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing; see `register_external_parameter`."""


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yield `model` unchanged, since its `generate` fetches the units that each step needs."""
    yield model


class DeepSpeedZeRoOffload:
    """Stands for DeepSpeed's hooks that fetch parameters, without effect: a parameter is fetched where it is read.

    Hooks may be removed from the lists, and `_register_deepspeed_module` may be called, in any order.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = _Model(module)
        """Reads like the model, and has `ds_external_parameters`."""
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Do nothing; in DeepSpeed it adds the hooks of `module`."""


class _Model:
    """The attributes of a model, and those that DeepSpeed adds to it. The model itself gets none."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def ds_external_parameters(self) -> list[tuple[Any, nn.Parameter]]:
        """Return the parameters of `zero.register_external_parameter`, which has no effect."""
        return []
