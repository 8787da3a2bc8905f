"""The calls of the kit, the most valuable first. None needs files of another."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gpu_kit import package
from gpu_kit.sizes import Sizes
from gpu_kit.steps import Outcome, Steps

GIB = 1 << 30
CHECK_KERNELS = "import sys; from infinity.optim import cuda_adam; sys.exit(cuda_adam.why_not() or None)"
CHECK_IMPORTS = (
    "import hypothesis, infinity, infinity.config, pytest, torch; print(infinity.__file__, torch.__version__)"
)
"""Without kernels, too: `_has_kernels` checks those."""


@dataclass
class Kit:
    """A call under way.

    work: a folder with copies of bench and tests, in which commands run. figures: folder for logs and JSON files.
    site: folder into which wheels are installed. no_device: the reason if there is no CUDA device; otherwise empty.
    memory_limit: bytes that a container may have.
    dry: use the emulated device and the installed package.
    """

    steps: Steps
    sizes: Sizes
    root: Path
    work: Path
    figures: Path
    results: Path
    site: Path
    wheels: Path
    nvme: Path
    no_device: str
    memory_limit: float = math.inf
    dry: bool = False

    def python(self, step: str, seconds: float, *words: str | Path, device: bool = True, **environment: str) -> Outcome:
        """Run a command of Python. device: skip it without a CUDA device."""
        if device and self.no_device:
            return self.steps.skip(step, self.no_device)
        return self.steps.run(step, seconds, [sys.executable, *words], **environment)

    def pytest(self, step: str, seconds: float, *words: str | Path, workers: int = 0) -> Outcome:
        # The options of pyproject.toml name plugins that may be missing.
        options = ["-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", "gpu"]
        has_xdist = find_spec("xdist") is not None or (self.site / "xdist").exists()
        spread = ["-n", str(workers), "--max-worker-restart=0"] if workers and has_xdist else []
        return self.python(step, seconds, "-m", "pytest", *options, *spread, *words)

    def gpt2(self, step: str, seconds: float, *flags: str, device: bool = True, **environment: str) -> Outcome:
        """Run the script of 10 B. Its file of figures is named after the step."""
        if device and self.no_device:
            return self.steps.skip(step, self.no_device)
        script, out = self.work / "bench" / "gpt2_10b_v100.sh", self.figures / f"{step}.json"
        command: list[str | Path] = [script, *flags, "--nvme-path", str(self.nvme), "--out", out]
        return self.steps.run(step, seconds, command, **environment)

    def device_step(self, step: str, seconds: float, size: str, *flags: str | Path, kind: str = "gpt2") -> Outcome:
        nvme = ("--nvme-path", str(self.nvme), "--steps", str(self.sizes.steps))
        out = self.figures / f"{kind}-{size}.json"
        return self.python(step, seconds, "bench/device_step.py", "--size", size, *nvme, "--output", out, *flags)


# -- the package -------------------------------------------------------------------------------------------------------


def install(kit: Kit) -> bool:
    """Install the wheels of `wheels`, and the package. Returns whether it can be imported."""
    if kit.dry:
        return kit.python("imports", 60, "-c", "import infinity, torch; print(infinity.__file__)", device=False).passed
    others = package.other_wheels(kit.wheels)
    if others and not kit.steps.run("wheels", 60, package.install(kit.site, others)).passed:
        version = sys.version.split()[0]
        print(f"The wheels may be for another Python than {version}. Run make gpu-bundle BUNDLE_PYTHON=3.x.")
    given = kit.steps.environment.get("INFINITY_WHEEL")
    wheel, why = (Path(given).resolve(), "") if given else package.carried_wheel(kit.wheels, kit.root)
    if why:
        print(f"{why}: the package is built here", flush=True)
    if wheel is not None:
        kit.steps.run("package", 60, package.install(kit.site, [wheel]))
    if wheel is None or not _has_kernels(kit, "carried"):
        _build(kit)
    kit.python("report", 60, "-m", "infinity.cli.main", "report", device=False)
    return kit.python("imports", 60, "-c", CHECK_IMPORTS, device=False).passed


def _has_kernels(kit: Kit, step: str) -> bool:
    """Return whether the kernels load, and run on this device if there is one."""
    check = "import infinity.native._adam_cuda as built; print(built.ARCHITECTURES)"
    check = check if kit.no_device else CHECK_KERNELS
    return kit.python(f"kernels-{step}", 60, "-c", check, device=False).passed


def _build(kit: Kit) -> None:
    """Build a wheel for the present device, install it and copy it to the results. If that fails, build and install one
    without kernels.
    """
    made = kit.work / "wheel"
    for kernels in (True, False):
        name = "build" if kernels else "build-no-kernels"
        command = package.build(made, package.architecture(), kit.root, kernels=kernels)
        if kit.steps.run(name, 240, command).passed:
            (wheel,) = made.glob("infinity_engine-*.whl")
            kit.steps.run(f"{name}-install", 60, package.install(kit.site, [wheel]))
            if kernels:
                shutil.copy(wheel, kit.results)
                (kit.results / package.HASH_FILE).write_text(package.source_hash(kit.root) + "\n")
                _has_kernels(kit, "built")
            return


# -- the machine -------------------------------------------------------------------------------------------------------


def facts(kit: Kit, *, always: bool = False) -> None:
    """Read the machine's facts. Writes to its memory if Linux reports little, or `always`.

    The memory of a virtual machine may grow as it is used. If it shrinks again, later steps get
    INFINITY_MACHINE_MEMORY.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    limit = kit.memory_limit / GIB
    grows = not kit.no_device and total < kit.sizes.memory_gib
    if limit < kit.sizes.memory_gib / 0.9:  # at its limit, the system may end all that runs in a container
        touch = 0.8 * (limit if grows else min(limit, total)) if always or grows else 0
    elif always and total > kit.sizes.memory_gib / 0.9:
        touch = kit.sizes.memory_gib
    else:  # the memory grows, or the kernel ends the process that writes
        touch = kit.sizes.memory_gib if grows else 0.8 * total if always else 0
    out = kit.figures / "facts.json"
    flags = ("--touch", f"{touch:g}GiB", "--nvme-path", str(kit.nvme), "--output", out)
    kit.python("facts", 75, "bench/gpu_facts.py", *flags, device=False)
    with contextlib.suppress(OSError, ValueError):
        memory = json.loads(out.read_text(encoding="utf-8"))["memory"]
        written = max((one["touched"] for one in memory if "touched" in one), default=0)
        if memory[-1].get("MemTotal", written) < written:
            kit.steps.environment["INFINITY_MACHINE_MEMORY"] = f"{written:g}GiB"
            print(f"memory shrank again: later steps get INFINITY_MACHINE_MEMORY={written:g}GiB", flush=True)


