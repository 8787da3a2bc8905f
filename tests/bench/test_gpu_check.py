"""bench/gpu_check.sh and its scripts where there is no GPU: stages, resumption, exit status, summary, tiny figures."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.tiers.device import CpuDevice

device_step = importlib.import_module("device_step")
gpu_summary = importlib.import_module("gpu_summary")
links = importlib.import_module("links")
ROOT = Path(__file__).resolve().parents[2]

STUB = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in
  *gpu_summary.py*) exec "{python}" "$@" ;;
  *"-m pytest"*) echo "1 failed"; exit 1 ;;
  *is_available*) exit {no_device} ;;
  *torch.empty*) echo "RuntimeError: The driver is too old"; exit 1 ;;
  *.whl*) exit 1 ;;
  *"-m pip"*) mkdir -p "{site}/infinity" ;;
esac
"""


def check(folder: Path, *stages: str, no_device: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run gpu_check.sh with a python3 whose pytest fails and whose other commands pass."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    stub = commands / "python3"
    values = {"log": folder / "log", "python": sys.executable, "site": folder / "site", "no_device": no_device}
    stub.write_text(STUB.format(**values))
    stub.chmod(0o755)
    root = folder / "checkout"
    if not root.exists():
        root.mkdir()
        shutil.copytree(ROOT / "bench", root / "bench")
        (root / "tests").mkdir()
        shutil.copy(ROOT / "pyproject.toml", root)
    variables = {"RESULTS": str(folder / "results"), "SITE": str(folder / "site"), "WHEELS": str(folder / "none")}
    return subprocess.run(
        ["bash", str(root / "bench" / "gpu_check.sh"), *stages],
        env={**os.environ, **variables, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
    )


def outcomes(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "results" / "summary.json").read_text())["outcomes"]
    return {f"{one['stage']}.{one['step']}": one["outcome"] for one in found}


def test_failed_tests_end_neither_the_stages_nor_the_summary(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    found = outcomes(tmp_path)
    failed = {step for step, outcome in found.items() if outcome == "failed with status 1"}
    assert failed == {"tests.kernels", "tests.engine", "streams.stress"}
    assert {"build.package", "kernels.adam", "kernels.links", "small.steps", "large.steps", "10b.run"} <= set(found)
    assert "| tests | engine | failed with status 1 |" in (tmp_path / "results" / "summary.md").read_text()
    assert "1 failed" in (tmp_path / "results" / "tests.engine.txt").read_text()


def test_a_stage_resumes_after_the_steps_that_passed(tmp_path: Path) -> None:
    assert check(tmp_path, "kernels").returncode == 0
    (tmp_path / "results" / "status" / "kernels.links").write_text("1 5\n")
    (tmp_path / "log").unlink()
    done = check(tmp_path, "kernels")
    assert done.returncode == 0 and "kernels: adam passed before" in done.stdout
    log = (tmp_path / "log").read_text()
    assert "links.py" in log and "adam_cuda.py" not in log and "-m pip" not in log
    check(tmp_path, "kernels", FRESH="1")
    assert "adam_cuda.py" in (tmp_path / "log").read_text()


def test_other_sources_are_built_and_run_again(tmp_path: Path) -> None:
    assert check(tmp_path, "kernels").returncode == 0
    (tmp_path / "checkout" / "bench" / "links.py").write_text("")
    (tmp_path / "log").unlink()
    assert check(tmp_path, "kernels").returncode == 0
    log = (tmp_path / "log").read_text()
    assert "-m pip" in log and "adam_cuda.py" in log and "links.py" in log


def test_steps_that_need_a_device_are_named_where_there_is_none(tmp_path: Path) -> None:
    done = check(tmp_path, "tests", "small", "10b", no_device=1)
    assert done.returncode == 3
    reason = "there is no CUDA device here (RuntimeError: The driver is too old)"
    assert f"small: steps not run: {reason}" in done.stdout
    assert outcomes(tmp_path)["10b.smoke"] == "passed" and outcomes(tmp_path)["10b.run"] == "not run"


def test_wheels_for_another_python_are_explained(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "pydantic_core-2-cp312-cp312-any.whl").touch()
    done = check(tmp_path, "build", WHEELS=str(tmp_path / "wheels"))
    assert done.returncode == 1 and outcomes(tmp_path)["build.wheels"] == "failed with status 1"
    assert "make gpu-bundle BUNDLE_PYTHON=3.x" in done.stdout


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "kernel")
    assert done.returncode == 2 and "unknown stage kernel; stages: build tests kernels" in done.stderr


@pytest.mark.parametrize(
    ("statuses", "expected"), [(["0"], 0), (["0", "skipped"], 3), (["skipped", "124"], 1), (["2", "0"], 1), ([], 1)]
)
def test_exit_status_of_the_summary(statuses: list[str], expected: int, tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    for number, status in enumerate(statuses):
        (tmp_path / "status" / f"tests.{number}").write_text(f"{status} 1\n")
    assert gpu_summary.exit_status(gpu_summary.outcomes(tmp_path)) == expected


def test_summary_shows_the_figures_that_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: dict[str, Any] = {"cpu, clip 0": {"seconds": 2.0, "waited": 0.5, "tokens_per_second": 1e3}}
    runs["nvme, clip 0"] = {"error": "code 124"}
    copies = [{"name": "to device, registered", "bytes": 2e9, "seconds": [1.0, 2.0]}]
    needs = [["nvme", "fp32", [{"memory": "nvme", "needed": 5, "available": 3}]]]
    (tmp_path / "small.json").write_text(json.dumps({"bench": "device_step", "runs": runs}))
    (tmp_path / "links.json").write_text(
        json.dumps({"bench": "links", "copies": copies, "register_seconds_per_gb": 0.25})
    )
    (tmp_path / "10b.json").write_text(json.dumps({"bench": "gpt2_10b", "needs": needs}))
    tiny = {"placement": "cpu", "moments": "fp32", "losses": [2.0, 1.5], "digest": "0123456789abcdef"}
    (tmp_path / "smoke.json").write_text(json.dumps({"bench": "gpt2_10b", "runs": [tiny]}))
    (tmp_path / "broken.json").write_text("{")
    text = gpu_summary.summary([], gpu_summary.figures(tmp_path))
    assert "| cpu, clip 0 | 2.000 | 0.500 | 1000 |  |  |  |" in text
    assert "| nvme, clip 0 |  |  |  |  |  | code 124 |" in text
    assert "| to device, registered | 1.3 |" in text and "| registration, s/GB | 0.250 |" in text
    assert "- nvme, fp32: 2 bytes of nvme are missing" in text
    assert "- cpu, fp32: loss 1.500000, parameters 0123456789ab" in text
    assert "broken.json is not valid JSON" in capsys.readouterr().err


def test_links_are_measured_on_any_device() -> None:
    """On the CPU all copies are within host memory; `device.copy` stands beside a bare copy."""
    result = links.measure(CpuDevice(), 1 << 20, 2)
    assert all(len(one["seconds"]) == 2 for one in result["copies"])
    assert set(links.figures(result)) == {"to device: device.copy ÷ bare", "from device: device.copy ÷ bare"}


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


def test_figures_of_steps_are_those_with_limits() -> None:
    run = {"seconds": 2.0, "waited": 0.1}
    runs = {"plain, clip 0": {"seconds": 2.0, "waited": None}, "none, clip 0": run, "cpu, clip 0": {"error": "x"}}
    found = device_step.figures({"size": "350m", "runs": runs})
    assert found == {"350m, none, clip 0: waited ÷ step": 0.05, "350m, none, clip 0: plain ÷ ours": 1.0}
