"""bench/gpu_check.sh and its scripts where there is no GPU: steps, packages, calls, summary, tiny figures."""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from infinity.tiers.device import CpuDevice

calls = importlib.import_module("gpu_kit.calls")
device_step = importlib.import_module("device_step")
gpu_check = importlib.import_module("gpu_check")
gpu_facts = importlib.import_module("gpu_facts")
gpu_fix = importlib.import_module("gpu_fix")
links = importlib.import_module("links")
package = importlib.import_module("gpu_kit.package")
predictions = importlib.import_module("gpu_kit.predictions")
sizes = importlib.import_module("gpu_kit.sizes")
steps = importlib.import_module("gpu_kit.steps")
summary = importlib.import_module("gpu_kit.summary")
ROOT = Path(__file__).resolve().parents[2]
Outcome = steps.Outcome


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Steps in an empty folder; `made.seen` has the steps known after each."""
    seen: list[list[str]] = []
    found = steps.Steps(
        tmp_path,
        60,
        environment=dict(os.environ),
        folder_of_commands=tmp_path,
        after_each=lambda outcomes: seen.append([one.step for one in outcomes]),
    )
    found.seen = seen
    return found


def test_each_step_is_recorded_with_its_output(made: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        made.run("one", 50, [sys.executable, "-c", "print('out'); raise SystemExit(3)"]).what == "failed with status 3"
    )
    assert made.run("two", 50, ["sh", "-c", "echo $HERE >&2"], HERE="there").passed
    assert made.run("three", 50, ["/no/such/command"]).what == "failed with status 127"
    assert made.log_of("one").read_text() == "out\n" and made.log_of("two").read_text() == "there\n"
    assert made.seen == [["one"], ["one"], ["one", "two"], ["one", "two"], ["one", "two", "three"]]
    assert "out\n" in capfd.readouterr().out


def test_a_step_without_time_is_not_run(tmp_path: Path) -> None:
    late = steps.Steps(tmp_path, 0, environment={}, folder_of_commands=tmp_path, after_each=lambda outcomes: None)
    assert late.run("one", 50, ["touch", tmp_path / "made"]).what == "not run"
    assert not (tmp_path / "made").exists()


def test_a_process_that_hangs_leaves_its_stacks_and_its_children_end(tmp_path: Path) -> None:
    """SIGABRT comes first. A child in its group ends with it."""
    code = (
        "import subprocess, sys, time\n"
        "def hangs():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
        "hangs()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    child = int(process.stdout.readline())
    steps._stop(process)
    assert "in hangs" in process.stderr.read() and process.returncode == -signal.SIGABRT
    steps._signal(process, signal.SIGKILL)
    assert not Path(f"/proc/{child}/exe").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


CALL = """
import os, signal, sys
from pathlib import Path

import gpu_check
from gpu_kit.steps import Steps

folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, gpu_check._stopped)
made = Steps(
    folder,
    60,
    environment=dict(os.environ),
    folder_of_commands=folder,
    after_each=lambda outcomes: (folder / "seen").write_text(outcomes[-1].what),
)
made.run("one", 50, [sys.executable, "-c", sys.argv[2]])
"""
HANGS = """
import subprocess, time

def hangs():
    child = subprocess.Popen(["sleep", "600"])
    open("partial", "w").write(str(child.pid))
    __import__("os").rename("partial", "child")
    time.sleep(600)

