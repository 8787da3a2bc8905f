"""Methods of DeepSpeed's engine that read, save, load and offload values."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.checkpoint.format import LATEST, names_of_buffers
from infinity.comm.agreement.announcements import Operation
from infinity.deepspeed.engine_names import OffloadDeviceEnum, OffloadStateTypeEnum, read
from infinity.deepspeed.reports import ReportingEngine
from infinity.deepspeed.settings import FailedRanksCheck, WrongValue, tag_validation
from infinity.engine.gather import set_full_fp32_param
from infinity.engine.inference import InferenceEngine
from infinity.engine.training import TrainingEngine
from infinity.engine.weights_file import save_weights
from infinity.errors import OutOfMemoryError, UsageError
from infinity.nn.pieces import Piece, Pieces
from infinity.observe.log import logger
from infinity.sizes import show_bytes
from infinity.tiers.available import available_memory

if TYPE_CHECKING:
    from infinity.config.batch import Batch

_GATHERS = (
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
"""Names of the key without which a model of stage 3 is not gathered into one file."""
_SCRIPT = """#!/usr/bin/env python
# Writes the fp32 weights of a checkpoint in this folder: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR
from infinity.deepspeed.utils.zero_to_fp32 import main

main()
"""


class NoRoomForWeightsError(OutOfMemoryError, ValueError):
    """Too little host memory to gather and write the model's weights.

    A ValueError, for which transformers' `Trainer.save_model` saves a checkpoint instead.
    """


class SavingEngine(ReportingEngine):
    """Saves and loads the model and the states of `engine`."""

    _engine: TrainingEngine | InferenceEngine

    def __init__(
        self, engine: TrainingEngine | InferenceEngine, settings: Mapping[str, Any], client_optimizer: Any
    ) -> None:
        super().__init__(engine, settings, client_optimizer)
        self._trainer = engine if isinstance(engine, TrainingEngine) else None
        self._warned_of_memory = False
        self.global_samples = 0
        """Number of samples in all steps so far."""

    @property
    def training_engine(self) -> TrainingEngine:
        """Infinity's engine. Raises UsageError if it was constructed without an optimizer."""
        if self._trainer is None:
            raise UsageError(
                "the engine has no optimizer, so it only runs the model: add an optimizer section to the config, or "
                "pass optimizer to initialize()"
            )
        return self._trainer

    @property
    def global_steps(self) -> int:
        """Steps so far, in all; without an optimizer, those of the loaded checkpoint."""
        return self._engine.global_steps

    @property
    def skipped_steps(self) -> int:
        """Steps so far that an overflow skipped; without an optimizer, those of the loaded checkpoint."""
        return self._engine.skipped_steps

    @property
    def _batch(self) -> Batch:
        """Batch sizes of the config. Raises ConfigError without them; an engine without an optimizer needs none."""
        if self._trainer is not None:
            return self._trainer.batch
        return self._engine.config.resolve_batch(self.dp_world_size)

    def train_batch_size(self) -> int:
        return self._batch.micro * self._batch.accumulation * self.dp_world_size

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state dict, without DeepSpeed's `module.`. Collective in stage 3."""
        given = {} if destination is None else {"destination": destination}
        states: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **given)
        for name in self._frozen() if exclude_frozen_parameters else ():
            states.pop(prefix + name, None)
        return states

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load `checkpoint["module"]` into the parameters, their masters and the buffers. Collective, between steps.

        strict: raise UsageError, before any change, for missing and unexpected names. custom_load_fn: called instead,
        as `custom_load_fn(src=checkpoint["module"], dst=model)`. It edits parameters, or calls `load_state_dict` of the
        model or its parts; all ranks must make the same changes. Masters of changed 16-bit elements get the new values.
        fetch_z3_params has no effect.
        """
        if allowed_missing_keys is not None:
            raise UsageError("load_module_state_dict(allowed_missing_keys=…) is not supported: pass strict=False")
        states = checkpoint["module"]
        if custom_load_fn is not None:
            self._engine.load_with(lambda model: custom_load_fn(src=states, dst=model))
            return
        pieces = Pieces(self.module)
        parameters: dict[str, list[tuple[nn.Parameter, Piece]]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            piece = pieces.of(name, parameter)
            parameters.setdefault(piece.name, []).append((parameter, piece))  # several for the tiles of a tensor
        buffers = names_of_buffers(self.module)
        missing, unexpected = {*parameters, *buffers} - set(states), set(states) - {*parameters, *buffers}
        if strict and (missing or unexpected):
            listed = [", ".join(sorted(names)) or "none" for names in (missing, unexpected)]
            raise UsageError(
                f"the state dict does not fit the model (missing: {listed[0]}; unexpected: {listed[1]}): pass the "
                "state dict of the same model, or strict=False"
            )
        for name, value in states.items():
            if name in parameters:
                for parameter, piece in parameters[name]:
                    set_full_fp32_param(parameter, _part(value, piece))
            elif name in buffers:
                buffers[name].copy_(value)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save save_dir/tag (default: global_step and the number of steps), and return True. Collective.

        As DeepSpeed, it also writes the script save_dir/zero_to_fp32.py, which reads the checkpoints there.

        save_latest: update the file `latest`, which `load_checkpoint` reads without a tag. exclude_frozen_parameters:
        leave out parameters that do not require gradients; load such a checkpoint with load_module_strict=False. If
        tags differ between ranks, rank 0's is used, with a warning; see `checkpoint.tag_validation`.

        Without an optimizer, the checkpoint holds the parameters and buffers; an engine with one loads it with
        load_module_only=True.
        """
        if not save_dir:
            raise WrongValue(f"save_dir is {save_dir!r}: pass the path of a folder")
        name = self._agreed(f"global_step{self.global_steps}" if tag is None else str(tag))
        self._engine.save_checkpoint(save_dir, name, client_state, save_latest, exclude_frozen_parameters)
        if self._engine.ranks.is_main_rank:
            script = Path(save_dir) / "zero_to_fp32.py"
            script.write_text(_SCRIPT, encoding="utf-8")
            script.chmod(script.stat().st_mode | 0o111)
        return True

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return whether tags that differ between ranks are reported."""
        return tag_validation(self.config) != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Return whether tags that differ between ranks are an error."""
        return tag_validation(self.config) == "FAIL"

    def _agreed(self, tag: str) -> str:
        """Return rank 0's tag. Raises RanksError on all ranks if tags differ under `Fail`."""
        self._engine.begin_together(Operation.SAVE_CHECKPOINT)
        tags: list[str] = self._engine.ranks.gather(tag)
        if len(set(tags)) > 1 and self.checkpoint_tag_validation_enabled():
            shown = ", ".join(f"rank {rank} {name!r}" for rank, name in enumerate(tags))
            text = f"the ranks save under different tags: {shown}"
            if self.checkpoint_tag_validation_fail():
                raise FailedRanksCheck(f"{text}. Pass the same tag on all ranks.")
            logger.warning("%s. All ranks save under rank 0's.", text)
        return tags[0]

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load load_dir/tag, and return its path and client_state; (None, None) if `latest` is missing. Collective.

        tag: by default the one in `latest`. The folder must be Infinity's; `infinity import-deepspeed` converts
        DeepSpeed's.

        load_module_strict: False: ignore parameters that only the model or only the checkpoint has.
        load_optimizer_states: False: keep the present moments, hyper-parameters and loss scale.
        load_lr_scheduler_states: False: keep the present state of the scheduler. load_module_only: load parameters and
        buffers only, and keep the counts of steps. Parameters have the values of the fp32 masters in every case.
        Without an optimizer, parameters, buffers and counts are loaded.
        custom_load_fn is refused.
        """
        if custom_load_fn is not None:
            raise UsageError(
                "load_checkpoint(custom_load_fn=…) is not supported: read the weights with infinity.deepspeed.utils."
                "zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(), and pass them with the function to "
                "load_module_state_dict()"
            )
        if tag is None and not (Path(load_dir) / LATEST).is_file():
            logger.warning("no checkpoint was loaded: %s has no file %r; pass a tag", load_dir, LATEST)
            return None, None
        engine = self._engine
        if isinstance(engine, InferenceEngine):
            path, client_state = engine.load_checkpoint(load_dir, tag, strict=load_module_strict)
            return str(path), client_state
        folder, client_state = engine.load_checkpoint(
            load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        if not load_module_only:
            self.global_samples = engine.global_steps * self.train_batch_size()
        return str(folder), client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights in the model's dtype, and return True. Collective. See `TrainingEngine.save_16bit_model`.

        In stage 3 without `stage3_gather_16bit_weights_on_model_save` it saves nothing and returns False, as DeepSpeed.
        """
        gathers = any(read(self.config, f"zero_optimization.{name}", False) for name in _GATHERS)
        if self.zero_optimization_partition_weights() and not gathers:
            path = Path(save_dir) / save_filename
            logger.info("%s was not saved: stage3_gather_16bit_weights_on_model_save is false", path)
            return False
        return save_weights(self._engine, save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the unsharded state dict in host memory on rank 0, and None elsewhere. Collective.

        transformers and Accelerate call it under this name. Raises NoRoomForWeightsError on all ranks if rank 0 has
        too little host memory for it, and warns the first time.
        """
        frozen = self._frozen() if exclude_frozen_parameters else set()
        keeps = self._engine.ranks.is_main_rank
        kept = (p for p in self.module.parameters() if not (exclude_frozen_parameters and self._engine.is_frozen(p)))
        needed = 2 * sum(p.numel() * p.element_size() for p in kept)  # safetensors copies the tensors once more
        available = self._engine.ranks.gather(available_memory())[0]
        if needed > available:
            if keeps and not self._warned_of_memory:
                self._warned_of_memory = True  # a Trainer calls this in every save
                logger.warning(
                    "the unsharded weights are not gathered: with a copy to write them they take %s of host memory, "
                    "and %s are available. Trainer saves the whole checkpoint only. `infinity export FOLDER OUT` "
                    "writes weights from it, a unit at a time; FOLDER is the one given to save_model, or a checkpoint "
                    "of the Trainer. transformers gives stage3_gather_16bit_weights_on_model_save as the reason, in "
                    "its next line, whatever its value is. Later saves do not repeat this.",
                    show_bytes(needed),
                    show_bytes(available),
                )
            raise NoRoomForWeightsError("host memory, to gather and write the weights", needed, available)
        stream = self._engine.stream_state_dict()
        states = {name: value for name, value in stream if keeps and name not in frozen}
        return states if keeps else None

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move the states on the device to host memory until `reload_states`. Collective, between two steps.

        include: names of `OffloadStateTypeEnum`. All states move regardless of it, so uses of the model raise
        UsageError meanwhile. device: cpu, or none for no effect. pin_memory and non_blocking have no effect: memory is
        pinned where the engine pins its own, and the call returns when the device's memory is free.
        """
        engine = self.training_engine
        if device == OffloadDeviceEnum.none:
            logger.warning("offload_states(device='none') has no effect: pass device='cpu'")
            return
        if device != OffloadDeviceEnum.cpu:
            raise UsageError(
                f"offload_states(device={str(getattr(device, 'value', device))!r}) is not supported: pass device='cpu'"
            )
        moves_more = include is not None and OffloadStateTypeEnum.lp_params not in include
        if moves_more and self._engine.ranks.is_main_rank:
            logger.info(
                "offload_states() moves the parameters, too, though include lacks lp_params: call reload_states() "
                "before the model is used"
            )
        engine.offload_states()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states back to the device, with the same bits. Idempotent. non_blocking has no effect."""
        self.training_engine.reload_states()

    def _frozen(self) -> set[str]:
        pieces = Pieces(self.module)
        named = self.module.named_parameters()
        return {pieces.of(name, p).name for name, p in named if self._engine.is_frozen(p)}


def _part(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    if not piece.place:
        return value
    if getattr(value, "shape", None) != piece.shape:
        shapes = f"{list(piece.shape)}, the value {list(getattr(value, 'shape', ()))}"
        raise UsageError(f"{piece.name} has shape {shapes}: pass a value of the layer's shape")
    return value[piece.place]
