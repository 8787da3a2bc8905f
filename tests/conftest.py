"""Fixtures for the whole suite; what they are made of is in tests/support (`from support.models import Stack`)."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from torch import nn

from infinity.config import Config
from infinity.engine.training import TrainingEngine
from infinity.tiers.device import Device
from support import room
from support.configs import engine_config
from support.cover import pairwise_cover, value_cover
from support.late_device import LateDevice
from support.loops import open_engine

OpenEngine = Callable[..., TrainingEngine]

hypothesis.settings.register_profile("suite", deadline=None)  # no test depends on time
hypothesis.settings.register_profile("campaign", deadline=None, max_examples=340)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """A suite started in the background is born with SIGINT ignored, and so would be the processes it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput") and (config.option.basetemp or config.getoption("all_cases")):
        os.environ[room.ON_DISK] = "1"  # xdist gives its workers a basetemp in any case
    if config.getoption("all_cases"):
        hypothesis.settings.load_profile("campaign")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case of tests with several parameters")


@pytest.hookimpl(trylast=True)  # after -m: a case that it deselects covers no value
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = config.option.keyword or any("::" in argument for argument in config.args)
    if not config.getoption("all_cases") and not selected:
        _thin(config, items)


def _thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases whose values of parameters, or pairs of values if the test is marked `pairwise`, all occur in
    other cases of the same test. Of a test marked `campaign(few=N)`, keep at most N, evenly spaced.
    """
    tests: dict[object, dict[tuple[str, ...], pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "every_case"))):
            assert isinstance(item, pytest.Function)
            values = tuple(map(repr, item.callspec.params.values())) if hasattr(item, "callspec") else ()
            tests.setdefault((item.path, item.originalname), {}).setdefault(values, item)
    repeated = set()
    for cases in tests.values():
        one = next(iter(cases.values()))
        cover = (pairwise_cover if one.get_closest_marker("pairwise") else value_cover)(list(cases))
        campaign = one.get_closest_marker("campaign")
        few = campaign.kwargs.get("few", len(cover)) if campaign else len(cover)
        kept = cover[:: ceil(len(cover) / few)]
        repeated |= {id(item) for case, item in cases.items() if case not in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in repeated])
    items[:] = [item for item in items if id(item) not in repeated]


_SYSTEM_WIDE = ("test_faults.py", "test_real_faults.py", "test_io.py", "test_join.py", "test_bad_input.py")
"""Files whose tests fill loop devices, AIO slots or ports."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Called with `-n`. (`--dist loadgroup` of xdist 3.8 has no effect with pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling  # a machine with a GPU may lack it

    class Files(LoadScopeScheduling):
        """Runs files side by side, and each test of tests/gpu; tests of several ranks, which start processes of their
        own, and tests that use up something of the whole system follow one another in one worker.
        """

        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.split("::")[0])
            if path.parent.name == "gpu":  # few files, whose tests take turns on the device
                return nodeid
            return "ranks" if path.parent.name == "multirank" or path.name in _SYSTEM_WIDE else str(path)

    return Files(config, log)


@pytest.fixture(autouse=True, scope="module")
def _few_collectable_objects() -> None:
    """Exempt what exists before a file's tests from garbage collection: `initialize` looks through all objects, and
    tests call gc.collect().
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Engines of later tests would join a process group that a test leaves open."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Models are so small that threads only cost, and sums are in one order."""
    torch.set_num_threads(1)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder on disk for tests of I/O, and with --all-cases or --basetemp; otherwise in memory, if `room` allows."""
    on_disk = request.path.relative_to(Path(__file__).parent).parts[0] in _ON_DISK
    memory = None if on_disk else room.in_memory()
    if memory is None:
        yield request.getfixturevalue("tmp_path")  # pytest's own
        return
    folder = Path(tempfile.mkdtemp(prefix=f"{request.function.__name__}-", dir=memory))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


_ON_DISK = ("cli", "native", "tiers")


@pytest.fixture
def late_device() -> LateDevice:
    """A device with memory of its own whose copies complete late."""
    return LateDevice()


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    """make_engine(model, config=None, device=None, **options of engine_config): an engine, closed at the test's end."""
    opened: list[TrainingEngine] = []

    def make(
        model: nn.Module, config: Config | None = None, device: Device | None = None, **options: Any
    ) -> TrainingEngine:
        engine = open_engine(model, config or engine_config(folder=tmp_path, **options), device)
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()