hangs()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_ends_with_the_call_that_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    """Also with SIGKILL, which no process can handle: the step would keep the device from the next call."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", CALL, str(tmp_path), HANGS]
    call = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    seen = tmp_path / "seen"
    wait_until(lambda: (tmp_path / "child").exists() and seen.exists() and seen.read_text() == "running")
    os.killpg(call.pid, number)
    call.wait(30)
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])
    if number == signal.SIGTERM:
        assert "in hangs" in (tmp_path / "one.txt").read_text() and seen.read_text() == "stopped"


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_a_step_has_written_is_reported_while_it_runs(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "REPORT_SECONDS", 0.1)
    assert made.run("one", 50, ["sleep", "1"]).passed
    assert len(made.seen) > 4 and made.seen[0] == ["one"]


def test_a_device_that_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "DEVICE_SECONDS", 0.5)
    monkeypatch.setattr(gpu_check, "WHY_NO_DEVICE", "import time; time.sleep(60)")
    assert "did not answer" in gpu_check.no_device(dict(os.environ))


def test_only_a_dry_run_uses_the_emulated_device(tmp_path: Path) -> None:
    """A variable that is left over would let tests pass on it in place of CUDA."""
    given = {"INFINITY_TEST_DEVICE": "late", "PYTHONPATH": "theirs", "PATH": "/bin"}
    real = gpu_check.of_steps(given, [tmp_path], dry=False)
    assert "INFINITY_TEST_DEVICE" not in real and real["PYTHONPATH"] == f"{tmp_path}{os.pathsep}theirs"
    assert gpu_check.of_steps({}, [tmp_path], dry=True)["INFINITY_TEST_DEVICE"] == "late"


# -- the package -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with sources and a folder of wheels."""
    for name in ("infinity", "csrc", "wheels"):
        (tmp_path / name).mkdir()
    for name in ("CMakeLists.txt", "pyproject.toml", "infinity/a.py", "csrc/a.cpp"):
        (tmp_path / name).write_text(name)
    return tmp_path


def carry(tree: Path, tag: str, sources: str) -> Path:
    wheel = tree / "wheels" / f"infinity_engine-1-{tag}-{tag}-linux_x86_64.whl"
    wheel.touch()
    (tree / "wheels" / package.HASH_FILE).write_text(sources + "\n")
    return wheel


HERE = "cp{}{}".format(*sys.version_info[:2])


def test_a_wheel_of_the_same_sources_is_taken(tree: Path) -> None:
    wheel = carry(tree, HERE, package.source_hash(tree))
    (tree / "wheels" / "pydantic-2-py3-none-any.whl").touch()
    assert package.carried_wheel(tree / "wheels", tree) == (wheel, "")
    assert [one.name for one in package.other_wheels(tree / "wheels")] == ["pydantic-2-py3-none-any.whl"]


