"""Nodes of a cluster: network namespaces of this machine, joined by pairs of virtual interfaces."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A network namespace with one interface."""

    name: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Return `command`, run on this node."""
        return ["ip", "netns", "exec", self.name, *command]

    def unplug(self) -> None:
        """Take the interface down: packets are lost without a notice."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


def refusal() -> str:
    """Return why this machine makes no nodes; empty if it does."""
    name = f"infinity-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except FileNotFoundError:
        return "there is no command `ip`"
    except subprocess.CalledProcessError as error:
        return f"`ip netns add` failed: {error.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Make two nodes on one cable. Their processes are killed at the end."""
    first, second = (
        Node(f"infinity-{os.getpid()}-{number}", f"inf{os.getpid()}-{number}", f"10.213.77.{1 + number}")
        for number in range(2)
    )
    with ExitStack() as undo:
        for node in (first, second):
            _ip("netns", "add", node.name)
            undo.callback(_ip, "netns", "delete", node.name)
            undo.callback(_kill_all, node)
        there = ("netns", second.name, "name", second.interface)
        _ip("-n", first.name, "link", "add", first.interface, "type", "veth", "peer", *there)
        for node in (first, second):
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.interface)
            for interface in (node.interface, "lo"):
                _ip("-n", node.name, "link", "set", interface, "up")
        yield first, second


def _kill_all(node: Node) -> None:
    for process in _ip("netns", "pids", node.name).split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
