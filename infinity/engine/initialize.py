"""`infinity.initialize` constructs a training engine, its optimizer, dataloader and lr scheduler from a model and a
config. `infinity.init_inference` constructs an engine that only runs the model.

The dataloader of `infinity.initialize`: this rank's micro-batches of a dataset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from infinity.comm.communicator import refuse
from infinity.comm.groups import Group, join_process_group
from infinity.engine.arguments import check_mpu, config_source, load_config
from infinity.engine.base import BaseEngine
from infinity.engine.client_optimizer import ClientOptimizer, ClientOptimizers, MakeOptimizer, construct_optimizer
from infinity.engine.inference import InferenceEngine
from infinity.engine.optimizer.unit_optimizer import ParamGroups, UnitOptimizer
from infinity.engine.schedules.client import (
    MakeScheduler,
    RateScheduler,
    check_scheduler,
    construct_scheduler,
    constructs_schedulers,
)
from infinity.engine.supported import check_model
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, InfinityError, ModelError, UsageError
from infinity.observe.log import logger
from infinity.tiers.device import Device

if TYPE_CHECKING:
    from infinity.config import Config
    from infinity.engine.arguments import ConfigSource

Collate = Callable[[list[Any]], Any]


def make_loader(
    data: Dataset[Any], engine: TrainingEngine, collate_fn: Collate | None = None, *, drop_last: bool = True
) -> DataLoader[Any]:
    """Return a loader of this rank's micro-batches. Ranks draw equally many batches from disjoint parts of the data.

    collate_fn: list of samples → batch, as of torch's DataLoader. drop_last: skip the samples that do not fill a
    micro-batch on every rank. Otherwise the last micro-batch is smaller, and some ranks repeat samples so that all have
    equally many. Raises ConfigError for data without a length, and for too few samples.
    """
    ranks, micro = engine.ranks, engine.batch.micro
    if not isinstance(data, Sized):
        raise ConfigError(
            f"training_data ({type(data).__name__}) has no length: pass a Dataset with __len__ and __getitem__, or "
            "construct a DataLoader of your own"
        )
    if len(data) < (micro * ranks.size if drop_last else 1):
        raise ConfigError(
            f"training_data has {len(data)} samples, too few for one micro-batch on every rank ({micro} × "
            f"{ranks.size} ranks): lower train_micro_batch_size_per_gpu, or pass more data"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks.size, ranks.rank, drop_last=drop_last)
    return DataLoader(
        data,
        batch_size=micro,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=engine.device.type == "cuda",
    )


def initialize(
    model: nn.Module,
    config: ConfigSource | None = None,
    model_parameters: ParamGroups | None = None,
    training_data: Dataset[Any] | None = None,
    *,
    optimizer: ClientOptimizers | MakeOptimizer | None = None,
    lr_scheduler: RateScheduler | MakeScheduler | None = None,
    collate_fn: Collate | None = None,
    device: Device | None = None,
    process_group: Group | None = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    args: Any = None,
    mpu: Any = None,
    config_params: ConfigSource | None = None,
) -> tuple[TrainingEngine, UnitOptimizer, DataLoader[Any] | None, RateScheduler | None]:
    """Construct an engine that trains `model`, an unmodified `nn.Module` on the CPU or on the meta device.

    Returns (engine, optimizer, dataloader, lr scheduler); the last two are None without `training_data` and without a
    scheduler.

    config: a dict, the path of a JSON file, or a Config; see docs/config.md. model_parameters: the parameters to train,
    as for a torch optimizer (parameters, named parameters or groups); by default all that require gradients.
    training_data: a Dataset, from which the dataloader draws this rank's micro-batches. device: the device to compute
    on; by default the CUDA device of this rank, else the CPU. process_group: the data-parallel ranks, over which units
    are sharded, as a ProcessGroup or a DeviceMesh of one dimension; by default all ranks. collate_fn: the dataloader's.

    optimizer: any torch optimizer that updates parameters one by one, a list of them over different parameters, or a
    function of the parameters that returns either; it replaces the config's. The engine takes over its parameters,
    hyper-parameters and states, and `model_parameters` is only passed to such a function. lr_scheduler: a scheduler of
    that optimizer, or a function of the optimizer that returns one; it replaces the config's. `engine.step` steps it.
    See docs/optimizer.md.

    dist_init_required: None: call torch.distributed.init_process_group (NCCL with CUDA, else gloo) if torchrun started
    several ranks and the script has not called it; True: call it for one rank, too; False: never call it. The process
    group stays open when the engine is closed. distributed_port: value of MASTER_PORT if the environment lacks it.

    args: parsed arguments whose `deepspeed_config` is the config's path, if `config` is None; see
    `infinity.add_config_arguments`. config_params: old name of `config`. mpu: accepted if it does not divide the model.

    Raises ConfigError, ModelError, UsageError, RanksError, OutOfSpaceError, OutOfMemoryError or StorageError. Threads,
    memory and files are released then.
    """
    _check_device(device)
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))  # unless the launcher has set it
    join_process_group(dist_init_required, device)
    with _reporting_errors(process_group):
        given = load_config(config_source(args, config, config_params))
        check_mpu(mpu)
        _check(model, "infinity.initialize")
        model_parameters = _parameters(model_parameters)
        theirs = construct_optimizer(optimizer, model, model_parameters)
        client = (
            ClientOptimizer.of(theirs, model, given)
            if theirs
            else ClientOptimizer.of_config(given, model, model_parameters)
        )
        if lr_scheduler is not None and not constructs_schedulers(lr_scheduler):
            check_scheduler(lr_scheduler, *theirs)
        loaded = given if client is None else client.configure(given)
        if lr_scheduler is not None:
            loaded = loaded.model_copy(update={"scheduler": None})
    with torch.device("cpu"):  # values are created in host memory before placement
        groups = model_parameters if client is None else client.groups
        rules = () if client is None else client.rules
        engine = TrainingEngine(model, loaded, groups, device=device, process_group=process_group, rules=rules)
    try:
        if client is not None:
            client.hand_over(engine)
        if lr_scheduler is not None:
            engine.lr_scheduler = construct_scheduler(lr_scheduler, engine.optimizer, *theirs)
        if engine.ranks.is_main_rank:
            _log_replaced(given, client if theirs else None, engine if lr_scheduler is not None else None)
        loader = (
            None
            if training_data is None
            else make_loader(training_data, engine, collate_fn, drop_last=engine.config.dataloader_drop_last)
        )
    except BaseException:
        engine.close()
        raise
    return engine, engine.optimizer, loader, engine.lr_scheduler


def init_inference(
    model: nn.Module,
    config: Config | dict[str, Any] | str | PathLike[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    process_group: Group | None = None,
    dist_init_required: bool | None = None,
) -> InferenceEngine:
    """Construct an engine that runs `model`, an unmodified `nn.Module` on the CPU or on the meta device.

    The engine stores only parameters.

    config: as for `initialize`, such as that of the training job; only `zero_optimization`, `bf16`, `fp16`,
    `torch_autocast`, `data_types`, `aio` and `infinity` are used. dtype: the dtype in which floating-point parameters
    are stored and computed; by default the config's (`bf16`, `fp16`), else each parameter's own. Buffers have the
    dtypes of training with that config. device, dist_init_required: as for `initialize`. process_group: the ranks over
    which parameters are sharded; by default all ranks.

    The model is put in eval mode, and its parameters require no gradients until `close`. In stage 3 with several ranks,
    every rank holds a shard and has inputs of its own, and all ranks must run equally many forwards.

    Raises ConfigError, ModelError, UsageError, RanksError, OutOfSpaceError, OutOfMemoryError or StorageError. Threads,
    memory and files are released then.
    """
    _check_device(device)
    join_process_group(dist_init_required, device)
    with _reporting_errors(process_group):
        config = load_config(config if config is not None else {})
        _check(model, "infinity.init_inference")
    with torch.device("cpu"):  # values are created in host memory before placement
        return InferenceEngine(model, config, dtype=dtype, device=device, process_group=process_group)


@contextmanager
def _reporting_errors(group: Group | None) -> Iterator[None]:
    """Report an error in the block to the other ranks, which are constructing their engines already."""
    try:
        yield
    except InfinityError as error:
        refuse(error, group)
        raise


def _check_device(device: Any) -> None:
    if device is not None and not isinstance(device, Device):
        raise UsageError(
            f"device is {device!r}: leave it out. An engine computes on the CUDA device of this rank (LOCAL_RANK, else "
            "torch.cuda.set_device()), or on the CPU without CUDA. Set CUDA_VISIBLE_DEVICES='' to hide CUDA devices."
        )


def _check(model: nn.Module, maker: str) -> None:
    if isinstance(model, BaseEngine):
        raise ModelError(
            f"model is already an engine, and {maker} takes an nn.Module. Use that engine, or close it with "
            "engine.close(restore=True) and pass engine.module."
        )
    check_model(model)


def _log_replaced(config: Config, client: ClientOptimizer | None, scheduled: TrainingEngine | None) -> None:
    """Log which optimizer and scheduler the caller passed. scheduled: the engine, if its scheduler is one."""
    if client is not None:
        replaced = " in place of the config's optimizer" if "optimizer" in config.model_fields_set else ""
        logger.info("optimizer: the script's %s%s", client.name, replaced)
    if scheduled is not None:
        replaced = " in place of the config's scheduler" if config.scheduler is not None else ""
        logger.info("lr scheduler: %s%s", type(scheduled.lr_scheduler).__name__, replaced)


def _parameters(parameters: ParamGroups | None) -> ParamGroups | None:
    """Return `model_parameters` with iterators read into lists. Raises ConfigError for a wrong type or no entries."""
    if parameters is None:
        return None
    if isinstance(parameters, torch.optim.Optimizer):
        raise ConfigError(
            f"model_parameters is an optimizer ({type(parameters).__name__}): pass "
            "model_parameters=model.parameters(), or groups of them, and an optimizer of your own as optimizer="
        )
    if isinstance(parameters, nn.Module) or not isinstance(parameters, Iterable):
        raise ConfigError(
            f"model_parameters is a {type(parameters).__name__}: pass model.parameters(), or groups of them, as for a "
            "torch optimizer"
        )
    if isinstance(parameters, Mapping):
        raise ConfigError("model_parameters is one group: pass a list of groups, [{'params': …, 'lr': …}]")
    entries: list[Any] = list(parameters)
    if not entries:
        raise ConfigError(
            "model_parameters is empty: a generator, such as model.parameters(), can be read only once. Pass a new "
            "one or a list, or leave it out to train all parameters that require gradients."
        )
    for number, entry in enumerate(entries):
        if isinstance(entry, dict) and isinstance(entry.get("params"), Iterator):
            members = list(entry["params"])
            if not members:
                raise ConfigError(
                    f"model_parameters[{number}] has no params: its generator can be read only once. Pass a new one "
                    "or a list."
                )
            entries[number] = {**entry, "params": members}
    return entries
