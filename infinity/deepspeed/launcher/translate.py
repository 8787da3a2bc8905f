"""Translates the flags of DeepSpeed's launcher into commands. Pure: the machine is an argument.

Hosts and their slots: the hostfile, `--include`, `--exclude`, `--num_nodes` and `--num_gpus`, in DeepSpeed's syntax.

A slot is the index of a GPU on its host. All functions are pure and raise ConfigError with every problem at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from infinity.deepspeed.launcher.flags import Command, Program, meeting, single_rank_command, torchrun_command
from infinity.errors import ConfigError

_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)(\s.*)?")
"""A line of a hostfile. Further MPI settings, such as max_slots, are ignored, as in DeepSpeed."""


@dataclass(frozen=True)
class Host:
    """A host and the slots that are used on it, in ascending order."""

    name: str
    slots: tuple[int, ...]


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile with lines such as `worker-0 slots=4`, in its order, which is that of node ranks.

    source: name of the file, for errors.
    """
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        where = f"{source}, line {number}"
        if match is None:
            problems.append(f"{where}: {line!r} does not name a host: write HOST slots=N")
        elif match["name"] in hosts:
            problems.append(f"{where}: {match['name']} occurs twice: remove one of the lines")
        elif int(match["slots"]) == 0:
            problems.append(f"{where}: {match['name']} has no slots: remove the line, or give it at least one")
        else:
            hosts[match["name"]] = Host(match["name"], tuple(range(int(match["slots"]))))
    if not hosts and not problems:
        problems.append(f"{source} has no hosts: write one host per line, such as worker-0 slots=4")
    if problems:
        raise ConfigError(problems)
    return tuple(hosts.values())


def select_hosts(hosts: Sequence[Host], include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Return the hosts and slots that `--include` names, or that remain after `--exclude`, in the order of `hosts`.

    Both are `HOST[:SLOT,SLOT…][@HOST…]`; a host without slots stands for all of them.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude cannot be combined: keep one of them")
    if not include and not exclude:
        return tuple(hosts)
    option = "--include" if include else "--exclude"
    named = _parse_filter(option, include or exclude, {host.name: host.slots for host in hosts})
    selected = []
    for host in hosts:
        slots = named.get(host.name, frozenset())
        kept = tuple(slot for slot in host.slots if (slot in slots) == bool(include))
        if kept:
            selected.append(replace(host, slots=kept))
    if not selected:
        raise ConfigError(f"--exclude {exclude} leaves no slot on any host: exclude less")
    return tuple(selected)


def limit_hosts(hosts: Sequence[Host], num_nodes: int | None, num_gpus: int | None) -> tuple[Host, ...]:
    """Return the first `num_nodes` hosts with their first `num_gpus` slots; None: all."""
    problems = [
        f"{option} is {value}, not a positive number"
        for option, value in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus))
        if value is not None and value < 1
    ]
    if num_nodes is not None and num_nodes > len(hosts):
        names = ", ".join(host.name for host in hosts)
        problems.append(
            f"--num_nodes is {num_nodes}, but there are {len(hosts)} hosts ({names}): list more in --hostfile"
        )
    if problems:
        raise ConfigError(problems)
    hosts = hosts[:num_nodes]
    problems = [
        f"--num_gpus is {num_gpus}, but {host.name} has {len(host.slots)}: pass at most the GPUs of the smallest host"
        for host in hosts
        if num_gpus is not None and num_gpus > len(host.slots)
    ]
    if problems:
        raise ConfigError(problems)
    return tuple(replace(host, slots=host.slots[:num_gpus]) for host in hosts)


def _parse_filter(option: str, text: str, hosts: Mapping[str, tuple[int, ...]]) -> dict[str, frozenset[int]]:
    """Return host → slots that a filter names. hosts: name → all of its slots, for which a bare name stands."""
    named: dict[str, frozenset[int]] = {}
    whole: set[str] = set()
    problems = []
    for part in text.split("@"):
        name, colon, listed = part.partition(":")
        numbers = listed.split(",") if colon else []
        if name not in hosts:
            known = ", ".join(hosts)
            problems.append(
                f"{option}: {name!r} is not one of the hosts {known}: write HOST or HOST:SLOT,SLOT, joined by @"
            )
            continue
        wrong = [n for n in numbers if not (n.isascii() and n.isdigit() and int(n) in hosts[name])]
        if wrong:
            slots = ", ".join(map(str, hosts[name]))
            problems.append(
                f"{option}: {name} has the slots {slots}, not {', '.join(map(repr, wrong))}: choose among them"
            )
            continue
        if name in named and (name in whole or not colon):
            problems.append(f"{option}: {name} is listed twice, at least once without slots: list it once")
            continue
        if not colon:
            whole.add(name)
        named[name] = named.get(name, frozenset()).union(map(int, numbers) if colon else hosts[name])
    if problems:
        raise ConfigError(problems)
    return named


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
    """The machine that the launcher runs on: GPUs visible to torch, cores, host names, environment variables.

    python: command of the launcher's interpreter. port: a free TCP port.
    """

    gpus: int
    cores: int
    names: frozenset[str]
    environ: Mapping[str, str]
    python: str
    port: int

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
    if _is_single(ranks, request):
        command = _single_rank(request, machine, environment)
    else:
        rank_0 = meeting(request.master_addr, request.master_port)
        command = torchrun_command(request.program, ranks, rank_0, environment, request.logs)
    return Launch((command,), 0, tuple(notes))


def _is_single(ranks: int, request: Request) -> bool:
    """Return whether the launch needs no torchrun, which writes the log of --enable_each_rank_log."""
    return ranks == 1 and request.logs is None


def _single_rank(request: Request, machine: Machine, environment: Mapping[str, str]) -> Command:
    address = f"{request.master_addr or '127.0.0.1'}:{request.master_port or machine.port}"
    return single_rank_command(request.program, machine.python, address, environment, machine.environ)


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
    if len(hosts) == 1 and _is_single(len(host.slots), request):
        command = _single_rank(request, machine, {_VISIBLE: str(host.slots[0])})
    else:
        command = replace(_on_host(request, hosts, node, _threads(len(host.slots), machine)), host=None)
    return Launch((command,), 0, tuple(notes))


def _on_host(request: Request, hosts: tuple[Host, ...], node: int, variables: Mapping[str, str]) -> Command:
    slots = hosts[node].slots
    address = request.master_addr or (hosts[0].name if len(hosts) > 1 else None)
    rank_0 = meeting(address, request.master_port, node, len(hosts))
    environment = {**variables, _VISIBLE: ",".join(map(str, slots))}
    return torchrun_command(request.program, len(slots), rank_0, environment, request.logs, hosts[node].name)


def _threads(ranks: int, machine: Machine) -> dict[str, str]:
    """Return OMP_NUM_THREADS, cores / ranks. torchrun would give each of several ranks one thread."""
    if ranks == 1 or _THREADS in machine.environ:
        return {}
    return {_THREADS: str(max(1, machine.cores // ranks))}
