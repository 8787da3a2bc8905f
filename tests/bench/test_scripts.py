"""Benchmarks as commands: their help, the flags of published commands, and runs of the smallest size."""

import argparse
import importlib
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from report import page

BENCH = Path(__file__).resolve().parents[2] / "bench"
FILES = [*BENCH.glob("*.py"), *BENCH.glob("peers/*.py")]
SCRIPTS = sorted(
    str(path.relative_to(BENCH).with_suffix("")) for path in FILES if '__name__ == "__main__"' in path.read_text()
)
TINY = ["--hidden", "32", "--layers", "2", "--heads", "2", "--vocab", "64", "--sequence", "16", "--batch", "2"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_shown(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_scripts_run_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "check.py"), "nothing"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "nothing.json is missing. Run the benchmark first." in done.stderr


@pytest.mark.parametrize("path", page.results(), ids=lambda path: path.stem)
def test_published_commands_still_parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags and defaults of a command that made a result stay."""
    command = page.load(path).get("command") or path.with_suffix(".md").read_text().split("`")[1]
    _, script, *flags = shlex.split(command)
    module = importlib.import_module(".".join(Path(script).with_suffix("").parts[1:]))
    monkeypatch.setattr(sys, "argv", [script, *flags])
    args = module.parse(flags) if hasattr(module, "parse") else module.arguments()
    assert isinstance(args, argparse.Namespace) and args.name == path.stem


def run_main(module: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> dict[str, Any]:
    """Run a benchmark in this process; its result."""
    name = module.__name__
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--results", str(folder), *flags])
    module.main()
    assert (folder / f"{name}.md").exists()
    return page.load(folder / f"{name}.json")


@pytest.mark.campaign
def test_a_tiny_step_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every kind runs in this process, and its result passes through JSON as a child's does."""
    step = importlib.import_module("step")
    monkeypatch.setattr(step, "TILES", 4)
    monkeypatch.setattr(step, "child", lambda kind: json.loads(json.dumps(step.run(step.arguments(), kind))))
    result = run_main(step, monkeypatch, tmp_path, *TINY, "--rounds", "1", "--steps", "1", "--nvme-path", str(tmp_path))
    assert list(result["runs"]) == step.KINDS
    assert all(len(run["steps"]) == 1 for kind, (run,) in result["runs"].items() if kind != "disk")
    text = (tmp_path / "step.md").read_text()
    assert "batch 2" in text and "| ratio to bound |" in text


def test_a_tiny_adam_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    adam = importlib.import_module("adam")
    monkeypatch.setattr(adam, "PER_TURN", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    flags = ["--sizes", "1e3", "--repeats", "2", "--threads", "1", "--parameters", "1e3", "--remark", "A trial."]
    result = run_main(adam, monkeypatch, tmp_path, *flags)
    assert {sample["case"] for sample in result["samples"]} == {case.name for case in adam.CASES}
    assert "\nA trial.\n" in (tmp_path / "adam.md").read_text()
    monkeypatch.setattr(adam, "measure", None)
    monkeypatch.setattr(sys, "argv", ["adam.py", "--results", str(tmp_path), "--redraw", "--remark", "Another one."])
    adam.main()
    assert "\nAnother one.\n" in (tmp_path / "adam.md").read_text()


FIO = """#!{python}
import json, sys
if "--version" in sys.argv:
    print("fio-0.0")
else:
    done = {{"io_bytes": 10**9}}
    job = {{"job_runtime": 500, "read": done, "write": done, "usr_cpu": 10, "sys_cpu": 30}}
    print("a note", json.dumps({{"jobs": [job]}}))
"""


def test_a_tiny_aio_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """fio is a stand-in that moves 2 GB in half a second, with 40 % of a processor."""
    aio = importlib.import_module("aio")
    fio = tmp_path / "fio"
    fio.write_text(FIO.format(python=sys.executable))
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(aio, "spawn_ours", aio.run_ours)
    flags = ["--path", str(tmp_path), "--size", str(64 << 20), "--rounds", "1", "--seconds", "0.01", "--points", "1m"]
    result = run_main(aio, monkeypatch, tmp_path, *flags)
    assert len(result["samples"]) == 3 * 5 + 6
    for sample in result["samples"]:
        if sample["who"] in aio.FIO:
            assert (sample["gb_per_s"], sample["cpu_s_per_gb"]) == (4.0, pytest.approx(0.1))
    assert not list(tmp_path.glob("infinity-aio-bench-*"))
    assert "fio-0.0; file of 0.0625 GiB" in (tmp_path / "aio.md").read_text()


def test_a_tiny_overhead_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    overhead = importlib.import_module("overhead")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    tiny = {"memory": overhead.Measurement("units", 3, "none", steps=2)}
    monkeypatch.setattr(overhead, "MEASUREMENTS", tiny)
    monkeypatch.setattr(overhead, "child", lambda what, tree, nvme_path: overhead.measure(what, nvme_path))
    flags = ["--only", "memory", "--rounds", "2", "--out", "--nvme-path", str(tmp_path)]
    result = run_main(overhead, monkeypatch, tmp_path, *flags)
    assert [len(samples) for samples in result["samples"].values()] == [2, 2]
    assert "| memory | now | " in (tmp_path / "overhead.md").read_text()


def test_a_tiny_step_on_many_ranks_is_simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ["--layers", "2", "--hidden", "64", "--heads", "2", "--vocab", "64", "--sequence", "16"]
    trace = tmp_path / "trace.json"
    large = importlib.import_module("simulate_large")
    result = run_main(large, monkeypatch, tmp_path, *flags, "--ranks", "4", "--per-node", "2", "--trace", str(trace))
    assert {"compute", "gather", "reduce", "nvme_read", "nvme_write", "update"} <= set(result["busy"])
    assert all(len(shares) == large.BINS and max(shares) <= 1.001 for shares in result["busy"].values())
    assert json.loads(trace.read_text())["traceEvents"]
    assert "4 GPUs, 2 a node" in (tmp_path / "simulate_large.md").read_text()


def test_cuda_kernels_leave_table_and_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command of gpu_check.sh, with clocks and kernels replaced: a copy takes 1 s, everything else 2 s."""
    adam_cuda = importlib.import_module("adam_cuda")
    monkeypatch.setattr(adam_cuda.cuda_adam, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(adam_cuda, "seconds", lambda run: run())
    monkeypatch.setattr(adam_cuda, "copy", lambda n, device: adam_cuda.Candidate("copy", 32, lambda: 1.0))
    one = adam_cuda.Candidate
    monkeypatch.setattr(adam_cuda, "updates", lambda case, n, device: [one(case.name, case.bytes(), lambda: 2.0)])
    monkeypatch.setattr(adam_cuda, "others", lambda n, device: [one("split", 8, lambda: 2.0)])
    monkeypatch.setattr(sys, "argv", ["adam_cuda.py", "--repeats", "2", "--output", str(tmp_path / "adam_cuda.md")])
    adam_cuda.main()
    samples = page.load(tmp_path / "adam_cuda.json")["samples"]
    assert [sample["name"] for sample in samples] == ["copy", *(case.name for case in adam_cuda.CASES), "split"]
    assert "| adamw | fp32 | fp32 | fp32 | 28 | 0.1 | 1 | 0.44 |" in (tmp_path / "adam_cuda.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command",
    [
        ["collectives", "--ranks", "2", "--sizes", "0.25", "--rounds", "1"],
        ["zero", *TINY, "--rounds", "1", "--steps", "1", "--only", "ddp", "fsdp2", "infinity stage 3"],
        ["save", *TINY, "--rounds", "1", "--steps", "1"],
        ["freed", *TINY, "--rounds", "1", "--steps", "2"],
        ["checksums", *TINY, "--rounds", "1", "--steps", "1"],
        ["optimizers", *TINY, "--rounds", "1", "--steps", "1"],
        ["drafts", *TINY, "--rounds", "1", "--steps", "1"],
        ["draft_kernel", "--parameters", "1e5", "--rounds", "1"],
        ["overhead", "--only", "memory", "--rounds", "1", "--out"],
    ],
    ids=lambda command: command[0],
)
def test_a_tiny_command_leaves_its_result(command: list[str], tmp_path: Path) -> None:
    name, *flags = command
    subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), *flags, "--results", str(tmp_path)], check=True, timeout=170
    )
    assert (tmp_path / f"{name}.json").exists() and (tmp_path / f"{name}.md").exists()
