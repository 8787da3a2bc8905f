"""Limit of an accelerator's memory: torch gets its share while an engine is open, and the previous one afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.tiers.accelerator import AcceleratorDevice

TOTAL = 80 << 30


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AcceleratorDevice]:
    """Return a device of `TOTAL` bytes with the given functions of its torch module."""

    def make(**functions: Any) -> AcceleratorDevice:
        device = AcceleratorDevice.__new__(AcceleratorDevice)
        device.torch_device = torch.device("meta")
        device._fraction = None
        device._library = SimpleNamespace(mem_get_info=lambda device: (TOTAL, TOTAL), **functions)
        return device

    return make


def test_memory_that_torch_keeps_is_available(device_of: Callable[..., AcceleratorDevice]) -> None:
    kept = {"memory_reserved": lambda device: 9 << 30, "memory_allocated": lambda device: 5 << 30}
    assert device_of(**kept).available_bytes() == TOTAL + (4 << 30)
    assert device_of().available_bytes() == TOTAL


@pytest.mark.parametrize("before", [None, 0.75])
def test_torch_gets_its_share_until_the_limit_is_lifted(
    before: float | None, device_of: Callable[..., AcceleratorDevice]
) -> None:
    shares: list[float] = []
    functions: dict[str, Any] = {"set_per_process_memory_fraction": lambda share, device: shares.append(share)}
    if before is not None:
        functions["get_per_process_memory_fraction"] = lambda device: before
    device = device_of(**functions)
    device.limit(30 << 30)
    device.limit(20 << 30)
    device.lift_limit()
    device.lift_limit()
    assert shares == [30 / 80, 20 / 80, before or 1.0]


def test_a_limit_beyond_the_device_changes_nothing(device_of: Callable[..., AcceleratorDevice]) -> None:
    device = device_of()
    device.limit(TOTAL)
    device.lift_limit()


def test_a_limit_that_torch_cannot_set_is_logged(
    device_of: Callable[..., AcceleratorDevice], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "infinity"):
        device_of().limit(30 << 30)
    assert "torch cannot limit memory on meta: infinity.memory.device" in caplog.text
