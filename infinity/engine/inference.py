"""The inference engine: a model larger than memory runs, with nothing kept but its parameters."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from infinity.checkpoint.agree import folder_of
from infinity.checkpoint.load import load_parameters
from infinity.comm.communicator import Communicator
from infinity.comm.groups import Group
from infinity.config import Config
from infinity.engine.base import BaseEngine
from infinity.engine.wiring import assemble, plan_model
from infinity.errors import ModelError, UsageError
from infinity.plan.stage import Sharding
from infinity.tiers.device import Device, default_device
from infinity.units.compiled import uncompiled


class InferenceEngine(BaseEngine):
    """Runs `model`: `engine(inputs)`, `engine.generate(tokens, …)`. Made by `infinity.init_inference`.

    There are no optimizer states and no gradients of parameters: memory is the device buffers of a few units. Gradients
    with respect to inputs are computed as usual.
    """

    _maker = "infinity.init_inference()"

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        *,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
        process_group: Group | None = None,
    ) -> None:
        seam = device or default_device()
        called, model = model, uncompiled(model)
        # What is not sharded is whole on every rank, and nothing is exchanged.
        ranks = Communicator(seam, sharded=Sharding.of(config.zero_optimization.stage).params, group=process_group)
        with ranks.construction(), ExitStack() as undo:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.requires_grad_(False)
                    undo.callback(parameter.requires_grad_, True)
            if next(model.parameters(), None) is None:
                raise ModelError("the model has no parameters: call it as it is")
            plan, units = plan_model(model, config, [], seam, ranks, train=False, dtype=dtype)
            parts = assemble(model, config, [], plan, units, seam, ranks)
            undo.callback(parts.closer())
            ranks.barrier()  # where all hear of what failed on one
            undo.pop_all()
        model.eval()
        super().__init__(called, config, parts)

    def _on_forward(self) -> None:
        self.parts.store.tracer.begin("with gradients" if torch.is_grad_enabled() else "without")

    def _on_backward_end(self) -> None:
        pass

    def load_checkpoint(
        self, directory: str | Path, tag: str | None = None, *, verify: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Load the parameters and buffers of directory/tag (default: the one that `latest` names), which a training
        engine saved with any ranks, tiers or units; what else it holds is left alone.

        Masters are rounded to bf16 half away from zero, as in training, and else cast. verify: read all files once
        before, to compare their checksums. Returns the checkpoint's path and client_state. CheckpointError, before
        anything is changed, if it is missing, damaged or another model's.
        """
        self.settle()
        folder = folder_of(self.ranks, directory, tag)  # before anything that could stop the engine
        with self._failing():
            return load_parameters(self.parts, self.module, folder, verify=verify)

    # -- what a user of training engines might try --------------------------------------------------------------------

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """UsageError: this engine does not train."""
        self._refuse("backward()")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """UsageError: this engine does not train."""
        self._refuse("step()")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """UsageError: there is nothing to resume."""
        raise UsageError(
            "an engine for inference has no training to resume, so it saves no checkpoint: stream_state_dict() reads "
            "its parameters out, and `infinity export` turns a checkpoint of training into safetensors"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} needs an engine that trains, and this one is for inference: use infinity.initialize()"
        )