# -- the calls ---------------------------------------------------------------------------------------------------------


def right(kit: Kit) -> None:
    """Check correctness: facts, bits of placements, tests, bandwidths, a step of 1.3 B in four kinds, copies, plans."""
    bandwidths = kit.figures / "bandwidths.json"
    facts(kit, always=True)
    kit.pytest("bits", 120, "tests/gpu/test_bits.py", *kit.sizes.bits, workers=kit.sizes.workers)
    rest = ("tests/gpu", "--ignore=tests/gpu/test_bits.py")
    kit.pytest("tests", 180, *rest, *kit.sizes.tests, workers=kit.sizes.workers)
    seconds = ("--seconds", str(int(kit.sizes.links_seconds)))
    links = ("-m", "infinity.cli.main", "bench-links", "--path", str(kit.nvme), "--size", "256MiB")
    kit.python("bandwidths", 60, *links, *seconds, "--out", bandwidths)
    kinds = ("--clips", "0", "--seconds", "75", "--bandwidths", bandwidths, "--kinds")
    kit.device_step("step", 260, kit.sizes.large, *kinds, *kit.sizes.kinds)
    copies = ("--rounds", str(kit.sizes.rounds), "--output", kit.figures / "links.json", "--size")
    kit.python("links", 60, "bench/links.py", *copies, *kit.sizes.copies)
    kit.gpt2("plan", 40, "--plan", *kit.sizes.ten, device=False)
    kit.gpt2("plan-120GiB", 40, "--plan", *kit.sizes.ten, device=False, INFINITY_MACHINE_MEMORY="120GiB")


