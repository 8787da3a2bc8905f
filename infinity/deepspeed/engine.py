"""`DeepSpeedEngine`: the public names of DeepSpeed's engine over a `TrainingEngine` or an `InferenceEngine`.

Its base classes report the config (`reports`), and save and load (`states`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from infinity.deepspeed.engine_names import GETTERS, REFUSED, read
from infinity.deepspeed.module import on_copies
from infinity.deepspeed.settings import FailedUsageCheck, usage_checks
from infinity.deepspeed.states import SavingEngine
from infinity.deepspeed.zero_init import DeepSpeedZeRoOffload
from infinity.engine.inference import InferenceEngine
from infinity.engine.loss_check import check_scalar
from infinity.engine.reports import monitor_of
from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from infinity.observe.monitor import Monitor
from infinity.rules import RULES
from infinity.units.compiled import in_derivative

ROUTE_TRAIN = "train"


class DeepSpeedEngine(SavingEngine):
    """Trains a model in DeepSpeed's loop. Constructed by `infinity.deepspeed.initialize`.

    `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`. Without an optimizer it only runs the model.
    `training_engine` is Infinity's engine, with the rest of its interface.
    """

    enable_backward_allreduce = True
    has_moe_layers = False
    pipeline_parallelism = False
    mp_world_size = 1
    sequence_parallel_size = 1
    mpu = None
    mesh_device = None

    def __init__(
        self,
        engine: TrainingEngine | InferenceEngine,
        settings: Mapping[str, Any],
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        client_optimizer: Any = None,
    ) -> None:
        """settings: the config in DeepSpeed's keys. training_data, collate_fn: dataset of `training_dataloader`.
        client_optimizer: the optimizer that the script passed to `initialize`.
        """
        super().__init__(engine, settings, client_optimizer)
        self.sparse_tensor_module_names: set[str] = set()
        """Names of embeddings with sparse gradients: none, since gradients are dense."""
        optimizer: Any = self._trainer.optimizer if self._trainer else None
        if self.zero_optimization_partition_weights():
            offload = DeepSpeedZeRoOffload(self.module)
            if optimizer is None:
                optimizer = offload
            else:
                optimizer.parameter_offload = offload
        self.optimizer = optimizer
        """Without an optimizer: None, or in stage 3 the object that is `parameter_offload` of an optimizer."""
        self.collate_fn = collate_fn
        self.micro_steps = 0
        """Number of calls of `step`."""
        self._step_applied = False
        self._boundary: bool | None = None
        """Value of `set_gradient_accumulation_boundary` without an optimizer."""
        self._scheduler: Any = None
        """Value of `lr_scheduler` without an optimizer."""
        self.training_data = training_data
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `step` advances; None without one."""
        return self._trainer.lr_scheduler if self._trainer is not None else self._scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        if self._trainer is not None:
            self._trainer.lr_scheduler = scheduler
        self._scheduler = scheduler

    @cached_property
    def monitor(self) -> Monitor:
        """Writers of the config's monitors: `monitor.write_events([(tag, value, samples)])` adds events."""
        if self._trainer is not None:
            return self._trainer.monitor
        return monitor_of(self._engine.config, main=self._engine.ranks.is_main_rank)

    def destroy(self) -> None:
        super().destroy()
        if self._trainer is None and "monitor" in vars(self):
            self.monitor.close()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. In a derivative by torch.func, below stage 3: on copies of the parameters."""
        if in_derivative() and not self.zero_optimization_partition_weights():
            return on_copies(self.module, args, kwargs)
        return super().forward(*args, **kwargs)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward on `loss`, and return the loss divided by gradient_accumulation_steps, as in DeepSpeed.

        retain_graph: as in `Tensor.backward`. scale_wrt_gas: divide the loss; False: the caller has divided it, and it
        is returned unchanged.
        """
        engine = self.training_engine
        check_scalar(loss, FailedUsageCheck)
        return engine.backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the parameters and advance the lr scheduler, if this micro-batch is the last of its step.

        lr_kwargs: arguments of the scheduler's `step`.
        """
        engine = self.training_engine
        steps, skipped = engine.global_steps, engine.skipped_steps
        samples = self.train_batch_size()
        if not engine.config.managed_gradient_accumulation:  # those of the micro-batches so far
            samples = engine.batch.micro * engine.micro_steps * self.dp_world_size
        with usage_checks():
            engine.step(lr_kwargs)
        self.micro_steps += 1
        updated = engine.global_steps > steps
        self._step_applied = updated and engine.skipped_steps == skipped
        if updated:
            self.global_samples += samples

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` with the fp16 loss scale, divided by gradient_accumulation_steps; for plain backwards.

        A plain `loss.backward()` is divided as well; it lacks only the loss scale, which fp16 requires.

        Raises UsageError for a tensor of several elements, or without a graph.
        """
        engine = self.training_engine
        check_scalar(loss, FailedUsageCheck, "scale")
        return engine.scale(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without an update; see `TrainingEngine.no_sync`. No-op without an optimizer."""
        with nullcontext() if self._trainer is None else self._trainer.no_sync():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step consumed. Raises UsageError between the micro-batches of a step."""
        if self._trainer is not None:
            self._trainer.optimizer.zero_grad(set_to_none)
        else:
            self.module.zero_grad(set_to_none)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """No-op, since gradients are reduced during backward or in `step`."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the present micro-batch is the last of its step."""
        if self._trainer is not None:
            return self._trainer.is_gradient_accumulation_boundary()
        if self._boundary is not None:
            return self._boundary
        return self.managed_gradient_accumulation() and self.gradient_accumulation_steps() == 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide, for the backwards and steps that follow, whether they end a step. Call it before forward.

        Raises UsageError if managed_gradient_accumulation is false, and for False where `no_sync` raises it.
        """
        if self._trainer is not None:
            with usage_checks():
                self._trainer.set_gradient_accumulation_boundary(is_boundary)
        self._boundary = bool(is_boundary)

    def was_step_applied(self) -> bool:
        """Return True if the last `step` changed parameters: at a boundary, without overflow."""
        return self._step_applied

    # -- counts and sizes ----------------------------------------------------------------------------------------------

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Accept the present batch size. Raises UsageError for another, since accumulation is fixed."""
        if train_batch_size != self.train_batch_size():
            raise UsageError(
                f"engine.set_train_batch_size({train_batch_size}) was called, but the batch size is "
                f"{self.train_batch_size()}, and {REFUSED['set_train_micro_batch_size']}"
            )

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        uses_momentum = self._trainer is not None and "momentum" in RULES[self._trainer.optimizer.rule].keys
        return self._of_groups("momentum" if uses_momentum else "betas")

    def _of_groups(self, name: str) -> list[Any]:
        """Return a key of every param_group; 0 for groups without it."""
        return [group.get(name, 0.0) for group in self._trainer.optimizer.param_groups] if self._trainer else []

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; see `TrainingEngine.grad_norm`. None without an
        optimizer.
        """
        return None if self._trainer is None else self._trainer.grad_norm

    # -- data ----------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        return isinstance(obj, IterableDataset)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches, shuffled for the route "train". The last may be smaller.

        batch_size: samples of a micro-batch; by default the config's. num_local_io_workers: processes that load;
        by default 0.
        """
        if not (self.is_map_style_dataset(dataset) or self.is_iterable_style_dataset(dataset)):
            raise UsageError(
                f"training data is a {type(dataset).__name__}: pass a Dataset with __len__ and __getitem__, or an "
                "IterableDataset"
            )
        ranks = self._engine.ranks
        if data_sampler is None and self.is_map_style_dataset(dataset):
            if ranks.size == 1 and route != ROUTE_TRAIN:
                data_sampler = SequentialSampler(dataset)
            else:
                data_sampler = DistributedSampler(dataset, ranks.size, ranks.rank, shuffle=route == ROUTE_TRAIN)
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            drop_last=bool(read(self.config, *GETTERS["dataloader_drop_last"])),
            pin_memory=pin_memory and self.device.type == "cuda",
            num_workers=num_local_io_workers or 0,
        )

    @property
    def is_compiled(self) -> bool:
        """True if the model's own method `compile` was called. A model from `torch.compile(model)` does not count."""
        return self.module._compiled_call_impl is not None

    def is_deepcompile_active(self) -> bool:
        """Return False: DeepSpeed's compiler passes have no counterpart."""
        return False

    def empty_partition_cache(self) -> None:
        """Write all states to their tiers, and release the units in memory."""
        self._engine.settle()

    def collect_python_gc(self) -> int:
        """Run Python's garbage collection, and return the number of unreachable objects."""
        return gc.collect()
