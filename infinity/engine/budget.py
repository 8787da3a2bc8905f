"""Resolves `infinity.memory` to the bytes of one rank: `auto`, and a node's bytes over its ranks.

Plans an engine from facts alone: a model, possibly on the meta device, and descriptions of ranks and device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.comm.agreement.comparison import config_in_common
from infinity.construction.init_context import bytes_in_memory, in_memory
from infinity.errors import ConfigError, OutOfMemoryError
from infinity.model.remote import is_remote
from infinity.observe.log import logger
from infinity.optim.parameter_rule import ParameterRule
from infinity.plan.budget import Budget
from infinity.plan.formats import MASTERS, StateFormat
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import State
from infinity.plan.plan import Plan, make_plan
from infinity.plan.policy import DeviceInfo, RankInfo, compute_dtype, frozen_format, speculates
from infinity.plan.remedy import Replan, fitting, needed, remedy
from infinity.plan.shortage import Shortage, shortage
from infinity.sizes import show_bytes
from infinity.tier_kind import TierKind
from infinity.tiers.available import available_memory, memory_limit
from infinity.tiers.files import check_folder
from infinity.tiers.headroom import PROCESS, dtype_option, to_fit
from infinity.tiers.space import IN_MEMORY, file_system_of, names
from infinity.units.discover import ModelUnits, discover_model, unit_size_of

if TYPE_CHECKING:
    from infinity.comm.communicator import Communicator
    from infinity.config import Config

_RESERVE = 1 << 30
"""Bytes of host memory that `auto` leaves to the process, beside an eighth of what is free."""
_SLACK = 4 << 20
"""Bytes by which a limit is to be raised beyond what is missing."""
_UNLIMITED = (1 << 63) - 1
"""Stands for no limit where ranks take the smallest one."""


def budget_of(
    config: Config,
    ranks: Communicator,
    *,
    computes_on_host: bool,
    train: bool,
    free_on_each: Callable[[list[str]], int],
) -> Budget:
    """Return this rank's budget. Collective with `auto`, and for drafts on nvme: the ranks take the smallest one, since
    they place alike.

    free_on_each: folders on nvme → bytes that fit if each takes as many.

    Raises ConfigError for a limit on nvme without a `nvme_path`.
    """
    memory, folders = config.infinity.memory, config.zero_optimization.nvme_paths
    if memory.nvme is not None and not folders:
        raise ConfigError(
            "infinity.memory.nvme is set, and no state may be on nvme. Give offload_param or offload_optimizer "
            '(zero_optimization) the device "nvme" and a nvme_path, or remove the limit.'
        )
    local = ranks.local_size
    host = host_share(available_memory(), computes_on_host=computes_on_host) if memory.host == "auto" else memory.host
    nvme = nvme_share(free_nvme([str(folder) for folder in folders])) if memory.nvme == "auto" else memory.nvme
    drafts = train and speculates(config) and bool(folders)
    free = free_on_each([str(folder) for folder in folders]) if drafts else None
    sizes = [_UNLIMITED if nbytes is None else nbytes // local for nbytes in (host, nvme, free)]
    if drafts or "auto" in (memory.host, memory.nvme):
        sizes = ranks.smallest(sizes, config_in_common(config))
    host, nvme, free = (None if size == _UNLIMITED else size for size in sizes)
    return Budget(host, memory.host_params, nvme, memory.device_optimizer, memory.device_states, free)


def host_share(free: int, *, computes_on_host: bool) -> int:
    """Return the bytes of a node's free memory that `auto` gives to states and buffers."""
    return free // 2 if computes_on_host else max(0, free - free // 8 - _RESERVE)


def nvme_share(free: int) -> int:
    """Return the bytes of a node's free space that `auto` gives to states."""
    return free * 19 // 20


def free_nvme(folders: list[str]) -> int:
    """Return the free bytes of the folders' file systems, each counted once.

    Raises StorageError for a folder that does not exist.
    """
    for folder in folders:
        check_folder(Path(folder))
    free = {os.stat(folder).st_dev: shutil.disk_usage(folder).free for folder in folders}
    return sum(free.values())


