"""The job without its command: what it leaves, and how many steps it makes after a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpt2.duration import process_seconds
from gpt2.job import run, steps_of
from gpt2.options import JobOptions
from infinity.errors import ConfigError, StorageError
from infinity.sim.gpt2 import GPT2Config


def options(folder: Path, **changes: Any) -> JobOptions:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} is {n % 7} more than {n - n % 7}\n" for n in range(2000)))
    shape = GPT2Config(vocab_size=256, seq_length=32, num_layers=1, hidden_size=32, num_attention_heads=2)
    given = {"shape": shape, "batch_size": 4, "train_iters": 2, "data": str(text), "output": folder / "out"}
    return JobOptions(**{**given, **changes})


def test_job_leaves_the_curve_and_the_sample_in_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with ExitStack() as stack:
        run(options(tmp_path, sample=3), stack, process_seconds)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"loss.png", "sample.txt"}


def test_job_refuses_a_file_as_folder_before_it_reads_the_text(tmp_path: Path) -> None:
    changes = {"data": "nowhere", "save": tmp_path / "text.txt" / "saved"}
    with pytest.raises(StorageError, match=r"cannot be a folder, since .*text.txt is a file"), ExitStack() as stack:
        run(options(tmp_path, **changes), stack, process_seconds)
    assert not (tmp_path / "out").exists()


def test_resumed_job_takes_the_number_of_steps_given_or_saved() -> None:
    assert steps_of({"train_iters": 9}, Path("saved"), None) == 9
    assert steps_of({"train_iters": 9}, Path("saved"), 12) == 12
    with pytest.raises(ConfigError, match="saved does not say how many steps to train"):
        steps_of({}, Path("saved"), None)
