"""Machines that a plan is made for: nodes, their GPUs, bytes of each memory, and bandwidths.

`infinity bench-links` measures bandwidths, and `infinity plan` reads them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.engine.budget import host_share, nvme_share
from infinity.errors import ConfigError
from infinity.inputs import number_of, parse_json, read_input
from infinity.plan.budget import Budget
from infinity.plan.policy import DeviceInfo, RankInfo, Sharding
from infinity.tiers.accelerator import default_device
from infinity.tiers.available import total_memory, update_processors

if TYPE_CHECKING:
    from infinity.config import Config


_LARGEST = 1 << 20
"""Bytes of a file."""

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""torch's name of each dtype that models compute in → its name in the config."""

BANDWIDTHS = ("nvme_read", "nvme_write", "nvme_mixed", "memory", "host_to_device", "device_to_host", "collective")
"""Names of the bandwidths, in the order in which they are written."""


@dataclass(frozen=True)
class Links:
    """Bandwidths in bytes/s of one machine, and its FLOP/s. None: the hardware is absent."""

    nvme_read: float | None
    nvme_write: float | None
    nvme_mixed: float | None
    """Bytes read and written per second together, in equal parts at once."""
    memory: float
    """Bytes read and written per second by the native Adam in host memory, all processors together."""
    host_to_device: float | None
    device_to_host: float | None
    """Pinned, asynchronous copies, in one direction at a time."""
    collective: float | None
    """Bytes of an all-gather's output per second, on each rank; None with one rank."""
    flops: Mapping[str, float | None]
    """torch's name of each dtype in `DTYPES` → FLOP/s of a matmul on the device that the engine computes on."""
    baseline_rss: int
    """Resident bytes of a process that has imported torch, and transformers' Trainer if it is installed, and has
    trained a transformer of one small layer.
    """
    weights: Mapping[str, float | None] = field(default_factory=dict)
    """torch's name of a dtype → bytes of a weight per second in a matmul of few rows. Without it, only `flops` bounds a
    matmul.
    """
    dram: float | None = None
    """Bytes of host memory per second that processors and copies to and from devices share. None: copies slow no
    processor.
    """
    wakeup_latency: float = 50e-6
    """Seconds from an event until a host thread continues that slept for it: for a device, a drive or a thread."""
    launch_overhead: float = 6e-6
    """Seconds in which a host thread issues a kernel or a copy to a device, Python included."""
    unit_overhead: float = 0.2e-3
    """Seconds of Python in the model's thread for each use of a unit, by forward or backward."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """All other keys of the JSON, such as `machine`. Nothing is derived from them."""

    @classmethod
    def read(cls, file: Path) -> Links:
        """Read a file of `infinity bench-links`. Raises ConfigError."""
        try:
            text = read_input(file, _LARGEST)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; pass a file of infinity bench-links") from None
        return cls.from_json(text, str(file))

    @classmethod
    def from_json(cls, text: str | bytes, name: str = "bandwidths") -> Links:
        """Parse one JSON object. name: of the file, for errors.

        A dtype that `flops` lacks is None there; its names in the config are accepted, too. Raises ConfigError with one
        problem for each key that is missing, or whose value is of another type, negative or 0.
        """
        try:
            content = parse_json(text, finite=True)
        except ValueError as error:
            raise ConfigError(f"{name} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{name} holds {_show(content)}: pass the object that infinity bench-links writes")
        problems = tuple(_problems(content))
        if problems:
            raise ConfigError([f"{name}: {problem}" for problem in problems])
        given = {key: content.pop(key) for key in _KEYS}
        flops, weights = _by_dtype(given.pop("flops")), _by_dtype(content.pop("weights", {}))
        given |= {key: content.pop(key) for key in OPTIONAL if key in content}
        return cls(**given, flops=flops, weights=weights, facts=content)

    def to_json(self) -> str:
        """Return the object that `from_json` parses, on several lines."""
        content = {key: getattr(self, key) for key in _KEYS} | {"flops": dict(self.flops)}
        content |= {"weights": dict(self.weights)} if self.weights else {}
        content |= {key: value for key in OPTIONAL if (value := getattr(self, key)) != getattr(Links, key)}
        return json.dumps({**content, **self.facts}, indent=2) + "\n"


OVERHEADS = ("wakeup_latency", "launch_overhead", "unit_overhead")
OPTIONAL = ("dram", *OVERHEADS)
_KEYS = (*BANDWIDTHS, "flops", "baseline_rss")
_ALWAYS_THERE = ("memory",)


def _by_dtype(rates: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return torch's name of each dtype → its rate, from rates by either name; no dtype at all stays so."""
    return {dtype: rates.get(dtype, rates.get(short)) for dtype, short in DTYPES.items()} if rates else {}


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    for key in _KEYS:
        if key not in content:
            yield f"{key} is missing: measure it with infinity bench-links, or add it"
        elif key == "flops":
            yield from _rates_problems("flops", content[key], "FLOP/s")
        elif key == "baseline_rss":
            if not _is_number(content[key], int) or content[key] < 0:
                yield f"baseline_rss is {_show(content[key])}: give a whole number of bytes, 0 or more"
        elif not _is_rate(content[key], null=key not in _ALWAYS_THERE):
            instead = "" if key in _ALWAYS_THERE else ", or null if the hardware is absent"
            yield f"{key} is {_show(content[key])}: give bytes per second, more than 0{instead}"
    yield from _rates_problems("weights", content.get("weights", {}), "bytes per second")
    if not _is_rate(content.get("dram")):
        yield f"dram is {_show(content['dram'])}: give bytes per second, more than 0, or null: copies slow no processor"
    for key in OVERHEADS:
        if not _is_number(content.get(key, 0), int, float) or not 0 <= content.get(key, 0) < 1:
            yield f"{key} is {_show(content[key])}: give seconds, 0 or more and below 1"