def free_on_each(folders: list[str]) -> int:
    """Return the bytes that fit into `folders` if each takes as many, less those that `nvme_share` leaves.

    Raises StorageError for a folder that does not exist.
    """
    for folder in folders:
        check_folder(Path(folder))
    devices = [os.stat(folder).st_dev for folder in folders]
    each = (shutil.disk_usage(folder).free // devices.count(dev) for folder, dev in zip(folders, devices, strict=True))
    return nvme_share(min(each) * len(folders))


def check_files_in_memory(plan: Plan, available: int) -> None:
    """Raise OutOfMemoryError if folders on nvme are in memory, which does not hold their files and the plan.

    available: bytes of host memory. A ulimit does not count files, and those of a durable run may be there already.
    """
    if plan.io is None or plan.io.durable is not None or memory_limit()[0].startswith("ulimit"):
        return
    folders = [folder for folder in plan.io.folders if file_system_of(folder) in IN_MEMORY]
    files = plan.nbytes()[TierKind.NVME] * len(folders) // len(plan.io.folders)
    if (needed := files + plan.peak_of_host() + PROCESS) > available and folders:
        raise OutOfMemoryError(
            f"host memory, of which files in {names(folders)} take {show_bytes(files)}",
            needed,
            available,
            "name a folder on a local drive (nvme_path), such as one on ext4 or xfs",
        )


def check_memory(
    config: Config,
    plan: Plan,
    budget: Budget,
    replan: Replan,
    available: Mapping[TierKind, int],
    model: nn.Module | None = None,
    limit: tuple[str, int] = ("", 0),
) -> None:
    """Raise OutOfMemoryError if the plan exceeds a limit or the memory that is available, with a change that suffices.
    Where activations are in host memory, they are not known, and it names `infinity plan`.

    plan: that of `config` and `budget`. A process takes `PROCESS` bytes of host memory beside it. model: whose
    parameters have their memory already, beside the available bytes; None: they need none. limit: what bounds the
    host's memory (`memory_limit`).

    Logs a warning if what is left is too little for checkpoints.
    """

    def lacks(plan: Plan, freed: int = 0) -> Shortage | None:
        return shortage(plan, {**available, TierKind.HOST: available[TierKind.HOST] - PROCESS + freed})

    short = lacks(plan)
    if short is None:
        left = available[TierKind.HOST] - plan.peak_of_host() - PROCESS
        _warn_of_checkpoints(plan, left + (0 if model is None else host_bytes(model)))
        return
    if not short.tier.in_host_memory or short.key:
        fix = remedy(config, plan, budget, short, replan, lacks)
        raise OutOfMemoryError(short.name, short.needed, short.available, fix)
    more = PROCESS if short.tier is TierKind.HOST else 0
    name, beyond = limit
    where = f"{short.name} ({name})" if name else short.name
    if plan.device.host_addressable:
        # Changes that only let the engine start would end in a killed process: the batch is not known here.
        raise OutOfMemoryError(
            where, short.needed + more, short.available + more, _beside_activations(config, plan, model, more)
        )
    fix = _changes(config, plan, budget, short, replan, lacks, model) or remedy(
        config, plan, budget, short, replan, lacks, more
    )
    if name:
        # Another process differs by some pages, and by blocks that glibc has kept.
        missing = short.needed - short.available + beyond + _SLACK
        exceeds = f", which this process exceeds by {show_bytes(beyond)}," if beyond else ""
        fix += f". Without these changes, raise {name}{exceeds} by {-(-missing >> 10):,} KiB"
    raise OutOfMemoryError(where, short.needed + more, short.available + more, fix)


def _beside_activations(config: Config, plan: Plan, model: nn.Module | None, more: int) -> str:
    """Return the parts of the needed bytes, and how to find changes that leave memory for activations.

    more: bytes of the process beside the plan.
    """
    buffers = sum(pool.nbytes for pool in plan.pools if plan.in_host_memory(pool.tier))
    states = plan.peak_of_host() - buffers
    parts = {"states": states, "buffers": buffers, "threads and libraries": more}
    listed = ", ".join(f"{show_bytes(nbytes)} for {part}" for part, nbytes in parts.items() if nbytes)
    constructed = 0 if model is None else host_bytes(model)
    held = ""
    if constructed:
        where = "in infinity.Init" if config.zero_optimization.nvme_paths else "on the meta device"
        held = f". The model's parameters hold {show_bytes(constructed)} more, and would hold none {where}"
    alone = " This alone may not suffice:" if held else ""
    return f"needed are {listed}{held}.{alone} activations come in addition. {to_fit(dtype_option(plan))}"


def _changes(
    config: Config,
    plan: Plan,
    budget: Budget,
    short: Shortage,
    replan: Replan,
    lacks: Callable[..., Shortage | None],
    model: nn.Module | None,
) -> str:
    """Return changes of the config or of the model's construction with which the plan fits host memory; empty if none
    do. Arguments: of `check_memory`.
    """
    change = fitting(config, plan, budget, short, replan, lacks)
    model_bytes = 0 if model is None else host_bytes(model)
    alone = short.needed <= short.available + model_bytes
    construct = _construction(config, short.needed - short.available, model_bytes) if alone else ""
    if alone or change is not None or not model_bytes:
        return ", or ".join(filter(None, (construct, str(change or ""))))
    beside = short._replace(available=short.available + model_bytes)
    change = fitting(config, plan, budget, beside, replan, partial(lacks, freed=model_bytes))
    if change is None:
        return ""
    return f"{_construction(config, needed(change.plan, short.tier) - short.available, model_bytes)}, and {change}"


def _construction(config: Config, missing: int, model_bytes: int) -> str:
    """Return the change of the model's construction that leaves its own bytes free.

    missing: bytes that it has to free.
    """
    # On the meta device, torch's own initialisers import its compiler, which takes 80 MB.
    in_init = model_bytes - bytes_in_memory(config) if config.zero_optimization.nvme_paths else 0
    where = "in infinity.Init" if missing <= in_init else "on the meta device"
    free = f"leaves the {show_bytes(model_bytes)} of its parameters free"
    return f"construct the model {where}, which {free} (docs/large_models.md)"


def checkpoint_nbytes(plan: Plan) -> tuple[int, str]:
    """Return the bytes of host memory that saving or loading a checkpoint takes beside the plan, and the unit that
    needs most.
    """
    whole = plan.ranks.model_parallel > 1
    found = ((_whole_nbytes if whole or unit.windows else _range_nbytes)(plan, unit) for unit in plan.units)
    return max(zip(found, (unit.name for unit in plan.units), strict=True), default=(0, ""))


def _range_nbytes(plan: Plan, unit: UnitLayout) -> int:
    """Return the bytes for a range of a unit: to save, the states of all shards; to load, a shard's twice."""
    start, stop = plan.placement.ranges(unit)[0]
    numel, shards = stop - start, plan.ranks.shards
    if not unit.trainable:
        return numel * unit.dtype.itemsize * max(shards, 2) + (unit.stored_nbytes if unit.code is not None else 0)
    states = plan.policy.states(unit)
    assert isinstance(states, StateFormat)
    kept = (kind for kind in states.states if kind.name not in MASTERS)
    saved = 4 + sum(kind.dtype.itemsize / kind.per for kind in kept)
    halves = 4 if unit.dtype == torch.bfloat16 else 0
    on_disk = not plan.placement.of(unit.index, State.OPTIM).tier.in_memory
    record = states.nbytes(min(plan.placement.tile_sizes[unit.index], unit.shard_numel)) if on_disk else 0
    save, load = numel * (shards * saved + halves) + record, numel * (2 * saved + halves) + 2 * record
    return round(max(save, load))


def _whole_nbytes(plan: Plan, unit: UnitLayout) -> int:
    """Return the bytes for all states of a unit. Beside a remainder, fp32 masters and a copy of them are made."""
    nbytes = unit.nbytes
    if plan.placement.holds(unit.index, State.OPTIM):
        nbytes += plan.placement.of(unit.index, State.OPTIM).nbytes * plan.ranks.shards
        states = plan.policy.states(unit)
        if isinstance(states, StateFormat) and any(kind.name == "remainder" for kind in states.states):
            nbytes += 8 * unit.numel
    return nbytes


def _warn_of_checkpoints(plan: Plan, left: int) -> None:
    """Log a warning if `left` bytes of host memory are too few to save and load checkpoints. Those of a durable run are
    copies of files.
    """
    if plan.update is None or (plan.io is not None and plan.io.durable is not None):
        return
    needed, unit = checkpoint_nbytes(plan)
    if left < needed:
        logger.warning(
            "saving or loading a checkpoint takes up to %s of host memory, for states of unit %s, and %s are left "
            "beside the plan. If memory runs out, the kernel kills the process (exit status 137). Leave more memory, "
            "or set infinity.durable, whose checkpoints are copies of files.",
            show_bytes(needed),
            unit,
            show_bytes(max(0, left)),
        )


def host_bytes(model: nn.Module) -> int:
    """Return the bytes of host memory that the model's parameters take; 0 on the meta device, and for those that
    `infinity.Init` keeps in a file. Tensor subclasses, and parameters whose values are on rank 0, are not counted.
    """
    storages = (
        param.untyped_storage()
        for param in model.parameters()
        if not is_remote(param) and type(param.data) is torch.Tensor and param.device.type == "cpu"
    )
    return sum({storage.data_ptr(): storage.nbytes() for storage in in_memory(model, storages)}.values())


def plan_units(
    model: nn.Module,
    config: Config,
    groups: Sequence[dict[str, object]],
    ranks: RankInfo,
    device: DeviceInfo,
    budget: Budget,
    *,
    rules: Sequence[ParameterRule | None] = (),
    train: bool = True,
    dtype: torch.dtype | None = None,
    copies: Callable[[nn.Parameter], int] = lambda _: 1,
) -> tuple[ModelUnits, Plan]:
    """Discover the units of `model` and plan its engine, on this machine or any other. Allocates nothing.

    rules, copies: as of `discover_model`. Other arguments: as of `make_plan`.
    """
    compute = dtype or compute_dtype(config)
    width = compute.itemsize if compute is not None else None
    unit_size = unit_size_of(config.infinity.unit_size, model, width, device.usable)
    codes = frozen_format(config) is not None
    units = discover_model(model, unit_size, groups, rules, dtype=compute, copies=copies, codes=codes)
    return units, make_plan(config, units.discovered, ranks, device, budget=budget, train=train, dtype=dtype)
