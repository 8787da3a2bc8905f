"""pytest plugin of `deepspeed_unit_tests.py`: runs DeepSpeed's unit tests against infinity.deepspeed.

Puts infinity.deepspeed in place of deepspeed, fills names that the tests import and that are missing with stand-ins
that fail when they are called, and starts the ranks of a distributed test by fork, without an accelerator. Ranks import
this module, too.
"""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from infinity.deepspeed.accelerator import Accelerator
from infinity.deepspeed.substitute import substitute

_GRACE_S = 5.0
"""Seconds that ranks have to end after the first failed."""
_TIMEOUT_S = float(os.environ.get("DS_UNITTEST_TIMEOUT", "60"))
_MOST = int(os.environ.get("DEEPSPEED_CASES", "2")) or sys.maxsize
"""Largest number of cases of one test function."""
_END = time.monotonic() + float(os.environ.get("DEEPSPEED_PIECE_S", "inf"))


class MissingName(AttributeError):
    """A test called a name of DeepSpeed that infinity.deepspeed lacks."""


class _StandInType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingName(f"missing name: {cls.__module__}.{cls.__qualname__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(cls.__module__, f"{cls.__qualname__}.{name}")

    def __iter__(cls) -> Iterator[Any]:
        raise MissingName(f"missing name: {cls.__module__}.{cls.__qualname__}")


def _stand_in(module: str, name: str) -> type:
    """Return a class, since tests inherit from some names and pass others to isinstance."""
    return _StandInType(name.rpartition(".")[2], (), {"__module__": module, "__qualname__": name})


def _imports(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) of every import from deepspeed in `folder`; the name is None for `import module`."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)


def _module(name: str) -> ModuleType:
    """Return module `name`; an empty one with stand-ins if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module = ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda attribute: _missing(name, attribute)  # type: ignore[method-assign]
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        setattr(_module(parent), last, module)
        return module


def _missing(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _stand_in(module, name)


def fill_missing_names(folder: Path) -> list[str]:
    """Set stand-ins for all names that the files in `folder` import from deepspeed, and return the missing names."""
    found = []
    for module_name, name in sorted(set(_imports(folder)), key=str):
        if module_name.partition(".")[0] != "deepspeed":
            continue
        module = _module(module_name)
        if name in (None, "*") or hasattr(module, name):
            continue
        try:
            importlib.import_module(f"{module_name}.{name}")
        except ImportError:
            found.append(f"{module_name}.{name}")
            setattr(module, name, _stand_in(module_name, name))
    return found


class _OnCPU(DistributedDataParallel):
    """Ignores the devices that tests name for a GPU."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


def stay_on_cpu() -> None:
    """Make numbers of devices that tests pass to torch mean the CPU."""
    torch.nn.parallel.DistributedDataParallel = _OnCPU  # type: ignore[assignment,misc]
    Accelerator.current_device = lambda self: "cpu"  # type: ignore[assignment,method-assign,return-value]


def claim_operators() -> None:
    """Report versions of CUDA and NCCL that have bf16, without which tests of bf16 are skipped on a CPU, and operators
    that are missing as incompatible.
    """
    info = getattr(_module("deepspeed.git_version_info"), "torch_info", None)
    if isinstance(info, dict):
        info.update(cuda_version="12.1", nccl_version="2.20", bf16_support=True)
    operators = _module("deepspeed.ops")
    vars(operators)["__compatible_ops__"] = defaultdict(bool, getattr(operators, "__compatible_ops__", {}))


substitute()
_FOLDER = os.environ.get("DEEPSPEED_TESTS")
if _FOLDER:
    sys.path.insert(1, _FOLDER)
    stay_on_cpu()
    claim_operators()
    MISSING = fill_missing_names(Path(_FOLDER) / "unit")


def _agree(flag: bool, op: Any = all) -> bool:
    """Return `op` of the ranks' flags. DeepSpeed's helper gathers tensors without dimensions, which gloo refuses."""
    flags: list[Any] = [flag] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return bool(op(flags))


def _run_rank(test: Any, rank: int, world_size: int, port: str, init_method: str, result: Connection) -> None:
    """Run `test` as one rank, and send (outcome, text): passed, skipped with the reason, or failed with a traceback."""
    sys.modules["unit.common"].reduce_boolean_flags = _agree  # type: ignore[attr-defined]
    try:
        reason = test._dist_run(rank, world_size, port, init_method)
        if not reason:
            test._dist_destroy()
        result.send(("skipped" if reason else "passed", reason))
    except BaseException:  # noqa: BLE001 - the parent reports it
        result.send(("failed", traceback.format_exc()))
    result.close()
    os._exit(0)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _launch(test: Any, world_size: int, init_method: str) -> None:
    """Run `test` on `world_size` ranks. The first rank that fails decides."""
    context = multiprocessing.get_context("forkserver")
    port, processes, pipes = _free_port(), [], {}
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(test, rank, world_size, port, init_method, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes[ours] = rank
    try:
        failures, reasons = _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failures:
        pytest.fail(failures[0], pytrace=False)
    if reasons:
        pytest.skip(reasons[0])


def _collect(pipes: dict[Connection, int]) -> tuple[list[str], list[str]]:
    failures, reasons, waiting = [], [], dict(pipes)
    end = time.monotonic() + _TIMEOUT_S
    while waiting and time.monotonic() < end:
        for pipe in wait(list(waiting), timeout=max(0.0, end - time.monotonic())):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                outcome, text = pipe.recv()
            except EOFError:
                outcome, text = "failed", "the process ended"
            if outcome == "failed":
                failures.append(f"rank {rank}: {text}")
                end = min(end, time.monotonic() + _GRACE_S)
            elif outcome == "skipped":
                reasons.append(text)
    if waiting and not failures:
        failures.append(f"ranks {sorted(waiting.values())} did not end in {_TIMEOUT_S:g} s")
    return failures, reasons


def _launch_with_file_store(test: Any, request: pytest.FixtureRequest, world_size: int | list[int]) -> None:
    for size in [world_size] if isinstance(world_size, int) else world_size:
        folder = str(request.getfixturevalue("tmpdir"))
        with tempfile.NamedTemporaryFile(delete=False, dir=folder, suffix="_store") as file:
            _launch(test, size, f"file://{file.name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep at most `_MOST` cases of a test function, evenly spread, and of these the ones without a result, so that an
    interrupted run goes on.
    """
    from unit import common  # type: ignore[import-not-found]  # DeepSpeed's tests

    common.DistributedExec._launch_with_file_store = _launch_with_file_store
    results = Path(os.environ["DEEPSPEED_RESULTS"])
    done = {json.loads(line)["test"] for line in results.read_text().splitlines()} if results.exists() else set()
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = [case for found in cases.values() for case in _spread(found)]
    items[:] = [item for item in chosen if item.nodeid not in done]


def _spread(cases: list[pytest.Item]) -> list[pytest.Item]:
    count = min(_MOST, len(cases))
    return [cases[number * len(cases) // count] for number in range(count)]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if time.monotonic() > _END:
        item.session.shouldstop = "the time of this piece is used up"


def pytest_configure() -> None:
    multiprocessing.set_forkserver_preload(["deepspeed_ranks", "pytest", "unit.common", "infinity.engine.training"])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append one line of JSON a test to the file that the variable DEEPSPEED_RESULTS names."""
    if report.when != "call" and report.outcome == "passed":
        return
    text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "text": text}
    with open(os.environ["DEEPSPEED_RESULTS"], "a") as file:
        file.write(json.dumps(line) + "\n")
