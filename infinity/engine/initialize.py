"""`infinity.initialize`: from a model and a config to an engine, its optimizer, a dataloader and an lr scheduler;
`infinity.init_inference`: to an engine that only runs the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from infinity.comm.communicator import refuse
from infinity.comm.groups import Group
from infinity.comm.join import join_process_group
from infinity.config import Config
from infinity.engine.base import BaseEngine
from infinity.engine.inference import InferenceEngine
from infinity.engine.optimizer import ParamGroups, UnitOptimizer
from infinity.engine.supported import check_model
from infinity.engine.training import Engine
from infinity.errors import ConfigError, InfinityError, ModelError, UsageError
from infinity.tiers.device import Device


def initialize(
    model: nn.Module,
    config: Config | dict[str, Any] | str | Path,
    model_parameters: ParamGroups | None = None,
    training_data: Dataset[Any] | None = None,
    *,
    device: Device | None = None,
    process_group: Group | None = None,
    dist_init_required: bool | None = None,
) -> tuple[Engine, UnitOptimizer, DataLoader[Any] | None, torch.optim.lr_scheduler.LRScheduler | None]:
    """Make an engine that trains `model`, an unmodified `nn.Module`, on the cpu or on the meta device.

    config: a dict, a path of a JSON file, or a Config; see docs/config.md. model_parameters: what to train, as for a
    torch optimizer (parameters, named parameters or groups); by default all that require gradients. training_data: a
    Dataset, for which a dataloader of micro-batches of this rank is made. device: where to compute; by default the
    CUDA device of this rank, else the CPU. process_group: the data-parallel ranks, over which units are sharded, as a
    ProcessGroup or a DeviceMesh of one dimension; by default all ranks.

    dist_init_required: None: call torch.distributed.init_process_group (NCCL with CUDA, else gloo) if torchrun started
    several ranks and the script has not called it; True: call it for one rank too; False: never. The group stays open
    when the engine is closed.

    Raises ConfigError, ModelError, UsageError, RanksError, OutOfSpaceError, OutOfMemoryError or StorageError before
    anything is trained; nothing is left behind then.
    """
    _check_device(device)
    join_process_group(dist_init_required, device)
    with _telling(process_group):
        config = config if isinstance(config, Config) else Config.load(config)
        _check(model, "infinity.initialize")
        model_parameters = _parameters(model_parameters)
    with _host():
        engine = Engine(model, config, model_parameters, device=device, process_group=process_group)
    try:
        loader = _loader(training_data, engine) if training_data is not None else None
    except BaseException:
        engine.close()
        raise
    return engine, engine.optimizer, loader, engine.lr_scheduler


def init_inference(
    model: nn.Module,
    config: Config | dict[str, Any] | str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    process_group: Group | None = None,
    dist_init_required: bool | None = None,
) -> InferenceEngine:
    """Make an engine that runs `model`, an unmodified `nn.Module`, on the cpu or on the meta device, and keeps nothing
    but its parameters.

    config: as for `initialize`, of which only where parameters live (`zero_optimization`), their dtype, `aio` and
    `infinity` are read; that of a training job will do. dtype: what floating parameters are kept and computed in; by
    default what the config says (`bf16`, `fp16`), else what each is. Buffers stay as they are. device: where to
    compute; by default the CUDA device of this rank, else the CPU. process_group: the ranks that share the parameters,
    and dist_init_required: whether to join them, as for `initialize`.

    The model is put in eval mode, and its parameters no longer require gradients. With several ranks in stage 3 every
    rank holds a shard and has inputs of its own, and all run as many forwards.

    Raises ConfigError, ModelError, UsageError, RanksError, OutOfSpaceError, OutOfMemoryError or StorageError; nothing
    is left behind then.
    """
    _check_device(device)
    join_process_group(dist_init_required, device)
    with _telling(process_group):
        config = Config.load(config if config is not None else {})
        _check(model, "infinity.init_inference")
    with _host():
        return InferenceEngine(model, config, dtype=dtype, device=device, process_group=process_group)


@contextmanager
def _telling(group: Group | None) -> Iterator[None]:
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
            "torch.cuda.set_device()), or on the CPU where there is none; CUDA_VISIBLE_DEVICES='' hides CUDA devices"
        )


def _check(model: nn.Module, maker: str) -> None:
    if isinstance(model, BaseEngine):
        raise ModelError(
            f"model is an engine already: {maker} takes the nn.Module. Use the engine as it is, or close it with "
            "engine.close(restore=True) and pass engine.module"
        )
    check_model(model)


def _parameters(given: ParamGroups | None) -> ParamGroups | None:
    """Return `model_parameters` with iterators read into lists. Raises ConfigError for a wrong type or no entries."""
    if given is None:
        return None
    if isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            f"model_parameters is an optimizer ({type(given).__name__}): pass model_parameters=model.parameters(), or "
            "groups of them. The optimizer is made from the config's optimizer section"
        )
    if isinstance(given, nn.Module) or not isinstance(given, Iterable):
        raise ConfigError(
            f"model_parameters is a {type(given).__name__}: pass model.parameters(), or groups of them, as for a torch "
            "optimizer"
        )
    if isinstance(given, Mapping):
        raise ConfigError("model_parameters is one group: pass a list of groups, [{'params': …, 'lr': …}]")
    entries: list[Any] = list(given)
    if not entries:
        raise ConfigError(
            "model_parameters is empty: a generator, as model.parameters() gives, can be read only once. Pass a fresh "
            "one or a list, or leave it out to train all that require gradients"
        )
    for number, entry in enumerate(entries):
        if isinstance(entry, dict) and isinstance(entry.get("params"), Iterator):
            members = list(entry["params"])
            if not members:
                raise ConfigError(
                    f"model_parameters[{number}] has no params: its generator can be read only once. Pass a fresh one "
                    "or a list"
                )
            entries[number] = {**entry, "params": members}
    return entries


def _host() -> torch.device:
    """Whatever default device the code around has set: values are made and kept on the host before they are placed."""
    return torch.device("cpu")


def _check_data(data: Dataset[Any], engine: Engine) -> None:
    if not isinstance(data, Sized):
        raise ConfigError(
            f"training_data ({type(data).__name__}) has no length: pass a Dataset with __len__ and __getitem__, or "
            "make a DataLoader of your own"
        )
    needed = engine.batch.micro * engine.ranks.size
    if len(data) < needed:
        raise ConfigError(
            f"training_data has {len(data)} samples, too few for one micro-batch on every rank ({engine.batch.micro} × "
            f"{engine.ranks.size} ranks): lower train_micro_batch_size_per_gpu, or pass more data"
        )


def _loader(data: Dataset[Any], engine: Engine) -> DataLoader[Any]:
    """Micro-batches of this rank; every rank draws from its own part of the data, the same number of batches."""
    _check_data(data, engine)
    ranks = engine.ranks
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks.size, ranks.rank, drop_last=True)
    pin = engine.device.type == "cuda"
    return DataLoader(data, batch_size=engine.batch.micro, sampler=sampler, drop_last=True, pin_memory=pin)
