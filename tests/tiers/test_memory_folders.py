"""Folders in memory: engines log one warning for each, since states there save no memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinity
from infinity.engine.budget import check_files_in_memory
from infinity.engine.inference import InferenceEngine
from infinity.engine.training import TrainingEngine
from infinity.errors import OutOfMemoryError
from infinity.tiers.headroom import PROCESS
from infinity.tiers.space import IN_MEMORY, file_system_of
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded

MEMORY = Path("/dev/shm")
DRIVES = [Path(tempfile.gettempdir()), Path(__file__).parents[2], Path("/var/tmp")]


@pytest.fixture(scope="module", autouse=True)
def _is_in_memory() -> None:
    if file_system_of(MEMORY) != "tmpfs":
        pytest.skip(f"{MEMORY} is no tmpfs here")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def on_drive() -> Iterator[Path]:
    drives = [folder for folder in DRIVES if os.access(folder, os.W_OK) and file_system_of(folder) not in IN_MEMORY]
    if not drives:
        pytest.skip("no folder on a drive")
    with tempfile.TemporaryDirectory(dir=drives[0]) as folder:
        yield Path(folder)


def training(folder: Path) -> TrainingEngine:
    return open_engine(seeded(Stack), engine_config(folder=folder))


def inference(folder: Path) -> InferenceEngine:
    return infinity.init_inference(seeded(Stack), engine_config(folder=folder))


def told(caplog: pytest.LogCaptureFixture, folder: Path) -> list[str]:
    return [text for text in caplog.messages if text.startswith(f"{folder} is on ")]


@pytest.mark.parametrize("opened", [training, inference])
def test_a_folder_in_memory_is_named_once(
    opened: type[TrainingEngine] | type[InferenceEngine], in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for both engines over a folder, and one for another folder."""
    for _ in range(2):
        opened(in_memory).close()
    (line,) = told(caplog, in_memory)
    assert line.startswith(f"{in_memory} is on tmpfs, which is memory: ") and "(nvme_path)" in line
    other = in_memory / "other"
    other.mkdir()
    opened(other).close()
    assert len(told(caplog, other)) == 1


def test_a_folder_in_memory_is_named_before_memory_is_too_small(
    in_memory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may be what leaves too little."""
    monkeypatch.setattr("infinity.engine.platform.available_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemoryError):
        training(in_memory)
    assert len(told(caplog, in_memory)) == 1


def test_files_in_memory_count_as_host_memory(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserving them would otherwise end the process. A byte more is enough."""
    engine = training(in_memory)
    plan = engine.parts.plan
    engine.close()
    needed = plan.nbytes()["nvme"] + plan.peak_of_host() + PROCESS
    check_files_in_memory(plan, needed)
    with pytest.raises(
        OutOfMemoryError, match=f"files in {in_memory} take .* 1 are missing; name a folder on a local drive"
    ):
        check_files_in_memory(plan, needed - 1)


def test_a_folder_of_saved_activations_is_named(
    on_drive: Path, in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(folder=on_drive, activations={"device": "nvme", "nvme_path": str(in_memory)})
    open_engine(seeded(Stack), config).close()
    assert len(told(caplog, in_memory)) == 1 and not told(caplog, on_drive)


def test_a_folder_on_a_drive_is_not_named(on_drive: Path, caplog: pytest.LogCaptureFixture) -> None:
    training(on_drive).close()
    assert not told(caplog, on_drive)


def test_states_of_the_host_need_no_folder(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that no state is in is not named."""
    open_engine(seeded(Stack), engine_config("cpu", "cpu", folder=in_memory)).close()
    assert not told(caplog, in_memory)


def test_rank_0_names_it_alone(in_memory: Path) -> None:
    """Two ranks, one line."""
    script = f"""
import torch, infinity
nvme = {{"device": "nvme", "nvme_path": {str(in_memory)!r}}}
config = {{"train_batch_size": 2, "zero_optimization": {{"stage": 3, "offload_param": nvme}}}}
infinity.initialize(torch.nn.Linear(64, 64), config)[0].close()
"""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [sys.executable, *torchrun, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.count(f"{in_memory} is on tmpfs") == 1
