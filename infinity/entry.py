"""`infinity.initialize`: from a model and a config to an engine, its optimizer, a dataloader and an lr scheduler;
`infinity.init_inference`: to an engine that only runs the model.
"""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from infinity.comm.collectives import refuse
from infinity.comm.groups import Group
from infinity.config import Config
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.inference import InferenceEngine
from infinity.optim.facade import ParamGroups, UnitOptimizer
from infinity.tiers.device import Device


def initialize(
    model: nn.Module,
    config: Config | dict[str, Any] | str | Path,
    model_parameters: ParamGroups | None = None,
    training_data: Dataset[Any] | None = None,
    *,
    device: Device | None = None,
    process_group: Group | None = None,
) -> tuple[Engine, UnitOptimizer, DataLoader[Any] | None, torch.optim.lr_scheduler.LRScheduler | None]:
    """Make an engine that trains `model`, an unmodified `nn.Module`, on the cpu or on the meta device.

    config: a dict, a path of a JSON file, or a Config; see docs/config.md. model_parameters: what to train, as for a
    torch optimizer (parameters, named parameters or groups); by default all that require gradients. training_data: a
    Dataset, for which a dataloader of micro-batches of this rank is made. device: where to compute; by default the
    CUDA device of this rank, else the CPU. process_group: the data-parallel ranks, over which units are sharded, as a
    ProcessGroup or a DeviceMesh of one dimension; by default all ranks.

    With several ranks, call torch.distributed.init_process_group before. Raises ConfigError, ModelError, RanksError,
    OutOfSpaceError, OutOfMemoryError or StorageError before anything is trained; nothing is left behind then.
    """
    try:
        config = config if isinstance(config, Config) else Config.load(config)
    except ConfigError as error:
        refuse(error, process_group)
        raise
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
) -> InferenceEngine:
    """Make an engine that runs `model`, an unmodified `nn.Module`, on the cpu or on the meta device, and keeps nothing
    but its parameters.

    config: as for `initialize`, of which only where parameters live (`zero_optimization`), their dtype, `aio` and
    `infinity` are read; that of a training job will do. dtype: what floating parameters are kept and computed in; by
    default what the config says (`bf16`, `fp16`), else what each is. Buffers stay as they are. device: where to
    compute; by default the CUDA device of this rank, else the CPU. process_group: the ranks that share the parameters,
    as for `initialize`.

    The model is put in eval mode, and its parameters no longer require gradients. With several ranks in stage 3 every
    rank holds a shard and has inputs of its own, and all run as many forwards.

    Raises ConfigError, ModelError, RanksError, OutOfSpaceError, OutOfMemoryError or StorageError; nothing is left
    behind then.
    """
    try:
        config = Config.load(config if config is not None else {})
    except ConfigError as error:
        refuse(error, process_group)
        raise
    with _host():
        return InferenceEngine(model, config, dtype=dtype, device=device, process_group=process_group)


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
