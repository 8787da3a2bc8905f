"""The inference engine: runs a model larger than memory, and stores only its parameters."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from infinity.checkpoint.background import Saver
from infinity.checkpoint.load import Loading
from infinity.checkpoint.save import save
from infinity.checkpoint.snapshot import Run
from infinity.comm.agreement.announcements import Operation
from infinity.comm.communicator import Communicator
from infinity.comm.groups import Group
from infinity.durable.source import check_no_run, open_saved
from infinity.engine.base import BaseEngine
from infinity.engine.wiring import assemble, plan_model
from infinity.errors import ModelError, UsageError
from infinity.model import bitsandbytes
from infinity.plan.policy import Sharding, compute_dtype
from infinity.tiers.accelerator import default_device
from infinity.tiers.device import Device
from infinity.units.compiled import uncompiled

if TYPE_CHECKING:
    from infinity.config import Config


class InferenceEngine(BaseEngine):
    """Runs `model`: `engine(inputs)`, `engine.generate(tokens, …)`. Constructed by `infinity.init_inference`.

    It has no optimizer states and no gradients of parameters, and needs device memory for a few units. Gradients with
    respect to inputs are computed as usual.
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
        # Unsharded parameters are replicated, and ranks exchange nothing.
        sharded = Sharding.of(config.zero_optimization.stage).params
        ranks = Communicator(seam, sharded=sharded, group=process_group, rank_timeout=config.infinity.rank_timeout)
        self.global_steps = self.skipped_steps = 0
        """Steps of the run whose checkpoint was loaded, in all and skipped; 0 before."""
        with ranks.construction(), ExitStack() as undo:
            self._frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
            undo.callback(self._unfreeze)
            for parameter in self._frozen:
                parameter.requires_grad_(False)
            if next(model.parameters(), None) is None:
                raise ModelError("the model has no parameters: call the model directly, without an engine")
            undo.callback(bitsandbytes.restore, model)
            bitsandbytes.prepare(model, seam.torch_device)
            planned = plan_model(model, config, [], seam, ranks, train=False, dtype=dtype)
            parts = assemble(model, planned, config, seam, ranks, self)
            undo.callback(parts.closer())
            ranks.barrier()  # raises on all ranks if construction failed on one
            undo.pop_all()
        model.eval()
        super().__init__(called, config, parts, dtype or compute_dtype(config))

    def close(self, *, restore: bool = False) -> None:
        """See `BaseEngine.close`. Parameters that required gradients before the engine was constructed do so again."""
        try:
            super().close(restore=restore)
        finally:
            self._unfreeze()

    def _unfreeze(self) -> None:
        while self._frozen:
            self._frozen.pop().requires_grad_(True)

    def _on_forward(self, arguments: object) -> None:
        self.parts.schedule.trace.begin("with gradients" if torch.is_grad_enabled() else "without")

    def load_checkpoint(
        self, directory: str | Path, tag: str | None = None, *, strict: bool = True, verify: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Load the parameters and buffers of directory/tag (default: the checkpoint named by `latest`), saved by an
        engine with any ranks, tiers or units. The folder of a durable run (infinity.durable) loads its last commit.
        Optimizer states are ignored.

        Masters are rounded to bf16 half away from zero, as in training, and cast to other dtypes. strict: False: ignore
        parameters that only the model or only the checkpoint has. verify: first read all files once to compare their
        checksums. Returns the checkpoint's path and its client_state. Raises CheckpointError, before any change, if it
        is missing, damaged or of another model.
        """
        self.begin_together(Operation.LOAD_CHECKPOINT)
        self.settle()
        with open_saved(self.ranks, directory, tag) as saved, self.failing():
            loading = Loading(
                self.parts, self.module, None, saved, verify=verify, load_rng=False, optimizer=False, strict=strict
            )
            with self._replacing(saved.path):
                loading.apply()
            self.global_steps, self.skipped_steps = saved.index.global_steps, saved.index.skipped_steps
            return saved.path, loading.client_state

    def save_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write the parameters and buffers to directory/tag, and return its folder. Collective.

        The arguments are those of a training engine, which loads such a checkpoint with `load_module_only=True`.
        exclude_frozen_parameters: leave out those that were frozen before the engine was constructed.
        """
        self.begin_together(Operation.SAVE_CHECKPOINT)
        self.settle()
        check_no_run(self.ranks, directory)
        saver, state = Saver(), client_state or {}
        run = Run(self.config, self._progress())
        leaves_out = self.left_out(exclude_frozen_parameters)
        try:
            return save(
                self.parts, saver, self.module, run, directory, tag, state, latest=save_latest, leaves_out=leaves_out
            )
        finally:
            saver.close(lambda: None)

    def is_frozen(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter was frozen before the engine was constructed, which freezes all."""
        return not any(parameter is each for each in self._frozen)

    # -- calls of training engines -------------------------------------------------------------------------------------

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError, since this engine does not train."""
        self._refuse("backward()")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError, since this engine does not train."""
        self._refuse("step()")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} needs an engine that trains, and this one is for inference: use infinity.initialize()"
        )
