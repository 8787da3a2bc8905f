"""The command that trains a GPT-2, end to end: its files, steps, evaluations, resumes, ranks, errors and Ctrl-C."""

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpt2 import outputs
from gpt2.duration import MEASURED_STEPS
from gpt2.meter import MetricsFile, StepRecord

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "pretrain_gpt2.py"
TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"]
TINY += ["--seq-length", "32", "--batch-size", "4"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_gpt2", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{n} is {n % 7} more than {n - n % 7}\n" for n in range(2000)))


def config(**changes: Any) -> str:
    Path("nvme").mkdir(exist_ok=True)
    place = {"device": "nvme", "nvme_path": "nvme"}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place}
    Path("engine.json").write_text(json.dumps({"optimizer": optimizer, "zero_optimization": zero, **changes}))
    return "engine.json"


def metrics(path: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def left() -> set[str]:
    return {str(path) for path in Path().rglob("*") if not path.is_dir() or not any(path.iterdir())} - {"text.txt"}


def test_a_run_leaves_curve_checkpoint_sample_and_closing_table(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--data", "text.txt", "--train-iters", "30", "--sample", "20", "--metrics", "m.jsonl"]
    assert script.main([*TINY, *flags]) == 0
    files = left()
    assert {"m.jsonl", "runs/gpt2/loss.png", "runs/gpt2/sample.txt", "runs/gpt2/checkpoint/latest"} <= files
    assert all(name == "m.jsonl" or name.startswith("runs/gpt2/") for name in files)
    assert not Path("runs/gpt2/nvme").exists()
    steps = metrics("m.jsonl")
    assert [s["step"] for s in steps] == list(range(1, 31))
    assert list(steps[0]) == [
        "step", "loss", "seconds", "tokens_per_second", "nvme_bytes_read", "nvme_bytes_written", "host_peak_bytes",
        "device_peak_bytes",
    ]  # fmt: skip
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    parameters = (256 + 32) * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    moved = sum(s["nvme_bytes_read"] + s["nvme_bytes_written"] for s in steps) / 30 / parameters
    assert 20 < moved < 40  # every state is on NVMe: read, and written, once a step, with small units' padding
    out = capsys.readouterr().out
    assert Path("runs/gpt2/sample.txt").read_text().startswith("    def ")
    assert f"{steps[-1]['loss']:.3f}" in out and "held-out text" in out
    for row in ("nvme tier", "read per parameter and step", "compute", "I/O waited for", "update", "peak host memory"):
        assert row in out


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that is `seconds` later at each look."""
    looks = itertools.count()
    return lambda: seconds * next(looks)


def test_job_chooses_its_steps_from_measured_speed_and_trains_as_if_told(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job whose steps and evaluations take a second each ends before 2:30, with the losses of --train-iters."""
    run = [*TINY, "--data", "text.txt"]
    assert script.main([*run, "--metrics", "chosen.jsonl"], clock=ticking(1.0)) == 0
    out = capsys.readouterr().out
    assert "steps: chosen after step 25, so that the job ends after about 2:30, with 50 steps or more\n" in out
    # 53 looks until the choice, 1 s for the last evaluation: 96 s left for steps of 1 s + 1/25 of an evaluation.
    steps = MEASURED_STEPS + int(96 / 1.04)
    assert f"steps: {steps}; at 1.040 s each the job ends after about 2:30 (--train-iters overrides)\n" in out
    assert script.main([*run, "--train-iters", str(steps), "--save", "none", "--metrics", "told.jsonl"]) == 0
    assert "overrides" not in capsys.readouterr().out
    chosen, told = metrics("chosen.jsonl"), metrics("told.jsonl")
    assert [(s["step"], s["loss"]) for s in chosen] == [(s["step"], s["loss"]) for s in told]
    assert len(chosen) == steps
    assert script.main([*run, "--load", "runs/gpt2/checkpoint"]) == 2  # the checkpoint holds the number
    assert f"Step {steps} is done, and training is to end with step {steps}." in capsys.readouterr().err


def test_job_makes_the_fewest_steps_on_a_machine_that_is_too_slow(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*TINY, "--data", "text.txt", "--metrics", "m.jsonl", "--save", "none", "--sample", "2"]
    assert script.main(run, clock=ticking(100.0)) == 0
    assert len(metrics("m.jsonl")) == 50
    out = capsys.readouterr().out
    assert re.search(
        r"steps: 50, the minimum; at 104\.000 s each the job ends after about \d:\d\d:\d\d, later than 2:30", out
    )


def test_job_of_a_config_ends_with_its_schedule(script: ModuleType) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 7}}
    run = [*TINY, "--data", "text.txt", "--config", config(scheduler=schedule), "--save", "none"]
    assert script.main([*run, "--metrics", "m.jsonl"]) == 0
    assert len(metrics("m.jsonl")) == 7


