"""Runs tests on a package of which one module is replaced by a mutant. No file of the tree is changed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HOOK = Path(__file__).parent / "hook"
Outcome = Literal["killed", "timeout", "survived", "chance", "unused", "broken"]
_RAN = re.compile(r"^(\S+::.+?) (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)
_STARTED = re.compile(r"^(\S+\.py::.+?) *(?:\++ Timeout.*|Fatal Python error.*)?$")


@dataclass(frozen=True)
class Result:
    """Outcome of the tests with a mutant."""

    outcome: Outcome
    """killed: a test failed. timeout: the tests hung, which counts as killed. survived: all passed. chance: the failed
    test passed when it was run again alone. unused: all passed, and none imported the module. broken:
    pytest could not run them.
    """
    test: str
    """The test that failed or hung; if there is none, the end of pytest's output."""
    seconds: float


def run(
    root: Path, module: str, source: str, tests: Sequence[str], *, timeout: float, options: Sequence[str] = ()
) -> Result:
    """Run `tests` in the order in which they are given, until one fails, with `source` as the module `module`.

    root: the folder that pytest starts in. timeout: seconds for all of them together; each test has the suite's own
    limit besides.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder, _unmounting(folder):
        mutant = Path(folder, f"{module}.py")
        mutant.write_text(source)
        found = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "INFINITY_MUTANT": str(mutant),
            "PYTHONPATH": os.pathsep.join(found),
            "TMPDIR": folder,
            "COLUMNS": "500",  # or names of tests are cut in the summary
        }
        command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "-p", "no:cacheprovider", "--color=no"]
        command += [f"--basetemp={folder}/tests", *options, *tests]
        began = time.monotonic()
        code, output = _run(command, root, environment, timeout)
        served = Path(f"{mutant}.served").exists()
    outcome, test = _judge(code, output, served)
    return Result(outcome, test, time.monotonic() - began)


@contextmanager
def _unmounting(folder: str) -> Iterator[None]:
    """Unmount at the end what tests that were killed have left mounted below `folder`."""
    try:
        yield
    finally:
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in sorted((each for each in mounts if each.startswith(f"{folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", place], check=False)


def _run(command: Sequence[str], root: Path, environment: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """Return the exit status (None: a timeout) and the output. Ends all processes that the command started."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True, **streams)
        code: int | None = None
        _running.add(process)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
        finally:
            _end(process)  # with the processes that a test started
            _running.discard(process)
        if _ending.is_set():
            raise InterruptedError("the tests were ended before they had a result")
        output.seek(0)
        return code, output.read()


def end_all() -> None:
    """End the processes of other threads, which a Ctrl-C does not reach because each has its own session."""
    _ending.set()
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_running: set[subprocess.Popen[str]] = set()
_ending = threading.Event()


def _judge(code: int | None, output: str, served: bool) -> tuple[Outcome, str]:
    if code == 0:
        return ("survived", "") if served else ("unused", "")
    lines = output.splitlines()
    if code is None or "+ Timeout +" in output or "Timeout (>" in output:
        return "timeout", _last_started(lines)
    if failed := _FAILED.search(output):
        return "killed", failed[1]
    if code in (1, 2) or code < 0:  # a crash of the process, or an import that failed
        return "killed", f"{_last_started(lines) or 'the import'} (exit status {code})"
    return "broken", "\n".join(lines[-5:])


def _last_started(lines: Sequence[str]) -> str:
    """Return the test that pytest named last."""
    for line in reversed(lines):
        if match := _RAN.match(line) or _STARTED.match(line):
            return match[1]
    return ""
