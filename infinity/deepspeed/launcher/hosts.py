"""Hosts and their slots: the hostfile, `--include`, `--exclude`, `--num_nodes` and `--num_gpus`, in DeepSpeed's syntax.

A slot is the index of a GPU on its host. All functions are pure and raise ConfigError with every problem at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    named = _parse_filter(option, include or exclude, {host.name: host for host in hosts})
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


def _parse_filter(option: str, text: str, hosts: Mapping[str, Host]) -> dict[str, frozenset[int]]:
    """Return host → slots that a filter names. A host without slots stands for all of its slots."""
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
        wrong = [number for number in numbers if not _is_slot(number, hosts[name])]
        if wrong:
            slots = ", ".join(map(str, hosts[name].slots))
            problems.append(
                f"{option}: {name} has the slots {slots}, not {', '.join(map(repr, wrong))}: choose among them"
            )
            continue
        if name in named and (name in whole or not colon):
            problems.append(f"{option}: {name} is listed twice, at least once without slots: list it once")
            continue
        if not colon:
            whole.add(name)
        slots_named = frozenset(map(int, numbers)) if colon else frozenset(hosts[name].slots)
        named[name] = named.get(name, frozenset()) | slots_named
    if problems:
        raise ConfigError(problems)
    return named


def _is_slot(text: str, host: Host) -> bool:
    return text.isascii() and text.isdigit() and int(text) in host.slots
