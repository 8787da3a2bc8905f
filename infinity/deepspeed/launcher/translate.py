"""Translates the flags of DeepSpeed's launcher into torchrun commands. Pure: the machine is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from infinity.deepspeed.launcher.flags import Command, Meeting, Program, make_command
from infinity.deepspeed.launcher.hosts import Host, limit_hosts, select_hosts
from infinity.errors import ConfigError

_VISIBLE, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Request:
    """The flags. hosts: from the hostfile; None: no hostfile. exports: environment variables for all hosts."""

    program: Program
    hosts: tuple[Host, ...] | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    node_rank: int | None = None
    no_ssh: bool = False
    force_multi: bool = False
    logs: str | None = None
    exports: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The machine that the launcher runs on: GPUs visible to torch, cores, host names, environment variables."""

    gpus: int
    cores: int
    names: frozenset[str]
    environ: Mapping[str, str]

    @property
    def visible(self) -> str:
        """CUDA_VISIBLE_DEVICES, which restricts `gpus`."""
        return self.environ.get(_VISIBLE, "")


@dataclass(frozen=True)
class Launch:
    """Commands by node rank. here: index of the one to run on this machine, or None. notes: lines for the user."""

    commands: tuple[Command, ...]
    here: int | None
    notes: tuple[str, ...] = ()


def translate(request: Request, machine: Machine) -> Launch:
    """Return the commands for `request`. Raises ConfigError if flags conflict or do not fit the machine."""
    counted = request.num_nodes is not None or request.num_gpus is not None
    if counted and (request.include or request.exclude):
        raise ConfigError("--num_nodes and --num_gpus cannot be combined with --include and --exclude: use one pair")
    if request.hosts is None:
        return _on_this_machine(request, machine)
    hosts = limit_hosts(
        select_hosts(request.hosts, request.include, request.exclude), request.num_nodes, request.num_gpus
    )
    here = _node_rank(request, hosts)
    if here is None:
        return Launch(tuple(_on_host(request, hosts, node, request.exports) for node in range(len(hosts))), None)
    return _on_one_of(request, machine, hosts, here)


def _on_this_machine(request: Request, machine: Machine) -> Launch:
    """Return the command for one rank per GPU, or for ranks on the CPU."""
    problems = []
    if request.num_nodes is not None and request.num_nodes != 1:
        problems.append(f"--num_nodes is {request.num_nodes}, but there is no hostfile: name the hosts in --hostfile")
    if request.node_rank not in (None, 0):
        problems.append(f"--node_rank is {request.node_rank}, but there is no hostfile: name the hosts in --hostfile")
    if request.force_multi:
        problems.append("--force_multi needs a hostfile: name the hosts in --hostfile")
    if problems:
        raise ConfigError(problems)
    notes: list[str] = []
    if machine.gpus == 0:
        ranks, devices = _cpu_ranks(request), None
        notes.append(f"no GPU: starting {ranks} {'rank' if ranks == 1 else 'ranks'} on the CPU")
    else:
        slots = _local_slots(request, machine)
        ranks, devices = len(slots), _visible_devices(slots, machine)
        if machine.visible and request.num_gpus:
            notes.append(f"--num_gpus counts the GPUs of {_VISIBLE}={machine.visible}")
    environment = {**({_VISIBLE: devices} if devices else {}), **_threads(ranks, machine)}
    meeting = Meeting(request.master_addr, request.master_port)
    command = make_command(request.program, ranks, meeting, environment, request.logs)
    return Launch((command,), 0, tuple(notes))


def _cpu_ranks(request: Request) -> int:
    for option, value in (("--include", request.include), ("--exclude", request.exclude)):
        if value:
            raise ConfigError(
                f"{option} {value} selects GPUs, but there is none: --num_gpus N starts N ranks on the CPU"
            )
    if request.num_gpus is not None and request.num_gpus < 1:
        raise ConfigError(f"--num_gpus is {request.num_gpus}, not a positive number")
    return request.num_gpus or 1


def _local_slots(request: Request, machine: Machine) -> tuple[int, ...]:
    for option, value in (("--include", request.include), ("--exclude", request.exclude)):
        if value and machine.visible:
            raise ConfigError(f"{option} {value} and {_VISIBLE}={machine.visible} both select GPUs: remove one of them")
    hosts = select_hosts([Host("localhost", tuple(range(machine.gpus)))], request.include, request.exclude)
    return limit_hosts(hosts, None, request.num_gpus)[0].slots


def _visible_devices(slots: tuple[int, ...], machine: Machine) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for `slots`; None if they are all visible GPUs."""
    if len(slots) == machine.gpus:
        return None
    names = machine.visible.split(",") if machine.visible else [str(number) for number in range(machine.gpus)]
    return ",".join(names[slot] for slot in slots)


def _node_rank(request: Request, hosts: tuple[Host, ...]) -> int | None:
    """Return the node rank of this machine; None if no ranks start here."""
    node = request.node_rank
    if node is not None and not 0 <= node < len(hosts):
        raise ConfigError(f"--node_rank is {node}, but there are {len(hosts)} hosts: choose 0 to {len(hosts) - 1}")
    if node is None and len(hosts) == 1 and (not request.force_multi or request.no_ssh):
        node = 0
    if node is None and request.no_ssh:
        raise ConfigError(
            f"--no_ssh needs --node_rank on {len(hosts)} hosts: pass 0 to {len(hosts) - 1}, another one on each host"
        )
    return node


def _on_one_of(request: Request, machine: Machine, hosts: tuple[Host, ...], node: int) -> Launch:
    """Return the command of this machine, which is host number `node`."""
    host = hosts[node]
    notes = []
    if machine.gpus and machine.gpus <= max(host.slots) and not machine.visible:
        raise ConfigError(
            f"the hostfile gives {host.name} the slot {max(host.slots)}, but this machine has {machine.gpus} GPUs: "
            "correct the slots, or start on another host"
        )
    if machine.visible:
        notes.append(f"{_VISIBLE}={machine.visible} is replaced by the slots of {host.name}")
    if request.node_rank is None and host.name not in machine.names:
        notes.append(f"{host.name} is the only host, so its ranks start here; --force_multi prints its command instead")
    command = _on_host(request, hosts, node, _threads(len(host.slots), machine))
    return Launch((replace(command, host=None),), 0, tuple(notes))


def _on_host(request: Request, hosts: tuple[Host, ...], node: int, variables: Mapping[str, str]) -> Command:
    slots = hosts[node].slots
    several = len(hosts) > 1
    meeting = Meeting(
        request.master_addr or (hosts[0].name if several else None), request.master_port, node, len(hosts)
    )
    environment = {**variables, _VISIBLE: ",".join(map(str, slots))}
    return make_command(request.program, len(slots), meeting, environment, request.logs, hosts[node].name)


def _threads(ranks: int, machine: Machine) -> dict[str, str]:
    """Return OMP_NUM_THREADS, cores / ranks. torchrun would give each of several ranks one thread."""
    if ranks == 1 or _THREADS in machine.environ:
        return {}
    return {_THREADS: str(max(1, machine.cores // ranks))}
