"""Check and measure the package on a machine with a CUDA device and no network, in calls of at most eight minutes.

    bench/gpu_check.sh right                     facts, copies, bits of placements, tests, a step of 1.3 B in four kinds
    bench/gpu_check.sh headline                  GPT-2 with 10 B in bf16 and fp16; a trace of where the device idles
    BEFORE=old.whl bench/gpu_check.sh fix        one change, before and after, in turns
    bench/gpu_check.sh kernels                   kernels beside a copy, streams of the user, compute-sanitizer
    bench/gpu_check.sh nvme                      350 M and 1.3 B with states on the drive

A call needs no files of an earlier one. It writes CALL.md, a summary, and CALL.tar.gz, all logs and figures. Both are
replaced after each step, so an interrupted call keeps its completed steps. A package that was built here is left beside
them as a wheel, which the next call uses if WHEELS names its folder.

Variables:

    RESULTS=folder         for these files (default: build/gpu-results)
    WHEELS=folder          wheels to install (default: build/gpu-bundle, which `make gpu-bundle` fills)
    INFINITY_WHEEL=file    a wheel of Infinity to install, even if it was built from other sources
    NVME=folder            for states on NVMe (default: the system's folder for temporary files)
    SECONDS_OF_CALL=480    time of a call, the build included
    DRY_RUN=1              use the emulated device of tests/late, tiny models and the installed package

Needs python3 with torch, numpy, pytest, pytest-xdist and pip. A build also needs nvcc, cmake, ninja, pybind11 and
scikit-build-core. Exit status: 0 if all steps passed; 1 if one failed; 2 for an unknown call; 3 if none failed and some
could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from gpu_kit.calls import CALLS, Kit, install
from gpu_kit.sizes import DRY, Sizes
from gpu_kit.steps import Outcome, Steps
from gpu_kit.summary import exit_status, figures_of, leave_files, page, verdict

ROOT = Path(__file__).resolve().parents[1]
EMULATED = ROOT / "bench" / "gpu_kit" / "emulated"
"""Its sitecustomize.py loads the emulated device in each process of Python."""
CUDA_TOOLS = "/usr/local/cuda/bin"
"""Usual folder of nvcc and compute-sanitizer."""
DEVICE_SECONDS = 120
"""Time for the first use of the device."""
WHY_NO_DEVICE = "import torch; torch.empty(0, device='cuda'); print(torch.cuda.get_device_name())"


def no_device(environment: dict[str, str]) -> str:
    """Return the error of torch if it has no CUDA device; otherwise an empty text."""
    command = [sys.executable, "-c", WHY_NO_DEVICE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=DEVICE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"the CUDA device did not answer in {DEVICE_SECONDS} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or ["torch ended with status " + str(done.returncode)]
    return f"there is no CUDA device here ({lines[-1]})"


def memory_limit(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes of memory that this container may have."""
    found = [math.inf]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # without a limit, the text is "max"
            found.append(int((groups / name).read_text()))
    return min(found)


def run(call: str, environment: dict[str, str], work: Path) -> int:
    """Run one call in the folder `work`. Returns the exit status."""
    dry = environment.get("DRY_RUN", "") not in ("", "0")
    results = Path(environment.get("RESULTS", ROOT / "build" / "gpu-results")).resolve()
    results.mkdir(parents=True, exist_ok=True)
    commands, figures, site = work / "commands", work / "results", work / "site"
    for folder in (commands, figures, site):
        folder.mkdir()
    for name in ("bench", "tests"):  # not the source folder, whose compiled modules are missing
        shutil.copytree(ROOT / name, commands / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", commands)

    environment = of_steps(environment, [EMULATED, ROOT / "tests"] if dry else [site], dry=dry)
    seconds = float(environment.get("SECONDS_OF_CALL", "480"))
    steps = Steps(
        figures,
        seconds,
        environment=environment,
        folder_of_commands=commands,
        after_each=lambda outcomes: summarise(call, outcomes, figures, results),
    )
    kit = Kit(
        steps=steps,
        sizes=DRY if dry else Sizes(),
        root=ROOT,
        work=commands,
        figures=figures,
        results=results,
        site=site,
        wheels=Path(environment.get("WHEELS", ROOT / "build" / "gpu-bundle")).resolve(),
        nvme=Path(environment.get("NVME", tempfile.gettempdir())).resolve(),
        no_device="" if dry else no_device(environment),
        memory_limit=memory_limit(),
        dry=dry,
    )
    signal.signal(signal.SIGTERM, _stopped)
    print(f"== {call} ({seconds:.0f} s at most); results: {results}", flush=True)
    if install(kit):
        CALLS[call](kit)
    text = summarise(call, steps.outcomes, figures, results)
    print(f"== summary ({seconds - steps.left:.0f} s)\n\n{text}", flush=True)
    return exit_status(steps.outcomes)


def of_steps(given: Mapping[str, str], first: Sequence[Path], *, dry: bool) -> dict[str, str]:
    """Return the environment of the steps. first: folders that Python searches first."""
    paths = [*map(str, first), given.get("PYTHONPATH", "")]
    own = str(Path(sys.executable).parent)  # scripts start python3
    # Tests on the emulated device would pass in place of those on CUDA.
    kept = {name: value for name, value in given.items() if name != "INFINITY_TEST_DEVICE"}
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    found["PATH"] = os.pathsep.join([own, given.get("PATH", ""), CUDA_TOOLS])
    return {**kept, **found, **({"INFINITY_TEST_DEVICE": "late"} if dry else {})}


def summarise(call: str, outcomes: Sequence[Outcome], figures: Path, results: Path) -> str:
    """Write and return the summary. Errors are printed, not raised."""
    try:
        text = page(call, outcomes, figures_of(figures), figures)
    except Exception:  # noqa: BLE001 - later steps run without a summary
        text = f"# {call}: {verdict(outcomes)}\nthe summary failed:\n{traceback.format_exc()}"
    try:
        leave_files(results, call, text, figures)
    except Exception:  # noqa: BLE001 - as above
        traceback.print_exc()
    return text


def _stopped(number: int, frame: FrameType | None) -> None:
    """Leave the running step, which prints its stacks. Completed steps are in the results already."""
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS, metavar=" | ".join(CALLS))
    call = parser.parse_args(arguments).call
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as work:
        return run(call, dict(os.environ), Path(work))


if __name__ == "__main__":
    sys.exit(main())
