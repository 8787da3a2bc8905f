"""A strategy for Lightning's Trainer: `Trainer(strategy=InfinityStrategy("engine.json"))`.

The LightningModule stays as it is. Its optimizer, its schedulers, `accumulate_grad_batches` and `gradient_clip_val` are
passed to the engine, which streams the states.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

try:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError:  # the same classes under the package's former name
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import DDPStrategy
    from pytorch_lightning.trainer.states import TrainerFn

from infinity.config import Config, read_content
from infinity.engine.inference import InferenceEngine
from infinity.engine.initialize import init_inference, initialize
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, UsageError

_STATES, _TRAINER = "states", "trainer.ckpt"
"""Names in the folder of a checkpoint: the engine's tag, and the file with the Trainer's own progress."""


class EnginePrecision(Precision):  # type: ignore[misc]
    """Leaves the module's dtype and the clipping to the engine, and casts float inputs to the engine's 16-bit dtype."""

    dtype: torch.dtype | None = None
    clipping: float = 0.0
    """The norm to which the engine clips in every step; 0: no clipping."""
    _asked = False

    def convert_input(self, data: Any) -> Any:
        """Return `data` with its floating-point tensors in the dtype of the parameters."""
        dtype = self.dtype
        if dtype is None:
            return data
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, data)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Accept the clipping that the engine does in `optimizer.step()`. Raises UsageError for any other."""
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm")
        self._asked = True
        if clip_val > 0 and (clip_val != self.clipping or algorithm != "norm"):
            raise UsageError(
                f'clip_gradients({clip_val:g}, "{algorithm}") was called, and the engine '
                + (f"clips to a norm of {self.clipping:g}" if self.clipping else "does not clip")
                + ' in every step: set Trainer(gradient_clip_val=…), or "gradient_clipping" in the config, to one norm '
                "for all steps"
            )

    def _clip_gradients(
        self, model: Any, optimizer: Any, clip_val: float | None = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Call the module's `configure_gradient_clipping`. Raises UsageError if it omits the Trainer's clipping."""
        self._asked = False
        super()._clip_gradients(model, optimizer, clip_val, gradient_clip_algorithm)
        if clip_val and not self._asked and model.automatic_optimization:
            raise UsageError(
                f"configure_gradient_clipping() did not call clip_gradients() in this step, and the engine clips to a "
                f"norm of {self.clipping:g} in every step: call it in all, or leave gradient_clip_val out"
            )


class InfinityStrategy(DDPStrategy):  # type: ignore[misc]
    """Runs a LightningModule with its states in tiers, on one rank or several.

    config: as for `infinity.initialize`. Batch sizes, clipping and the optimizer come from the Trainer and the module.
    In manual optimization, set `gradient_clipping` and `gradient_accumulation_steps` in the config. restore: return
    the values to the module when the Trainer is done, which needs host memory for all of them. Other arguments are
    those of DDPStrategy.

    Raises ConfigError for clipping by value, for a precision of the Trainer, and for several optimizers.
    """

    strategy_name = "infinity"
    optimizers: list[torch.optim.Optimizer]

    def __init__(
        self, config: Config | Mapping[str, Any] | str | PathLike[str], *, restore: bool = True, **options: Any
    ) -> None:
        super().__init__(**options)
        self._source = config
        self._restore = restore
        self._precision = EnginePrecision()
        self._own_forward: Any = None
        """The forward that was assigned to the module itself, if any."""
        self._step = ""
        """The method of the module that the engine's next forward runs; empty: its own forward."""
        self.engine: TrainingEngine | InferenceEngine | None = None
        """The engine between `setup` and `teardown`."""

    # -- construction ------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> EnginePrecision:
        """The strategy's own plugin, which leaves the dtype to the config."""
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Accept 32-bit precision, the Trainer's default. Raises ConfigError for others, which the config sets."""
        asked = "32-true" if plugin is None else str(plugin.precision)
        if asked != "32-true":
            raise ConfigError(
                f'the Trainer has precision "{asked}", and the engine\'s config sets the dtype: leave precision out, '
                'and set "bf16": {"enabled": true} in the config'
            )

    def setup(self, trainer: pl.Trainer) -> None:
        """Construct the engine over the module, with the module's optimizer and schedulers."""
        self.accelerator.setup(trainer)
        self._redirect_forward()
        module = self.lightning_module
        if trainer.state.fn != TrainerFn.FITTING:
            self.engine = init_inference(module, Config.load(self._source))
        else:
            self.setup_optimizers(trainer)
            clients: list[torch.optim.Optimizer] = self.optimizers
            if len(clients) != 1:
                raise ConfigError(
                    f"configure_optimizers() returned {len(clients)} optimizers, and an engine trains with one: return "
                    "one optimizer with a param_group for each part of the model"
                )
            config = _configured(self._source, trainer)
            self._precision.clipping = config.gradient_clipping
            self.engine, optimizer, _, _ = initialize(module, config, optimizer=clients[0])
            self.optimizers = [optimizer]
            if module.automatic_optimization:
                self.engine.expect_divided_losses()  # by the Trainer, in `ClosureResult`
        dtypes = {p.dtype for p in module.parameters()} & {torch.bfloat16, torch.float16}
        self._precision.dtype = next(iter(dtypes), None)

    def _redirect_forward(self) -> None:
        """Make the module's forward run one of its steps, so that a step is a forward of the model for the engine."""
        module = self.lightning_module
        own = module.forward
        self._own_forward = module.__dict__.get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            step, self._step = self._step, ""
            return (getattr(module, step) if step else own)(*args, **kwargs)

        module.__dict__["forward"] = forward

    def teardown(self) -> None:
        """Close the engine. (Lightning's own `teardown` would move the values of the whole module to the CPU.)"""
        engine, self.engine = self.engine, None
        self.optimizers = []
        if engine is not None:
            engine.close(restore=self._restore)
        self.lightning_module.__dict__.pop("forward", None)
        if self._own_forward is not None:
            self.lightning_module.__dict__["forward"] = self._own_forward
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _call(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module as the engine's forward."""
        assert self.engine is not None
        self._step = step
        return self.engine(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("predict_step", *args, **kwargs)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return no values: `save_checkpoint` writes them unit by unit."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return no states: `save_checkpoint` writes them unit by unit."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a folder with the engine's checkpoint and the Trainer's progress. Collective."""
        if not isinstance(self.engine, TrainingEngine):
            raise UsageError(
                "trainer.save_checkpoint() was called outside of fit(), where no engine trains: call it in fit"
            )
        self.engine.save_checkpoint(filepath, tag=_STATES)
        super().save_checkpoint(checkpoint, Path(filepath) / _TRAINER, storage_options)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the engine's states, and return the Trainer's progress. Collective."""
        assert self.engine is not None
        self.engine.load_checkpoint(checkpoint_path, tag=_STATES)
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(
            Path(checkpoint_path) / _TRAINER, weights_only=weights_only
        )
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` loaded the values."""


def _configured(source: Config | Mapping[str, Any] | str | PathLike[str], trainer: pl.Trainer) -> Config:
    """Return the config with the accumulation and clipping of `trainer`. Raises ConfigError if they differ."""
    if isinstance(source, Config):
        content = source.model_dump(exclude_unset=True)
    else:
        content = dict(source) if isinstance(source, Mapping) else read_content(Path(source))
        content = {key: value for key, value in content.items() if value not in ("auto", None)}
    content["infinity"] = {"norm_of": "optimizer", **(content.get("infinity") or {})}  # as Lightning clips
    asked = {"gradient_accumulation_steps": trainer.accumulate_grad_batches}
    if trainer.gradient_clip_val:
        algorithm = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) or "norm")
        if algorithm != "norm":
            raise ConfigError(
                f'the Trainer has gradient_clip_algorithm="{algorithm}", and an engine clips by the norm of the whole '
                'gradient: use "norm"'
            )
        asked["gradient_clipping"] = trainer.gradient_clip_val
    if not trainer.lightning_module.automatic_optimization:
        asked = {}  # manual optimization: the config sets both
    for name, value in asked.items():
        if content.setdefault(name, value) != value:
            raise ConfigError(
                f"{name} is {content[name]} in the config and {value} in the Trainer: leave it out of the config"
            )
    if "train_batch_size" not in content:
        content.setdefault("train_micro_batch_size_per_gpu", 1)  # unused: the Trainer's loader draws the batches
    return Config.load(content)