def _rates_problems(key: str, rates: Any, unit: str) -> Iterator[str]:
    if not isinstance(rates, dict):
        yield f'{key} is {_show(rates)}: give an object such as {{"bfloat16": 1e12}}'
        return
    for dtype, rate in rates.items():
        if dtype not in (*DTYPES, *DTYPES.values()):
            yield f"{key}.{dtype} is not known: give {', '.join(DTYPES)}"
        elif DTYPES.get(dtype) in rates:
            yield f"{key} has {dtype} and {DTYPES[dtype]}, which are one dtype: remove one of them"
        elif not _is_rate(rate):
            yield f"{key}.{dtype} is {_show(rate)}: give {unit}, more than 0, or null if the device lacks the dtype"


def _is_rate(value: Any, *, null: bool = True) -> bool:
    return null if value is None else _is_number(value, int, float) and 0 < value <= sys.float_info.max


def _is_number(value: Any, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _show(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


@dataclass(frozen=True)
class Machine:
    """Equal nodes. Each GPU has a rank; without GPUs each node has one rank, which computes in host memory."""

    host_memory: int
    """Bytes of a node."""
    nvme: int = 0
    """Bytes of a node."""
    nodes: int = 1
    gpus: int = 0
    """GPUs of a node."""
    device_memory: int = 0
    """Bytes of a GPU."""
    processors: int = 0
    """Processors of a node for updates; 0: as many as here."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus < 0:
            raise ConfigError(f"a machine has 1 or more nodes and 0 or more GPUs, not {self.nodes} and {self.gpus}")
        if self.host_memory < 1:
            raise ConfigError(f"--host-memory must be more than 0, not {self.host_memory}")
        if self.gpus and not self.device_memory:
            raise ConfigError(f"give the memory of each of the {self.gpus} GPUs: --device-memory")
        if self.device_memory and not self.gpus:
            raise ConfigError("--device-memory is that of a GPU, and the machine has none: give --gpus")

    @classmethod
    def here(cls, folder: Path | None = None) -> Machine:
        """Return this machine. folder: a folder on its drive; None: without nvme."""
        info = default_device().info
        nvme = 0 if folder is None else shutil.disk_usage(_existing(folder)).free
        gpus = 0 if info.type == "cpu" else number_of("LOCAL_WORLD_SIZE", 1, least=1)
        return cls(total_memory(), nvme, 1, gpus, info.nbytes if gpus else 0, info.processors)

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def rank_info(self, config: Config) -> RankInfo:
        """Return the ranks as a plan needs them."""
        backend = "" if self.ranks == 1 else "nccl" if self.gpus else "gloo"
        return RankInfo(self.ranks, self.ranks if Sharding.of(config.zero_optimization.stage).optim else 1, backend)

    def device_info(self, config: Config) -> DeviceInfo:
        """Return the device of a rank as a plan needs it."""
        processors = self.processors or update_processors(feeding=bool(self.gpus))
        each = max(1, processors // self.ranks_per_node)
        limit = config.infinity.memory.device or 0
        if not self.gpus:
            return DeviceInfo(processors=each, limit=limit)
        return DeviceInfo("cuda", host_addressable=False, nbytes=self.device_memory, processors=each, limit=limit)

    def resolved(self, config: Config) -> Config:
        """Return `config` with bytes in place of `"auto"` in `infinity.memory`: those of a node with nothing in use."""
        memory, given = config.infinity.memory, {}
        if memory.host == "auto":
            given["host"] = host_share(self.host_memory, computes_on_host=not self.gpus)
        if memory.nvme == "auto":
            given["nvme"] = nvme_share(self.nvme)
        section = config.infinity.model_copy(update={"memory": memory.model_copy(update=given)})
        return config.model_copy(update={"infinity": section})

    def budget(self, config: Config) -> Budget:
        """Return a rank's part of `infinity.memory` of a `resolved` config."""
        memory = config.infinity.memory
        share = [nbytes and int(nbytes) // self.ranks_per_node for nbytes in (memory.host, memory.nvme)]
        return Budget(
            share[0], memory.host_params, share[1], memory.device_optimizer, memory.device_states, self.free_nvme
        )

    @property
    def free_nvme(self) -> int:
        """Return the bytes of the drives for the states of a rank."""
        return nvme_share(self.nvme) // self.ranks_per_node


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.exists())