@pytest.mark.campaign
def test_all_ranks_make_the_steps_that_rank_0_chooses() -> None:
    """Ranks with clocks of other speeds agree: the second rank's own clock allows the fewest steps only."""
    Path("driver.py").write_text(
        "import importlib.util, itertools, os, sys\n"
        f"sys.path.append({str(SCRIPT.parent)!r})\n"
        f"spec = importlib.util.spec_from_file_location('pretrain_gpt2', {str(SCRIPT)!r})\n"
        "script = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(script)\n"
        "looks, seconds = itertools.count(), (1.5, 100.0)[int(os.environ['RANK'])]\n"
        "sys.exit(script.main(sys.argv[1:], clock=lambda: seconds * next(looks)))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "driver.py"]
    run = [*TINY, "--data", "text.txt", "--save", "none", "--metrics", "m.jsonl"]
    subprocess.run([*torchrun, *run], check=True, env=environment())
    assert len(metrics("m.jsonl")) == MEASURED_STEPS + int((150 - 53 * 1.5 - 1.5) / 1.56)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 200),
        (["--num-layers", "6", "--checkpoint-activations", "--batch-size", "2", "--data", "x"], 200),
        (["--num-layers", "7"], 0),
        (["--seq-length", "64"], 0),
        (["--untie-embeddings-and-output-weights"], 0),
        (["--config", "engine.json"], 0),
        (["--config", "engine.json", "--num-layers", "7", "--sample", "1000"], 1000),
        (["--sample", "0"], 0),
    ],
)
def test_sample_is_written_by_default_for_the_default_model_only(
    script: ModuleType, flags: list[str], expected: int
) -> None:
    assert script.job_options(script.parse(flags)).sample_bytes == expected


