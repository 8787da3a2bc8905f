"""Reports: monitors write the loop's losses and rates, and counting operations does not change a result."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import infinity
from infinity.errors import ConfigError
from support.loops import parameters_of
from support.models import Linears, Stack, seeded, token_batches, vector_batches

BATCHES = vector_batches(6)
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 1e-2}}
BLOCK = {
    "plain": None,
    "checkpointed": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


def opened(model: Callable[[], nn.Module] = Linears, **top: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 0, "infinity": {"unit_size": 4096}, **top}
    return infinity.initialize(model=seeded(model), config=config)[0]


def rows(folder: Path, name: str) -> list[tuple[str, str]]:
    """Return the rows of a tag's file, its header first."""
    text = (folder / "DeepSpeedJobName" / f"Train_Samples_{name}.csv").read_text()
    return [(samples, value) for samples, value in csv.reader(text.splitlines())]


def in_csv(folder: Path) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder)}


# -- monitors ----------------------------------------------------------------------------------------------------------


def test_files_hold_the_losses_and_the_next_rates(tmp_path: Path) -> None:
    """A row a step: samples so far, and the mean of the losses of both micro-batches or the rate of the next step."""
    engine = opened(gradient_accumulation_steps=2, scheduler=SCHEDULE, csv_monitor=in_csv(tmp_path))
    losses, rates = [], []
    for number, batch in enumerate(BATCHES):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if number % 2:
            rates.append(engine.optimizer.param_groups[0]["lr"])
    means = [(losses[at] / 2 + losses[at + 1] / 2) for at in (0, 2, 4)]
    samples = ("8", "16", "24")
    assert rows(tmp_path, "train_loss") == [("step", "train_loss"), *zip(samples, map(str, means), strict=True)]
    assert rows(tmp_path, "lr") == [("step", "lr"), *zip(samples, map(str, rates), strict=True)]
    assert len(set(rates)) == 3
    assert {path.name for path in (tmp_path / "DeepSpeedJobName").iterdir()} == {
        "Train_Samples_train_loss.csv",
        "Train_Samples_lr.csv",
    }
    engine.close()


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    """The resumed run counts on from the checkpoint's samples, and the header stays the only one."""
    for _ in range(2):
        engine = opened(csv_monitor=in_csv(tmp_path))
        if (tmp_path / "saved").exists():
            engine.load_checkpoint(tmp_path / "saved")
        for batch in BATCHES[:2]:
            engine.backward(engine(*batch))
            engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        engine.close()
    assert [samples for samples, _ in rows(tmp_path, "lr")] == ["step", "4", "8", "12", "16"]


def test_steps_without_known_losses_have_a_rate_only(tmp_path: Path) -> None:
    """Losses of plain backwards and of dropped gradients are in no mean."""
    engine = opened(gradient_accumulation_steps=2, csv_monitor=in_csv(tmp_path))
    engine.backward(engine(*BATCHES[0]))
    engine.drop_gradients()
    for number, batch in enumerate(BATCHES[:4]):
        loss = engine(*batch)
        engine.scale(loss).backward() if number == 0 else engine.backward(loss)
        engine.step()
    assert [samples for samples, _ in rows(tmp_path, "train_loss")] == ["step", "16"]
    assert [samples for samples, _ in rows(tmp_path, "lr")] == ["step", "8", "16"]
    engine.close()


def test_the_loss_scale_is_that_of_the_next_step(tmp_path: Path) -> None:
    """fp16 adds the scale, which a step with an overflow halves; a skipped step has a row, too."""
    fp16 = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1}
    engine = opened(fp16=fp16, csv_monitor=in_csv(tmp_path))
    for factor in (1.0, float("inf")):
        engine.backward(engine(*(part.half() for part in BATCHES[0])) * factor)
        engine.step()
    assert engine.skipped_steps == 1
    assert rows(tmp_path, "loss_scale") == [("step", "loss_scale"), ("4", "8.0"), ("8", "4.0")]
    engine.close()


