"""The log of steps."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.observe.ledger import Snapshot
from infinity.observe.log import StepLog, log_summary
from infinity.observe.recorder import Recorder
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches


class FakeLedger:
    """Memory is left, and nothing has been counted."""

    def snapshot(self) -> Snapshot:
        return Snapshot(*[1] * 12)

    def spare(self) -> str:
        return "2 bytes are left"


@pytest.mark.parametrize("every, lines", [(0, 0), (100, 1)])
def test_memory_that_steps_leave_is_logged_once(every: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """After the third step of this engine, whatever the number of its first one."""
    ledger: Any = FakeLedger()
    log = StepLog(ledger, Recorder(), every)
    with caplog.at_level("INFO", "infinity"):
        for number in range(41, 50):
            assert len(caplog.messages) == (lines if number > 43 else 0)
            log.step(number, torch.tensor(1.0), 1e-3, lambda: None)
    assert caplog.messages == ["2 bytes are left"] * lines


def test_each_line_has_the_gradient_norm_without_clipping(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps after the first are updated during backward, where nothing but the line needs the norm."""
    config = engine_config(folder=tmp_path).model_copy(update={"steps_per_print": 2})
    plain = seeded(Stack)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=config.optimizer.params.lr, weight_decay=config.optimizer.params.weight_decay
    )
    expected = []
    with caplog.at_level("INFO", "infinity"), open_engine(seeded(Stack), config) as engine:
        for step in range(6):
            batches = token_batches(1, seed=step)
            train(engine, batches)
            optimizer.zero_grad()
            plain(*batches[0]).backward()
            expected.append(nn.utils.get_total_norm([each.grad for each in plain.parameters()]).item())
            optimizer.step()
    logged = [(int(step), float(norm)) for step, norm in re.findall(r"step (\d+): .*gradient norm (\S+),", caplog.text)]
    assert [step for step, _ in logged] == [2, 4, 6]
    assert [norm for _, norm in logged] == pytest.approx(expected[1::2], rel=1e-2)


def test_lines_leave_out_a_loss_that_the_engine_does_not_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A backward without `engine.backward` hides the loss of its step only, even among micro-batches of both kinds."""
    config = engine_config(folder=tmp_path, accumulation=2).model_copy(update={"steps_per_print": 1})
    with caplog.at_level("INFO", "infinity"), open_engine(seeded(Stack), config) as engine:
        for known in ((True, True), (True, False), (False, False), (False, True), (True, True)):
            for is_known, batch in zip(known, token_batches(2), strict=True):
                loss = engine(*batch)
                engine.backward(loss) if is_known else engine.scale(loss).backward()
                engine.step()
    lines = [line for line in caplog.messages if line.startswith("step ")]
    assert [bool(re.match(r"step \d: loss \d+\.\d+, lr ", line)) for line in lines] == [True, False, False, False, True]
    assert all(re.match(r"step \d: lr \S+, ", line) for line in lines[1:4])


def test_a_loss_that_is_nan_is_in_the_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With infinity.check_nan, `engine.backward` refuses it."""
    config = engine_config(folder=tmp_path).model_copy(update={"steps_per_print": 1})
    unchecked = config.model_copy(update={"infinity": config.infinity.model_copy(update={"check_nan": False})})
    with caplog.at_level("INFO", "infinity"), open_engine(seeded(Stack), unchecked) as engine:
        engine.backward(engine(*token_batches(1)[0]) * math.nan)
        engine.step()
    assert any(line.startswith("step 1: loss nan, lr 0.001") for line in caplog.messages)


@pytest.mark.parametrize("level, shown", [("INFO", []), ("WARNING", [logging.INFO]), ("ERROR", [])])
def test_a_summary_is_logged_where_only_warnings_are_shown(
    level: str, shown: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """At INFO its details have been logged; at ERROR the user wants silence."""
    with caplog.at_level(level, "infinity"):
        caplog.handler.setLevel(logging.NOTSET)
        log_summary("5 % on nvme")
    assert [record.levelno for record in caplog.records] == shown
    assert caplog.messages == ["5 % on nvme"] * len(shown)
