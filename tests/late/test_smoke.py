"""bench/gpt2_10b.py --smoke on the late device: placements differ there, and agree in every bit."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinity.update.kernels import NATIVE
from late.device import LateAccelerator

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def script(lazy: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    script: Any = importlib.import_module("gpt2_10b")
    monkeypatch.setattr(script, "counted_device", LateAccelerator)
    monkeypatch.setattr(script, "SMOKE", replace(script.SMOKE, num_layers=2))
    return script


def smoke(script: Any, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    (folder / "text.txt").write_text("".join(f"{n} is {n % 7} more than {n - n % 7}\n" for n in range(2000)))
    files = ["--data", str(folder / "text.txt"), "--nvme-path", str(folder), "--out", str(folder / "smoke.json")]
    status = script.main(["--smoke", "--device-memory", "1GiB", *files])
    return status, json.loads((folder / "smoke.json").read_text())["runs"]


def test_placements_agree_in_every_bit(script: Any, tmp_path: Path) -> None:
    status, runs = smoke(script, tmp_path)
    assert status == 0 and len(runs) == 9 and len({run["digest"] for run in runs}) == 3
    for run in runs:
        assert (run["reserved_bytes"]["nvme"] > 0) == ("nvme" in run["placement"])


def test_a_budget_that_keeps_states_on_the_device_fails(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with kernels for the device; the update is torch's here."""
    kernels = replace(NATIVE, is_exact=lambda kind: True)
    monkeypatch.setattr("infinity.engine.platform.Platform.kernels", kernels)
    monkeypatch.setattr(script, "MOMENTS", ("fp32",))
    config_of = script.config_of

    def with_budget(args: Any, *kind: Any) -> Any:
        args.device_memory = 1 << 30
        return config_of(args, *kind)

    monkeypatch.setattr(script, "config_of", with_budget)
    assert smoke(script, tmp_path)[0] == 1
    out = capsys.readouterr().out
    for placement, tier in (("cpu", "host"), ("optimizer-nvme", "host"), ("nvme", "nvme")):
        assert f"FAILED: {placement} with fp32 moments: parameters are on device, not on {tier}\n" in out