def test_a_failing_writer_is_dropped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training continues, and the warning comes once. A folder in place of a file fails for root, too."""
    engine = opened(csv_monitor=in_csv(tmp_path))
    (tmp_path / "DeepSpeedJobName" / "Train_Samples_train_loss.csv").mkdir()
    for batch in BATCHES[:3]:
        engine.backward(engine(*batch))
        engine.step()
    assert engine.global_steps == 3 and not engine.monitor.enabled
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith(
        "csv_monitor failed and writes nothing more; training continues"
    )
    engine.close()


def test_a_folder_that_cannot_be_made_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"csv_monitor\.enabled is true, but it cannot write \(NotADirectoryError"):
        opened(csv_monitor=in_csv(tmp_path / "file"))


def test_missing_packages_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.observe.monitor.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        opened(tensorboard={"enabled": True}, wandb={"enabled": True})
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [
        "tensorboard.enabled is true, but the package tensorboard is not installed",
        "wandb.enabled is true, but the package wandb is not installed",
    ]
    assert "pip install tensorboard" in raised.value.problems[0]


def test_events_of_the_script(tmp_path: Path) -> None:
    engine = opened(csv_monitor=in_csv(tmp_path))
    engine.monitor.write_events([("Train/Samples/eval loss", 0.5, 12)])
    assert rows(tmp_path, "eval_loss") == [("step", "eval loss"), ("12", "0.5")]
    engine.close()


# -- times -------------------------------------------------------------------------------------------------------------


def test_the_wall_clock_is_logged_and_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line every `steps_per_print` steps, whose phases are within the step; milliseconds of every step in a file."""
    with caplog.at_level(logging.INFO, "infinity"):
        engine = opened(wall_clock_breakdown=True, steps_per_print=2, csv_monitor=in_csv(tmp_path))
        for batch in BATCHES[:4]:
            with torch.no_grad():
                engine(*batch)
            engine(*batch).backward()
            engine.step()
        engine.close()
    lines = [record.message for record in caplog.records if record.message.startswith("wall clock")]
    assert [line.partition(":")[0] for line in lines] == ["wall clock, step 2", "wall clock, step 4"]
    assert all("exposed in this step: " in line for line in lines)
    for phase in ("forward", "backward", "step"):
        assert f" {phase} " in lines[0]
        assert all(float(value) > 0 for _, value in rows(tmp_path, f"elapsed_time_ms_{phase}")[1:])
        assert len(rows(tmp_path, f"elapsed_time_ms_{phase}")) == 5


@pytest.mark.parametrize("every", [0, 1, 2])
def test_only_steps_that_log_their_exposed_time_are_recorded(every: int) -> None:
    """None without `wall_clock_breakdown`, so that such an engine pays nothing."""
    for breakdown in (False, True):
        engine = opened(wall_clock_breakdown=breakdown, steps_per_print=every)
        recorded = [engine.parts.device.recorder.is_on]
        for batch in BATCHES[:3]:
            engine.backward(engine(*batch))
            engine.step()
            recorded.append(engine.parts.device.recorder.is_on)
        engine.close()
        assert recorded == [breakdown and number % (every or 1) == 0 for number in range(1, 5)]


