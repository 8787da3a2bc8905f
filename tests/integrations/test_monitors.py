"""TensorBoard and Weights & Biases (offline) hold the losses and rates of the loop, as their libraries read them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for library in ("tensorboard", "wandb"):
    pytest.importorskip(library, reason="make test-integrations installs it")

import wandb  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from wandb.proto import wandb_internal_pb2  # noqa: E402

import infinity  # noqa: E402
import infinity.deepspeed as deepspeed  # noqa: E402
from support.models import Linears, seeded, vector_batches  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

TAGS = ("Train/Samples/train_loss", "Train/Samples/lr")
Values = dict[str, list[tuple[int, float]]]


def trained(engine: Any) -> Values:
    """Train four steps; return the samples and values that each tag must have."""
    expected: Values = {tag: [] for tag in TAGS}
    for number, batch in enumerate(vector_batches(4), 1):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        for tag, value in zip(TAGS, (loss.item(), engine.optimizer.param_groups[0]["lr"]), strict=True):
            expected[tag].append((4 * number, value))
    return expected


def config(section: str, **settings: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        section: {"enabled": True, **settings},
    }


def history(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in a run's file: records of protobuf in LevelDB's log format, in blocks of 32 KiB."""
    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            message = wandb_internal_pb2.Record.FromString(record)
            record = b""
            if message.WhichOneof("record_type") == "history":
                items = message.history.item
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def test_tensorboard(tmp_path: Path) -> None:
    settings = config("tensorboard", output_path=str(tmp_path), job_name="run")
    engine, *_ = deepspeed.initialize(model=seeded(Linears), config=settings)
    expected = trained(engine)
    engine.monitor.write_events([("Train/Samples/eval_loss", 0.5, 16)])
    engine.destroy()
    read = EventAccumulator(str(tmp_path / "run")).Reload()
    for tag in TAGS:
        values = [(event.step, event.value) for event in read.Scalars(tag)]
        assert values == [(samples, pytest.approx(value, rel=1e-6)) for samples, value in expected[tag]]
    assert [(event.step, event.value) for event in read.Scalars("Train/Samples/eval_loss")] == [(16, 0.5)]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of Weights & Biases are files in `tmp_path`; `wandb.teardown()` waits until they are written."""
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    wandb.teardown()


@pytest.mark.parametrize("begun", [False, True], ids=["own", "script"])
@pytest.mark.usefixtures("offline")
def test_wandb(begun: bool, tmp_path: Path) -> None:
    """Closing the engine finishes its own run, and leaves a run of the script open."""
    run = wandb.init() if begun else None
    engine, *_ = infinity.initialize(model=seeded(Linears), config=config("wandb", project="ours", group="few"))
    assert wandb.run is not None
    assert wandb.run is run if begun else (wandb.run.project, wandb.run.group) == ("ours", "few")
    expected = trained(engine)
    engine.close()
    assert wandb.run is run
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = list(history(file))
    for tag in TAGS:
        assert [(row["_step"], row[tag]) for row in rows] == expected[tag]