def headline(kit: Kit) -> None:
    """Measure steps of GPT-2 with 10 B in bf16 and fp16, and trace where the device idles in steps of 1.3 B."""
    facts(kit)
    steps = ("--train-iters", "4", *kit.sizes.ten)
    lanes = "--timeline", str(kit.figures / "10b-bf16.timeline.json")
    ran = [kit.gpt2("10b-bf16", 170, "--bf16", *steps, *lanes)]
    if ran[0].what == "out of time" and not _has_steady_step(kit.figures / "10b-bf16.json"):
        ran.append(kit.steps.skip("10b-fp16", "10b-bf16 had no step in its time"))
    else:
        ran.append(kit.gpt2("10b-fp16", 170, "--fp16", *steps))
    if not kit.no_device:
        smaller = ("--train-iters", "4", *kit.sizes.ten, *kit.sizes.fallback)
        for kind, one in zip(("bf16", "fp16"), ran, strict=True):
            if not one.passed and not _has_steady_step(kit.figures / f"10b-{kind}.json"):
                kit.gpt2(f"2.7b-{kind}", 75, f"--{kind}", *smaller)
    out = ("--output", kit.figures / "trace.json", "--trace", kit.figures / "trace.json.gz")
    kit.python("trace", 90, "bench/gpu_trace.py", "--size", kit.sizes.large, "--kind", "cpu", *out)


def _has_steady_step(figures: Path) -> bool:
    """Return whether a run of 10 B has come beyond the two steps that warm up, though it failed later."""
    with contextlib.suppress(OSError, ValueError):
        return len(json.loads(figures.read_text(encoding="utf-8")).get("steps", [])) > 2
    return False


def fix(kit: Kit) -> None:
    """Compare one change: the wheel BEFORE and the present package, in turns."""
    facts(kit)
    given = kit.steps.environment.get("BEFORE", "")
    before = kit.work / "before"
    if not given or not Path(given).exists():
        kit.steps.skip("fix", "BEFORE names no file. Set it to a wheel of the package before the change.")
        return
    if kit.dry:
        before.mkdir()
    elif not kit.steps.run("before", 60, package.install(before, [Path(given).resolve()])).passed:
        return
    total = ("--total", str(int(min(400, kit.steps.left - 20))), "--output", kit.figures / "fix.json")
    sites = ("--before", before, "--after", kit.site, "--size", kit.sizes.large)
    count = ("--steps", str(kit.sizes.steps), "--rounds", str(kit.sizes.rounds))
    kit.python("fix", 430, "bench/gpu_fix.py", *sites, *count, *total)


def kernels(kit: Kit) -> None:
    """Measure the kernels beside a copy; run the smoke test of 10 B, streams of the user and compute-sanitizer."""
    facts(kit)
    kit.python("adam", 150, "bench/adam_cuda.py", *(kit.sizes.adam or ("--output", kit.figures / "adam_cuda.md")))
    kit.gpt2("smoke", 270 if kit.dry else 90, "--smoke")  # an emulated device shares the processors
    kit.pytest("streams", 150, "tests/gpu/test_streams.py", *kit.sizes.streams, workers=kit.sizes.workers)
    if shutil.which("compute-sanitizer", path=kit.steps.environment.get("PATH")) is None:
        kit.steps.skip("memcheck", "there is no compute-sanitizer here")
    elif kit.no_device:
        kit.steps.skip("memcheck", kit.no_device)
    else:
        options = ["-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", "gpu"]
        some = ["tests/gpu/test_cuda_adam.py", "-k", "test_updates and adamw and remainder"]
        checked = [sys.executable, "-m", "pytest", *options, *some]
        kit.steps.run("memcheck", 150, ["compute-sanitizer", "--error-exitcode", "9", *checked])


def nvme(kit: Kit) -> None:
    """Measure the drive, and steps of 350 M and 1.3 B with 8-bit moments in the placements that fit."""
    facts(kit)
    bandwidths = kit.figures / "bandwidths.json"
    links = ("-m", "infinity.cli.main", "bench-links", "--path", str(kit.nvme))
    kit.python("bandwidths", 90, *links, "--seconds", str(kit.sizes.links_seconds), "--out", bandwidths)
    kinds = ("--kinds", "plain", "optimizer on nvme", "nvme", "--moments", "8bit", "--bandwidths", bandwidths)
    for name, size in (("small", kit.sizes.small), ("large", kit.sizes.large)):
        kit.device_step(name, 200, size, *kinds, "--clips", "0", "--seconds", "90", kind="nvme")


CALLS: dict[str, Callable[[Kit], None]] = {
    "right": right,
    "headline": headline,
    "fix": fix,
    "kernels": kernels,
    "nvme": nvme,
}