def test_recordings_of_steps_that_never_log_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loaded checkpoint may skip the step that would log, and a loop may call the optimizer itself."""
    engine = opened(wall_clock_breakdown=True, steps_per_print=4)
    recorder = engine.parts.device.recorder

    def train(steps: int) -> None:
        for batch in BATCHES[:steps]:
            engine.backward(engine(*batch))
            engine.step()

    train(2)
    engine.save_checkpoint(tmp_path, tag="second")
    train(1)
    assert recorder.is_on  # the fourth step would log
    engine.load_checkpoint(tmp_path, tag="second")
    train(1)
    with caplog.at_level(logging.INFO, "infinity"):
        train(1)
    assert "exposed in this step: " in caplog.text
    assert not recorder.is_on
    train(3)
    assert recorder.is_on
    for _ in range(2):
        engine.backward(engine(*BATCHES[0]))
        engine.optimizer.step()
        assert not recorder.is_on
    engine.close()


def test_a_step_that_was_not_recorded_logs_no_exposed_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint's next step logs, and the one that was expected does not."""
    with caplog.at_level(logging.INFO, "infinity"):
        engine = opened(wall_clock_breakdown=True, steps_per_print=4)
        for number in range(6):
            if number == 3:
                engine.save_checkpoint(tmp_path, tag="third")
            engine.backward(engine(*BATCHES[number % 2]))
            engine.step()
        caplog.clear()
        engine.load_checkpoint(tmp_path, tag="third")
        engine.backward(engine(*BATCHES[0]))
        engine.step()
        engine.close()
    (line,) = [record.message for record in caplog.records if record.message.startswith("wall clock")]
    assert line.startswith("wall clock, step 4: ") and "exposed" not in line


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("block", BLOCK)
def test_operations_are_those_of_the_plain_model(block: str, tmp_path: Path) -> None:
    """The report has the plain forward's count, and training is bit-identical to that without it."""
    batches = token_batches(3)
    with FlopCounterMode(display=False) as counter:
        seeded(Stack)(*batches[1])
    found = []
    for enabled in (False, True):
        profiler = {"enabled": enabled, "output_file": str(tmp_path / "new" / "report"), "top_modules": 2}
        engine = opened(lambda: Stack(run=BLOCK[block]), flops_profiler=profiler)
        losses = []
        for batch in batches:
            engine.eval()
            with torch.no_grad():
                engine(*batch)  # not the forward that is counted
            engine.train()
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss)
        found.append([*losses, *parameters_of(engine).values()])
        engine.close()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    report = (tmp_path / "new" / "report").read_text().splitlines()
    assert counter.get_total_flops() == 2 * 32 * (6 * 2 * 32 * 128 + 32 * 61)
    assert report[0].startswith("flops_profiler, step 1: 3.27 MFLOP in the forward of one micro-batch on one rank, for")
    assert "for 54.4 k parameters" in report[0]
    assert report[1:5] == [
        "depth 0: Stack 3.27 MFLOP",
        "depth 1: Linear 125 kFLOP",
        "depth 2: Block 3.15 MFLOP",
        "depth 3: Linear 3.15 MFLOP",
    ]
    assert report[5] == "the model (Stack): 54.4 k parameters, 3.27 MFLOP, 100.0 %"
    assert report[-1] == "  head (Linear): 1.95 k parameters, 125 kFLOP, 3.8 %"
    assert len(report) == 25


def test_the_report_has_the_depth_and_the_detail_of_the_config(caplog: pytest.LogCaptureFixture) -> None:
    """The first training forward of the step is counted, and only it."""
    profiler = {"enabled": True, "profile_step": 0, "module_depth": 1, "detailed": False}
    with caplog.at_level(logging.INFO, "infinity"):
        engine = opened(gradient_accumulation_steps=2, flops_profiler=profiler)
        for batch in BATCHES[:4]:
            engine.backward(engine(*batch))
            engine.step()
        engine.close()
    (report,) = [record.message for record in caplog.records if record.message.startswith("flops_profiler")]
    assert report.splitlines()[1:] == ["depth 0: Linears 65.5 kFLOP"]


def test_a_compiled_model_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    engine = opened(lambda: torch.compile(Linears(depth=2), backend="eager"), flops_profiler={"enabled": True})
    for batch in BATCHES[:2]:
        engine.backward(engine(*batch))
        engine.step()
    assert [record.message for record in caplog.records if "nothing was counted, since the model" in record.message]
    engine.close()