@pytest.mark.parametrize("flags", [["--sample", "1001"], ["--sample", "-1"], ["--eval-iters", "-1"]])
def test_flags_out_of_their_range_are_refused(
    script: ModuleType, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(flags)
    assert f"argument {flags[0]}: must be " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("interval", "iters", "expected"),
    [(2, 1, [2, 4, 5]), (0, 1, [5]), (9, 1, [5]), (2, 0, [])],
)
def test_evaluations_follow_interval_and_end_with_the_last_step(
    script: ModuleType,
    interval: int,
    iters: int,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(outputs, "plot_loss", lambda _, losses, held_out, **texts: drawn.append(held_out))
    run = [*TINY, "--data", "text.txt", "--train-iters", "5", "--save", "none"]
    assert script.main([*run, "--eval-interval", str(interval), "--eval-iters", str(iters)]) == 0
    assert [step for step, _ in drawn[0]] == expected
    out = capsys.readouterr().out
    assert ("held-out text" in out) == (iters > 0)
    assert "sample" not in out and not Path("runs/gpt2/sample.txt").exists()


@pytest.mark.campaign
def test_resumes_bit_identically_in_a_new_process(script: ModuleType) -> None:
    common = [*TINY, "--data", "text.txt", "--config", config(bf16={"enabled": True})]
    assert script.main([*common, "--train-iters", "9", "--metrics", "whole.jsonl", "--save", "none"]) == 0
    assert script.main([*common, "--train-iters", "5", "--metrics", "parts.jsonl", "--save", "saved"]) == 0
    resume = ["--train-iters", "9", "--metrics", "parts.jsonl", "--save", "none", "--load", "saved"]
    subprocess.run([sys.executable, str(SCRIPT), *common, *resume], check=True, env=environment())
    whole, parts = metrics("whole.jsonl"), metrics("parts.jsonl")
    assert [(s["step"], s["loss"]) for s in parts] == [(s["step"], s["loss"]) for s in whole]


@pytest.mark.campaign
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_ranks_train_as_one(script: ModuleType, accumulation: int) -> None:
    common = [*TINY, "--data", "text.txt", "--config", config(gradient_accumulation_steps=accumulation)]
    common += ["--train-iters", "8", "--save", "none", "--untie-embeddings-and-output-weights"]
    assert script.main([*common, "--metrics", "one.jsonl"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT)]
    subprocess.run([*torchrun, *common, "--metrics", "two.jsonl"], check=True, env=environment())
    one, two = metrics("one.jsonl"), metrics("two.jsonl")
    assert [s["loss"] for s in two] == pytest.approx([s["loss"] for s in one], rel=1e-6)


class Killed(Exception):
    """Stands for the end of a process at a step."""


@pytest.mark.parametrize("before_the_line", [True, False])
def test_a_durable_job_goes_on_and_leaves_each_step_once(
    before_the_line: bool, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it ended between a commit and the line of its step. `--load auto` is the default."""
    common = [*TINY, "--data", "text.txt", "--train-iters", "6", "--save", "none"]
    assert script.main([*common, "--metrics", "whole.jsonl"]) == 0
    durable = [*common, "--durable", "--nvme-path", "nvme", "--metrics", "parts.jsonl"]
    write = MetricsFile.write

    def kill(file: MetricsFile, record: StepRecord) -> None:
        if not before_the_line:
            write(file, record)
        if record.step == 3:
            raise Killed
        if before_the_line:
            write(file, record)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MetricsFile, "write", kill)
        script.main(durable)
    assert script.main([*durable, "--load", "auto"]) == 0
    out = capsys.readouterr().out
    assert "durable run run: two slots of each state in nvme/run, " in out
    assert "resumed: nvme/run at step 3 of 6" in out
    whole, parts = metrics("whole.jsonl"), metrics("parts.jsonl")
    assert [(s["step"], s["loss"]) for s in parts] == [(s["step"], s["loss"]) for s in whole]
    assert script.main(durable) == 0
    assert "steps: all 6 are done" in capsys.readouterr().out and metrics("parts.jsonl") == parts


def test_a_durable_job_begins_with_a_checkpoint_and_goes_on_with_its_commits(script: ModuleType) -> None:
    common = [*TINY, "--data", "text.txt"]
    assert script.main([*common, "--train-iters", "2", "--save", "saved"]) == 0
    durable = [*common, "--save", "none", "--config", config(infinity={"durable": True}), "--load", "saved"]
    assert script.main([*durable, "--train-iters", "4"]) == 0
    assert script.main([*durable, "--train-iters", "6", "--metrics", "m.jsonl"]) == 0
    assert [s["step"] for s in metrics("m.jsonl")] == [4, 5, 6]  # 4: the record of the commit


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load", "auto"], "--load auto goes on with a durable run. Give --durable, or set infinity.durable"),
        (["--load", "auto", "--config", "engine.json"], "--load auto goes on with a durable run."),
        (["--durable", "--config", "engine.json"], "Set infinity.durable in engine.json instead."),
        (["--durable"], "A durable run needs the number of its steps, which must not change. Give --train-iters."),
    ],
)
def test_flags_that_make_no_durable_run_are_refused(
    flags: list[str], message: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    config()
    before = left()
    assert script.main([*TINY, "--data", "text.txt", *flags]) == 2
    assert message in capsys.readouterr().err and left() == before


def test_checkpointed_activations_and_the_seed(script: ModuleType) -> None:
    def losses(*flags: str) -> list[float]:
        run = [*TINY, "--data", "text.txt", "--config", config(), "--train-iters", "3", "--save", "none"]
        assert script.main([*run, "--metrics", "m.jsonl", *flags]) == 0
        return [s["loss"] for s in metrics("m.jsonl")]

    plain = losses()
    assert losses("--checkpoint-activations") == plain
    assert losses("--seed", "1") != plain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "nowhere"], "The text nowhere cannot be read: No such file or directory."),
        (["--data", "text.txt", "--seq-length", "100000"], "a sequence of 100000 needs 100001"),
        (["--hidden-size", "33"], "hidden_size 33 is not a multiple of num_attention_heads 2"),
        (["--vocab-size", "255"], "--vocab-size is 255, but a byte has 256 values. Give at least 256."),
        (["--config", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--config", "engine.json"], "--batch-size is 4, but train_batch_size in engine.json is 6"),
        (["--nvme-path", "text.txt"], "text.txt"),
        (["--nvme-path", "text.txt/below"], "The folder text.txt/below cannot be made: Not a directory"),
        (["--save", "text.txt/below"], "text.txt/below cannot be a folder, since "),
        (["--metrics", "."], "The metrics file . cannot be written: Is a directory."),
        (["--load", "nowhere"], "nowhere"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(
    script: ModuleType, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config(train_batch_size=6)
    before = left()
    assert script.main([*TINY, "--train-iters", "2", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
    assert left() == before


@pytest.mark.campaign(few=1)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_what_was_asked_for_only(stop: signal.Signals) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        *TINY,
        "--data",
        "text.txt",
        "--train-iters",
        "100000",
        "--metrics",
        "m.jsonl",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 1/"):
        assert process.poll() is None
    process.send_signal(stop)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error
    assert error.endswith("pretrain_gpt2.py: stopped; no checkpoint was saved\n")
    assert left() == {"m.jsonl"} and metrics("m.jsonl")


def environment() -> dict[str, str]:
    """Finds the package; computes with one thread as the suite does, since torch's sums depend on their number."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