@pytest.mark.parametrize("variable", [("PIP_USER", "1"), ("PIP_CONSTRAINT", "constraints.txt")])
def test_variables_for_pip_do_not_keep_wheels_out(tmp_path: Path, variable: tuple[str, str]) -> None:
    """Images for CUDA pin packages by such variables."""
    (tmp_path / "constraints.txt").write_text("carried==2\n")
    wheel = tmp_path / "carried-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("carried.py", "")
        file.writestr("carried-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1\n")
        file.writestr("carried-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("carried-1.dist-info/RECORD", "")
    name, value = variable
    command = package.install(tmp_path / "site", [wheel])
    assert subprocess.run(command, env={**os.environ, name: value}, cwd=tmp_path).returncode == 0
    assert (tmp_path / "site" / "carried.py").exists()


@pytest.mark.parametrize("changed", ["infinity/a.py", "csrc/a.cpp", "CMakeLists.txt"])
def test_a_wheel_of_other_sources_is_left_out(tree: Path, changed: str) -> None:
    """A call measures the package of its tree."""
    carry(tree, HERE, package.source_hash(tree))
    (tree / changed).write_text("changed")
    found, why = package.carried_wheel(tree / "wheels", tree)
    assert found is None and why.endswith("was built from other sources")


def test_a_wheel_for_another_python_is_left_out(tree: Path) -> None:
    carry(tree, "cp39", package.source_hash(tree))
    found, why = package.carried_wheel(tree / "wheels", tree)
    assert found is None and f"is for another Python than {HERE}" in why
    assert package.carried_wheel(tree, tree) == (None, "")


def test_the_hash_covers_the_sources_of_this_tree() -> None:
    found = {str(path.relative_to(ROOT)) for path in package._files(ROOT)}
    assert {"infinity/__init__.py", "csrc/adam/cuda/CMakeLists.txt", "pyproject.toml", "CMakeLists.txt"} <= found
    assert any(name.endswith(".cu") for name in found) and not any(name.endswith(".so") for name in found)
    done = subprocess.run([sys.executable, ROOT / "bench/gpu_kit/package.py"], capture_output=True, text=True)
    assert done.stdout.strip() == package.source_hash(ROOT)


# -- calls -------------------------------------------------------------------------------------------------------------


class Recorded(steps.Steps):  # type: ignore[misc,name-defined]
    """Steps that do not run. fails: words; a step whose command has one of them fails."""

    fails: tuple[str, ...] = ()
    commands: dict[str, list[str]]

    def run(self, step: str, seconds: float, command: Sequence[Any], **environment: str) -> Any:
        self.commands[step] = [str(word) for word in command]
        failed = any(word in " ".join(self.commands[step]) for word in self.fails)
        return self._note(Outcome(step, "failed with status 1" if failed else "passed"))


def kit_of(folder: Path, *, no_device: str = "", fails: tuple[str, ...] = (), **environment: str) -> Any:
    for name in ("work", "figures", "results", "wheels"):
        (folder / name).mkdir()
    given = {"PATH": os.environ["PATH"], **environment}
    made = Recorded(folder, 480, environment=given, folder_of_commands=folder, after_each=lambda outcomes: None)
    made.fails, made.commands = fails, {}
    return calls.Kit(
        steps=made,
        sizes=sizes.Sizes(),
        root=ROOT,
        work=folder / "work",
        figures=folder / "figures",
        results=folder / "results",
        site=folder / "site",
        wheels=folder / "wheels",
        nvme=folder,
        no_device=no_device,
    )


@pytest.mark.parametrize("call", calls.CALLS)
def test_steps_that_need_a_device_are_named_where_there_is_none(tmp_path: Path, call: str) -> None:
    kit = kit_of(tmp_path, no_device="there is no CUDA device here (RuntimeError: the driver is too old)")
    calls.CALLS[call](kit)
    missing = [one for one in kit.steps.outcomes if one.what == "not run"]
    assert missing and set(kit.steps.commands) <= {"facts", "plan", "plan-120GiB", "before"}
    assert summary.exit_status(kit.steps.outcomes) == 3
    assert any("the driver is too old" in one.why for one in missing) or call == "fix"


def test_the_first_question_is_whether_placements_have_the_same_bits(tmp_path: Path) -> None:
    kit = kit_of(tmp_path)
    calls.right(kit)
    assert list(kit.steps.commands)[:3] == ["facts", "bits", "tests"]
    assert "tests/gpu/test_bits.py" in kit.steps.commands["bits"] and "-n" in kit.steps.commands["bits"]
    kinds = kit.steps.commands["step"]
    assert kinds[kinds.index("--kinds") + 1 :] == ["plain", "none", "cpu", "fsdp2 cpu"]


def test_the_headline_has_a_smaller_model_if_the_large_one_fails(tmp_path: Path) -> None:
    kit = kit_of(tmp_path, fails=("--fp16 --train-iters 4 --nvme-path",))
    calls.headline(kit)
    assert {one.step: one.passed for one in kit.steps.outcomes} == {
        "facts": True, "10b-bf16": True, "10b-fp16": False, "2.7b-fp16": True, "trace": True,
    }  # fmt: skip
    assert "2560" in kit.steps.commands["2.7b-fp16"]


def test_a_large_model_that_was_cut_off_after_its_steps_needs_no_smaller_one(tmp_path: Path) -> None:
    """The time belongs to the trace."""
    kit = kit_of(tmp_path, fails=("--bf16 --train-iters 4", "--fp16 --train-iters 4 --nvme-path"))
    for kind, count in (("bf16", 3), ("fp16", 2)):
        (kit.figures / f"10b-{kind}.json").write_text(json.dumps({"steps": [{}] * count}))
    calls.headline(kit)
    assert [one.step for one in kit.steps.outcomes] == ["facts", "10b-bf16", "10b-fp16", "2.7b-fp16", "trace"]


def test_fp16_is_left_out_if_bf16_takes_all_of_its_time(tmp_path: Path) -> None:
    """The smaller model and the trace need the rest of the call."""
    kit = kit_of(tmp_path)
    run = kit.steps.run

    def hangs(step: str, *arguments: Any, **more: Any) -> Any:
        return kit.steps._note(Outcome(step, "out of time")) if step == "10b-bf16" else run(step, *arguments, **more)

    kit.steps.run = hangs
    calls.headline(kit)
    assert [(one.step, one.what) for one in kit.steps.outcomes[1:]] == [
        ("10b-bf16", "out of time"), ("10b-fp16", "not run"), ("2.7b-bf16", "passed"), ("2.7b-fp16", "passed"),
        ("trace", "passed"),
    ]  # fmt: skip


def test_a_change_is_measured_against_the_wheel_of_before(tmp_path: Path) -> None:
    wheel = tmp_path / "old.whl"
    wheel.touch()
    kit = kit_of(tmp_path, BEFORE=str(wheel))
    calls.fix(kit)
    assert str(wheel) in kit.steps.commands["before"]
    assert {"--before", str(kit.work / "before"), "--after", str(kit.site)} <= set(kit.steps.commands["fix"])


def test_a_build_without_kernels_counts_as_failed_and_the_rest_runs(tmp_path: Path) -> None:
    kit = kit_of(tmp_path, fails=("INFINITY_CUDA=ON", "_adam_cuda"))
    made = kit.work / "wheel"
    made.mkdir()
    (made / "infinity_engine-1-cp312-cp312-linux_x86_64.whl").touch()
    assert calls.install(kit)
    what = {one.step: one.passed for one in kit.steps.outcomes}
    assert not what["build"] and what["build-no-kernels"] and what["build-no-kernels-install"]
    assert not list(kit.results.iterdir())


def test_a_wheel_that_was_built_is_left_in_the_results_with_its_sources(tmp_path: Path) -> None:
    kit = kit_of(tmp_path)
    made = kit.work / "wheel"
    made.mkdir()
    name = f"infinity_engine-1-{HERE}-{HERE}-linux_x86_64.whl"
    (made / name).touch()
    assert calls.install(kit)
    assert package.carried_wheel(kit.results, ROOT) == (kit.results / name, "")


def test_a_carried_wheel_whose_kernels_do_not_load_is_replaced_by_a_build(tmp_path: Path) -> None:
    wheel = tmp_path / "infinity_engine-1.whl"
    wheel.touch()
    kit = kit_of(tmp_path, fails=("why_not",), INFINITY_WHEEL=str(wheel))
    made = kit.work / "wheel"
    made.mkdir()
    (made / "infinity_engine-1-cp312-cp312-linux_x86_64.whl").touch()
    calls.install(kit)
    steps_in_order = [one.step for one in kit.steps.outcomes]
    assert steps_in_order[:4] == ["package", "kernels-carried", "build", "build-install"]


@pytest.mark.parametrize(
    ("memory", "stated"),
    [
        ([{"MemTotal": 4}, {"touched": 110, "MemTotal": 116}, {"MemTotal": 5}], "110GiB"),
        ([{"MemTotal": 4}, {"touched": 110, "MemTotal": 116}, {"MemTotal": 116}], None),
        ([{"MemTotal": 125}], None),
    ],
)
def test_memory_that_shrinks_again_is_stated_to_later_steps(tmp_path: Path, memory: Any, stated: str | None) -> None:
    kit = kit_of(tmp_path)
    (kit.figures / "facts.json").write_text(json.dumps({"memory": memory}))
    calls.facts(kit)
    assert kit.steps.environment.get("INFINITY_MACHINE_MEMORY") == stated


@pytest.mark.parametrize(("limit", "always"), [(60, True), (60, False), (100, False)])
def test_memory_is_not_written_to_beyond_the_limit_of_a_container(tmp_path: Path, limit: int, always: bool) -> None:
    """The system may end all processes of a container at its limit."""
    kit = kit_of(tmp_path)
    kit.memory_limit = limit * calls.GIB
    calls.facts(kit, always=always)
    words = kit.steps.commands["facts"]
    assert float(words[words.index("--touch") + 1].removesuffix("GiB")) <= 0.8 * limit


def test_the_limit_of_a_container_is_read(tmp_path: Path) -> None:
    assert gpu_check.memory_limit(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("max\n")
    assert gpu_check.memory_limit(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text(f"{64 << 30}\n")
    assert gpu_check.memory_limit(tmp_path) == 64 << 30


@pytest.mark.parametrize("arguments", [["kernel"], [], ["right", "fix"]])
def test_an_unknown_call_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(arguments)
    assert ended.value.code == 2 and "right | headline | fix | kernels | nvme" in capsys.readouterr().err


LEFT = {
    "right": {"facts.json", "bits.txt", "tests.txt", "bandwidths.json", "gpt2-tiny.json", "links.json", "plan.json"},
    "headline": {"10b-bf16.json", "10b-bf16.timeline.json", "10b-fp16.json", "trace.json", "trace.txt"},
    "fix": {"fix.json", "fix.txt"},
    "kernels": {"adam.txt", "streams.txt", "memcheck.txt"},
    "nvme": {"bandwidths.json", "nvme-tiny.json", "large.txt"},
}
"""Call → files that it leaves, among others."""


@pytest.mark.campaign(few=2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("call", LEFT)
def test_a_dry_run_of_a_call_leaves_a_summary_and_a_tarball(tmp_path: Path, call: str) -> None:
    """The shell script, the steps and their scripts run on the emulated device of tests/late, with tiny models."""
    tools = tmp_path / "tools"
    tools.mkdir()
    sanitizer = tools / "compute-sanitizer"  # it gets `--error-exitcode 9`, and then the command
    sanitizer.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    sanitizer.chmod(0o755)
    environment = {**os.environ, "DRY_RUN": "1", "RESULTS": str(tmp_path), "NVME": str(tmp_path)}
    environment |= {"BEFORE": str(ROOT / "README.md"), "SECONDS_OF_CALL": "800", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run([ROOT / "bench/gpu_check.sh", call], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / f"{call}.md").read_text()
    assert text.startswith(f"# {call}: passed\n") and text in done.stdout
    with tarfile.open(tmp_path / f"{call}.tar.gz") as tar:
        assert {f"{call}/{name}" for name in ("summary.md", *LEFT[call])} <= set(tar.getnames())


# -- the summary -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (["passed"], 0),
        (["passed", "not run"], 3),
        (["not run", "out of time"], 1),
        (["failed with status 2", "passed"], 1),
        ([], 1),
    ],
)
def test_exit_status(what: list[str], expected: int) -> None:
    assert summary.exit_status([Outcome(str(k), one) for k, one in enumerate(what)]) == expected


def test_the_summary_shows_the_figures_that_are_there(tmp_path: Path) -> None:
    runs: dict[str, Any] = {"cpu, clip 0": {"seconds": 0.4, "waited": 0.125, "loss": 3.0, "bound": 0.3}}
    runs["cpu, clip 0"] |= {"device_peak_bytes": 1e9, "host_peak_bytes": 2e9}
    runs["nvme, clip 0"] = {"left_out": "too little space"}
    step = {
        "step": 1,
        "loss": 5.0,
        "seconds": 2.0,
        "tokens_per_second": 5120,
        "model_tflops": 330,
        "recomputing_tflops": 430,
    }
    step |= {"device_peak_bytes": 29e9, "host_peak_bytes": 94e9, "update_seconds": 1.1}
    step["waits"] = {"gradients": {"count": 3, "slept": 0.5, "stood_still": 0.3}}
    copies = [{"name": "to device, device.copy", "size": "4MiB", "bytes": 4e9, "seconds": [0.1, 0.2]}]
    files: dict[str, Any] = {
        "gpt2-1.3b": {"bench": "device_step", "runs": runs},
        "10b-bf16": {"steps": [step] * 4, "resident_tflops": 580, "construction_seconds": 70},
        "links": {"copies": copies},
        "trace": {"shares": [{"kernels": 0.4, "nothing": 0.6}], "gap_sites": [{"seconds": 0.02, "site": "a.py:1 b"}]},
        "facts": {"gpu": {"name": "NVIDIA H100"}, "memory": [{"MemTotal": 125, "MemAvailable": 120}]},
    }
    for name, result in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "bits.txt").write_text("one\ntwo\n\nthree\nfour\n")
    outcomes = [Outcome("bits", "failed with status 1", 3.0), Outcome("step", "passed", 9.0)]
    outcomes += [Outcome(name, "not run", why="there is no tool") for name in ("one", "two")]
    text = summary.page("right", outcomes, summary.figures_of(tmp_path), tmp_path)
    assert text.startswith("# right: FAILED: bits\nNVIDIA H100")
    assert "bits, the last lines:\n  two\n  three\n  four\n" in text
    assert text.count("there is no tool") == 1 and "as above" in text
    assert "cpu, clip 0                  0.400 s, idle for the engine 0.125, bound 0.300" in text
    assert "nvme, clip 0                 too little space" in text
    assert "step 1: loss 5.0000, 2.00 s, 5120 tokens/s, 330 TFLOP/s, 74 % of resident" in text
    assert "idle for gradients 0.300" in text and "0.0200 s in None: a.py:1 b" in text
    assert "1.3 B, fp32 moments in host memory: step: 0.4 (0.35 to 0.45 s)" in text
    assert "link, host to device, 4 MiB: 26.7 (45 to 55 GB/s)" in text
    assert "10 B, bf16: idle, `gradients`: 0.3 (0.15 to 0.8 s a step)" in text
    assert len(text.splitlines()) < 60


def test_what_was_written_is_there_after_each_step(tmp_path: Path) -> None:
    """A call that is cut off has the files of the steps before."""
    (tmp_path / "logs").mkdir()
    for number in (1, 2):
        (tmp_path / "logs" / f"{number}.txt").write_text("x" * number)
        summary.leave_files(tmp_path / "results", "fix", f"# {number}\n", tmp_path / "logs")
        assert (tmp_path / "results" / "fix.md").read_text() == f"# {number}\n"
        with tarfile.open(tmp_path / "results" / "fix.tar.gz") as tar:
            assert tar.getnames() == ["fix/summary.md", *(f"fix/{k}.txt" for k in range(1, number + 1))]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["fix.md", "fix.tar.gz"]


def test_a_call_that_was_cut_off_has_not_passed() -> None:
    outcomes = [Outcome("bits", "passed"), Outcome("tests", "running", 60.0)]
    assert summary.verdict(outcomes) == "unfinished: tests is running"
    outcomes[0] = Outcome("bits", "failed with status 1")
    assert summary.verdict(outcomes) == "unfinished: tests is running; FAILED: bits"


def test_the_tarball_is_small_enough_and_has_the_ends_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that packs badly is left out before a larger text is."""
    monkeypatch.setattr(summary, "LARGEST", 100_000)
    (tmp_path / "logs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "logs" / f"{name}.gz").write_bytes(random.Random(name).randbytes(60_000))
    (tmp_path / "logs" / "long.txt").write_text("begin\n" + "x" * 300_000 + "\nValueError: the end\n")
    summary.leave_files(tmp_path, "right", "# text\n", tmp_path / "logs")
    assert (tmp_path / "right.tar.gz").stat().st_size <= 100_000
    with tarfile.open(tmp_path / "right.tar.gz") as tar:
        assert len(set(tar.getnames()) & {"right/a.gz", "right/b.gz"}) == 1
        assert {"right/summary.md", "right/left_out.txt", "right/long.txt"} <= set(tar.getnames())
        log = tar.extractfile("right/long.txt")
        assert log is not None
        text = log.read().decode()
    assert text.startswith("begin\n") and "[cut: the file has" in text and text.endswith("ValueError: the end\n")


def test_a_summary_that_fails_ends_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps go on, and the tarball has their logs."""
    monkeypatch.setattr(gpu_check, "page", lambda *arguments: 1 // 0)
    (tmp_path / "logs").mkdir()
    text = gpu_check.summarise("right", [Outcome("bits", "passed")], tmp_path / "logs", tmp_path)
    assert text.startswith("# right: passed\nthe summary failed:") and "ZeroDivisionError" in text
    assert (tmp_path / "right.tar.gz").exists()
    monkeypatch.setattr(gpu_check, "leave_files", lambda *arguments: 1 // 0)
    assert gpu_check.summarise("right", [], tmp_path / "logs", tmp_path)


def test_predictions_without_figures_have_an_empty_column() -> None:
    assert all(row[2] == "" for row in predictions.rows({}))
    broken = {"10b-bf16": {"steps": [{}, {}, {}]}, "links": {"copies": [{}]}, "gpt2-1.3b": {"runs": None}}
    assert len(list(predictions.rows({"bandwidths": {}}))) == len(list(predictions.rows(broken)))


def test_the_page_shows_each_prediction_and_its_figure(tmp_path: Path) -> None:
    """docs/gpu.md has the table of the figures in bench/results/gpu."""
    module = importlib.import_module("gpu_predictions")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.filled(page, module.FIGURES) == page
    (tmp_path / "10b-bf16.json").write_text(json.dumps({"construction_seconds": 71.23}))
    assert "| 10 B: construction | 60 to 110 s | 71.2 |" in module.filled(page, tmp_path)


def test_figures_of_all_calls_are_read_from_their_folders(tmp_path: Path) -> None:
    """`nvme` measures 1.3 B with moments of 8 bits: its figures are not those of fp32."""
    module = importlib.import_module("gpu_predictions")
    for call, moments, seconds in (("nvme", "8bit", 9.0), ("right", "fp32", 0.4)):
        (tmp_path / call).mkdir()
        result = {"moments": moments, "runs": {"cpu, clip 0": {"seconds": seconds}, "plain, clip 0": {"seconds": 0.2}}}
        (tmp_path / call / "gpt2-1.3b.json").write_text(json.dumps(result))
    (tmp_path / "headline").mkdir()
    (tmp_path / "headline" / "10b-bf16.json").write_text(json.dumps({"construction_seconds": 71.23}))
    found = {quantity: value for quantity, _, value in predictions.rows(module.figures_in(tmp_path))}
    assert found["10 B: construction"] == "71.2" and found["1.3 B, fp32 moments in host memory: step"] == "0.4"
    only = module.figures_in(tmp_path / "nvme")
    assert not any(value for _, _, value in predictions.rows(only))


# -- the scripts -------------------------------------------------------------------------------------------------------


def test_facts_are_read_on_any_machine(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench/gpu_facts.py"), "--touch", "0.0625GiB", "--nvme-path", str(tmp_path)]
    subprocess.run([*command, "--output", str(tmp_path / "facts.json")], check=True, capture_output=True)
    found = json.loads((tmp_path / "facts.json").read_text())
    assert found["cores"] and found["numa"] and found["nvme folder"]["type"]
    assert [one.get("touched") for one in found["memory"]] == [None, 0.1, None]


def test_links_are_measured_on_any_device() -> None:
    """On the CPU all copies are within host memory; `device.copy` stands beside a bare copy."""
    result = links.measure(CpuDevice(), [1 << 20, 2 << 20], 2)
    assert all(len(one["seconds"]) == 2 for one in result["copies"])
    ways = ("to device", "from device")
    assert set(links.figures(result)) == {f"{way}, {n}MiB: device.copy ÷ bare" for way in ways for n in (1, 2)}


@pytest.mark.campaign
def test_tiny_steps_of_every_kind_are_measured_and_continued(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "device_step.py"), "--size", "tiny", "--steps", "1"]
    command += ["--nvme-path", str(tmp_path), "--output", str(tmp_path / "tiny.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment).returncode == 0
    result = json.loads((tmp_path / "tiny.json").read_text())
    assert len(result["runs"]) == 14
    for clip in ("0", "1"):
        losses = [run["loss"] for what, run in result["runs"].items() if what.endswith(f"clip {clip}")]
        assert max(losses) - min(losses) < 0.01
    result["runs"]["nvme, clip 1"] = {"error": "code 124"}
    result["runs"]["cpu, clip 1"]["loss"] = 77.0
    (tmp_path / "tiny.json").write_text(json.dumps(result))
    assert subprocess.run(command, env=environment).returncode == 0
    result = json.loads((tmp_path / "tiny.json").read_text())
    assert result["runs"]["cpu, clip 1"]["loss"] == 77.0 and "seconds" in result["runs"]["nvme, clip 1"]


def test_a_kind_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(script: str, arguments: list[str], *, before: list[str]) -> None:
        sys.exit("timeout 120 python script ended with code 124; its error is above.")

    monkeypatch.setattr(device_step.harness, "run_child", fail)
    assert device_step.child("nvme, clip 0") == {"error": "code 124; its error is above."}


def test_a_placement_that_the_drive_cannot_hold_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from infinity.errors import OutOfSpaceError

    def refuse(*arguments: Any) -> None:
        raise OutOfSpaceError("nvme space", 5, 3, "use another drive")

    monkeypatch.setattr(device_step, "make_loop", refuse)
    args = device_step.parse(["--size", "tiny", "--nvme-path", str(tmp_path)])
    found = device_step.run(args, "nvme, clip 0")
    assert "nvme space" in found["left_out"] and device_step.shown(found).startswith("left out: ")


def test_figures_of_steps_are_those_with_limits() -> None:
    run = {"seconds": 2.0, "bound": 1.6}
    runs = {"plain, clip 0": {"seconds": 2.0}, "none, clip 0": run, "cpu, clip 0": {"error": "x"}}
    found = device_step.figures({"size": "350m", "runs": runs})
    assert found == {"350m, none, clip 0: step ÷ bound": 1.25, "350m, none, clip 0: plain ÷ ours": 1.0}


def test_the_bound_of_a_step_is_its_slowest_link() -> None:
    """Reads and writes of a drive take turns, so their times add; links work beside one another."""
    moved = {"host_to_device": 10e9, "device_to_host": 5e9, "memory": 60e9, "nvme_read": 2e9, "nvme_write": 1e9}
    runs = {"plain, clip 1": {"seconds": 0.1}, "cpu, clip 1": {"moved": moved}}
    rates: dict[str, Any] = {"host_to_device": 50e9, "device_to_host": 50e9, "memory": 100e9}
    rates |= {"nvme_read": 2e9, "nvme_write": 1e9}
    assert device_step.bound(runs, "cpu, clip 1", rates) == 2.0
    moved["nvme_read"] = moved["nvme_write"] = 0.0
    assert device_step.bound(runs, "cpu, clip 1", {**rates, "nvme_read": None}) == 0.6
    runs["plain, clip 1"] = {"seconds": 0.9}
    assert device_step.bound(runs, "cpu, clip 1", rates) == 0.9
    assert (
        device_step.bound(runs, "cpu, clip 1", {}) is None and device_step.bound(runs, "plain, clip 1", rates) is None
    )


def test_one_change_is_compared_within_rounds() -> None:
    rounds = [
        {"what": "cpu, clip 0", "before": {"seconds": 2.0, "loss": 1.0}, "after": {"seconds": 1.0, "loss": 1.0}},
        {"what": "cpu, clip 0", "before": {"seconds": 2.0, "loss": 1.0}, "after": {"seconds": 1.5, "loss": 1.0}},
        {"what": "cpu, clip 1", "before": {"seconds": 2.0, "loss": 1.0}, "after": {"error": "code 134"}},
    ]
    first, second = gpu_fix.lines({"rounds": rounds})
    assert first == "cpu, clip 0: after ÷ before 0.625 (0.500 to 0.750, 2 rounds); same losses"
    assert second == "cpu, clip 1: no round has both; code 134"


@pytest.mark.parametrize("failed", [{"error": "code 134"}, {"left_out": "too little space"}, None])
def test_a_round_without_figures_does_not_hide_the_others(failed: dict[str, str] | None) -> None:
    run = {"seconds": 2.0, "loss": 1.0}
    rounds: list[dict[str, Any]] = [{"what": "cpu, clip 0", "before": run, "after": run} for _ in range(2)]
    del rounds[1]["after"]
    if failed is not None:
        rounds[1]["after"] = failed
    (line,) = gpu_fix.lines({"rounds": rounds})
    assert line.startswith("cpu, clip 0: after ÷ before 1.000 (1.000 to 1.000, 1 rounds)")
    assert line.endswith("; same losses") and all(why in line for why in (failed or {}).values())


def test_waits_are_those_of_counted_steps() -> None:
    before = {"edits": {"count": 3, "slept": 5.0, "stood_still": 4.0}, "norm": {"count": 1, "slept": 1.0}}
    after = {"edits": {"count": 7, "slept": 6.0, "stood_still": 4.5}, "norm": {"count": 1, "slept": 1.0}}
    assert device_step.mean_waits(before, after, 2) == {"edits": {"count": 2.0, "slept": 0.5, "stood_still": 0.25}}


def test_wheels_are_not_installed_by_a_dry_run(tmp_path: Path) -> None:
    kit = kit_of(tmp_path)
    kit.dry = True
    assert calls.install(kit) and list(kit.steps.commands) == ["imports"]
    assert shutil.which("bash") and os.access(ROOT / "bench" / "gpu_check.sh", os.X_OK)
