"""The benchmark beside other engines: runs of the smallest shape, contenders that fail, losses that differ."""

import argparse
import importlib.util
import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from peers import run
from report import page

TINY = ["--shapes", "tiny", "--rounds", "1", "--steps", "1"]
HERE = ["plain", "infinity cpu", "infinity nvme", "fsdp2 cpu"]
"""Contenders that need no further package."""


def result_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> dict[str, Any]:
    """Run the benchmark with its driver in this process; its result."""
    where = ["--results", str(folder), "--nvme-path", str(folder)]
    monkeypatch.setattr(sys, "argv", ["run.py", *TINY, *where, *flags])
    run.main()
    return page.load(folder / "peers.json")


def in_this_process(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    return dict(json.loads(json.dumps(run.measure(args, kind))))


@pytest.mark.campaign
def test_a_tiny_shape_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "child", in_this_process)
    result = result_of(monkeypatch, tmp_path, "--peers", *HERE)
    assert list(result["runs"]) == [f"tiny, {name}" for name in HERE]
    for (found,) in result["runs"].values():
        assert len(found["steps"]) == 1 and len(found["losses"]) == 1 + run.WARM_UP
    assert result["apart"] < 1e-3
    text = (tmp_path / "peers.md").read_text()
    assert "| Infinity, all on NVMe |" in text and "hidden 32, 2 layers" in text
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "peers.png").stat().st_size > 10_000


@pytest.mark.parametrize("package", ["deepspeed", "torchao"])
def test_a_contender_that_is_not_installed_is_listed(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if any(distributions(name=package)):
        pytest.skip(f"{package} is installed")
    name, peer = next((name, peer) for name, peer in run.PEERS.items() if peer.package == package)
    result = result_of(monkeypatch, tmp_path, "--peers", name)
    assert [found["reason"] for found in result["runs"][f"tiny, {name}"]] == [f"{peer.requirement} is not installed"]
    assert f"did not run: `{peer.requirement} is not installed`" in (tmp_path / "peers.md").read_text()


@pytest.mark.campaign
def test_a_contender_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def child(args: argparse.Namespace, kind: str) -> dict[str, Any]:
        calls.append(kind)
        return {"reason": "no memory"} if "fsdp2" in kind else in_this_process(args, kind)

    monkeypatch.setattr(run, "child", child)
    result = result_of(monkeypatch, tmp_path, "--rounds", "2", "--peers", "plain", "fsdp2 cpu")
    assert sorted(calls) == ["tiny, fsdp2 cpu", "tiny, plain", "tiny, plain"]
    assert [found["reason"] for found in result["runs"]["tiny, fsdp2 cpu"]] == ["no memory"] * 2


def test_contenders_that_train_something_else_are_refused() -> None:
    runs = {"tiny, plain": [{"losses": [4.0, 3.9]}], "tiny, fsdp2 cpu": [{"losses": [4.0, 3.7]}], "tiny, torchao": [{}]}
    args = argparse.Namespace(shapes=["tiny"])
    with pytest.raises(SystemExit, match=r"losses differ by 5\.4e-02"):
        run.check_losses(args, runs)
    runs["tiny, fsdp2 cpu"] = [{"losses": [4.0, 3.9 * 1.001]}]
    assert run.check_losses(args, runs) == pytest.approx(1e-3)
