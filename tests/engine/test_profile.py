"""engine.profile: a trace of the real lanes, whose bytes are those that the engine counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import Config
from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from infinity.interrupts import exit_on_sigterm, on_sigterm, uninterrupted
from infinity.observe.timeline import LANES
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.sim.machine import Links
from infinity.sim.simulate import simulate
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import parameters_of
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(6)


def opened(**options: Any) -> TrainingEngine:
    options.setdefault("update", "after_backward")
    return TrainingEngine(seeded(Stack), engine_config(unit_size=4096, **options), device=CpuDevice())


def train(engine: TrainingEngine, steps: int = 1) -> None:
    for number in range(steps * engine.batch.accumulation):
        engine.backward(engine(*BATCHES[number % len(BATCHES)]))
        engine.step()


def events_of(file: Path, kind: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == kind]


def names_of(file: Path) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events_of(file, "M") if event["name"] == "thread_name"}


def bytes_by_lane(file: Path) -> Counter[str]:
    names, found = names_of(file), Counter[str]()
    for event in events_of(file):
        found[names[event["tid"]]] += event["args"]["bytes"]
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trace_has_the_bytes_that_the_engine_counts(tmp_path: Path, accumulation: int) -> None:
    file = tmp_path / "trace.json"
    with opened(accumulation=accumulation, clip=1.0) as engine:
        train(engine, 2)
        engine.settle()
        before = engine.ledger.snapshot()
        engine.profile(2, file)
        train(engine, 2)
        assert file.exists()
        engine.settle()
        moved = engine.ledger.snapshot() - before
    found = bytes_by_lane(file)
    assert 0 < found["nvme_read"] == moved.nvme_bytes_read
    assert 0 < found["nvme_write"] == moved.nvme_bytes_written
    assert {"compute", "reduce", "nvme_read", "nvme_write", "update"} <= {
        names_of(file)[event["tid"]] for event in events_of(file)
    }
    assert list(dict.fromkeys(names_of(file).values())) == list(LANES)


def test_steps_are_those_of_the_loop(tmp_path: Path) -> None:
    """Compute and exposed seconds are within the step, and events within the steps."""
    file = tmp_path / "trace.json"
    with opened(update="next_forward") as engine:
        engine.profile(3, str(file))
        train(engine, 4)
    steps = json.loads(file.read_text())["otherData"]["steps"]
    assert len(steps) == 3 and steps[0]["start"] == 0
    whole = 0.0
    for step in steps:
        assert step["start"] == pytest.approx(whole)
        assert sum(step["exposed"].values()) <= step["seconds"]
        whole += step["seconds"]
    assert all(event["ts"] >= 0 and event["ts"] + event["dur"] <= whole * 1e6 + 1 for event in events_of(file))
    compute = [event for event in events_of(file) if names_of(file)[event["tid"]] == "compute"]
    assert {event["name"].partition(" ")[0] for event in compute} == {"forward", "backward", "step"}
    waited = sum(sum(step["exposed"].values()) for step in steps)
    assert sum(event["dur"] for event in compute) / 1e6 + waited <= whole * (1 + 1e-6)


def test_counters_are_the_bytes_in_tiers(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with opened() as engine:
        engine.profile(1, file)
        train(engine)
        held = engine.ledger.tier_bytes()
    last = {event["name"]: event["args"]["bytes"] for event in events_of(file, "C")}
    assert last == {f"{tier} bytes": nbytes for tier, nbytes in held.items()}


@pytest.mark.parametrize("param, lanes", [("cpu", {"host_to_device", "device_to_host"}), ("none", set())])
def test_memory_tiers_have_lanes_of_copies(tmp_path: Path, param: str, lanes: set[str]) -> None:
    file = tmp_path / "trace.json"
    with opened(param=param, optim="none") as engine:
        train(engine)
        engine.profile(1, file)
        train(engine)
    copies = {"host_to_device", "device_to_host"}
    assert bytes_by_lane(file).keys() & copies == lanes


def test_activations_have_a_lane(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    activations = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 512, "memory_bytes": 2048}
    with opened(activations=activations) as engine:
        train(engine)
        before = engine.ledger.snapshot()
        engine.profile(1, file)
        train(engine)
        moved = engine.ledger.snapshot() - before
    # Requests are of whole pages.
    assert bytes_by_lane(file)["activations"] >= moved.activation_bytes_written > 0


def test_a_profile_changes_no_result(tmp_path: Path) -> None:
    found = []
    for profiles in (False, True):
        engine = opened(update="during_backward")
        if profiles:
            engine.profile(2, tmp_path / "trace.json")
        train(engine, 3)
        found.append(parameters_of(engine))
        engine.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_micro_batches_that_run_together_are_the_models(tmp_path: Path) -> None:
    """Their reads are requested, and waited for, in the thread of the model, although each has one of its own."""
    file = tmp_path / "trace.json"
    with opened(accumulation=3) as engine:
        batches = iter(BATCHES * 2)
        for _ in range(2):
            engine.train_batch(batches, blocks=engine.module.blocks)
        engine.profile(1, file)
        recording = engine.updates.profiler._recording
        assert recording is not None
        engine.train_batch(iter(BATCHES), blocks=engine.module.blocks)
    forward = [event for event in events_of(file) if names_of(file)[event["tid"]] == "compute"]
    begin, end = (next(e["ts"] for e in forward if e["name"].startswith(phase)) for phase in ("forward", "backward"))
    reads = [e for e in events_of(file) if names_of(file)[e["tid"]] == "nvme_read" and begin <= e["ts"] < end]
    assert {event["args"]["thread"] for event in reads} == {"model"}
    marks = [mark.at for mark in recording.marks if mark.name.startswith("backward")]
    assert any(isinstance(wait.start, float) and wait.start < marks[0] for wait in recording.waits)  # type: ignore[operator]


def test_a_profile_within_a_step_begins_with_the_next(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with opened(accumulation=2) as engine:
        engine.backward(engine(*BATCHES[0]))
        engine.step()
        engine.profile(1, file)
        engine.backward(engine(*BATCHES[1]))
        engine.step()
        assert not file.exists()
        assert engine.parts.device.recorder.is_on
        train(engine)
        assert not engine.parts.device.recorder.is_on
        assert len(json.loads(file.read_text())["otherData"]["steps"]) == 1


def test_nothing_is_recorded_after_the_last_step(tmp_path: Path) -> None:
    with opened() as engine:
        train(engine)
        assert not engine.parts.device.recorder.is_on
        engine.profile(1, tmp_path / "first.json")
        train(engine)
        engine.profile(1, tmp_path / "second.json")  # another one may follow
        train(engine)
        assert not engine.parts.device.recorder.is_on
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first.json", "second.json"]


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["forward", "backward", "between"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_profile_leaves_a_valid_trace(tmp_path: Path, when: str, error: type[BaseException]) -> None:
    file = tmp_path / "trace.json"
    with pytest.raises(error), opened() as engine:
        engine.profile(5, file)
        train(engine, 2)
        if when == "forward":
            engine.module.register_forward_hook(lambda *_: raises(error))
        loss = engine(*BATCHES[0])
        if when == "backward":
            loss.register_hook(lambda _: raises(error))
        if when == "between":
            raise error
        engine.backward(loss)
    steps = json.loads(file.read_text())["otherData"]["steps"]
    assert [step["complete"] for step in steps] == [True, True, False]
    assert bytes_by_lane(file)["nvme_read"] > 0


def raises(error: type[BaseException]) -> None:
    raise error


def test_an_engine_that_closes_in_its_first_step_leaves_a_valid_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    engine = opened()
    engine.profile(5, file)
    engine(*BATCHES[0])
    engine.close()
    assert len(json.loads(file.read_text())["otherData"]["steps"]) == 1
    assert bytes_by_lane(file)["nvme_read"] > 0


ENDING = """
import os, signal, sys, torch, infinity
from support.models import Stack, seeded, token_batches
engine, *_ = infinity.initialize(model=seeded(Stack), config={"train_micro_batch_size_per_gpu": 4})
engine.profile(9, sys.argv[1])
loss = engine(*token_batches(1)[0])
engine.backward(loss)
engine.step()
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        (
            "loss = engine(*token_batches(1)[0]); loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGTERM)); "
            "engine.backward(loss)",
            128 + signal.SIGTERM,
        ),
    ],
    ids=["Ctrl-C", "SIGTERM between steps", "SIGTERM in backward"],
)
def test_a_process_that_ends_without_closing_leaves_a_valid_trace(how: str, code: int, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    tests = Path(__file__).parents[1]
    script = [sys.executable, "-c", ENDING + how, file]
    done = subprocess.run(script, cwd=tests, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert json.loads(file.read_text())["otherData"]["steps"][0]["complete"]


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_the_process_as_before_once_the_profile_has_ended(default_sigterm: None, tmp_path: Path) -> None:
    engine = opened()
    engine.profile(1, tmp_path / "trace.json")
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    train(engine)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    engine.close()


def test_sigterm_is_handled_until_the_last_profile_has_ended(default_sigterm: None, tmp_path: Path) -> None:
    with opened() as one, opened() as other:
        one.profile(1, tmp_path / "one.json")
        other.profile(2, tmp_path / "other.json")
        train(one)
        train(other)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        train(other)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_action_of_sigterm_takes_the_place_of_the_exit(default_sigterm: None) -> None:
    """As of a durable run, which ends its step first."""
    asked: list[str] = []
    for first in (True, False):
        undo = [exit_on_sigterm()] if first else []
        undo.append(on_sigterm(lambda: asked.append("stop")))
        undo += [] if first else [exit_on_sigterm()]
        signal.raise_signal(signal.SIGTERM)
        for each in undo:
            each()
    assert asked == ["stop", "stop"] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_waits_for_states_to_be_consistent(default_sigterm: None) -> None:
    restore = exit_on_sigterm()
    try:
        done = []
        with pytest.raises(SystemExit), uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            done.append("the block")
        assert done == ["the block"]
        with uninterrupted():
            pass
    finally:
        restore()


def test_a_file_that_cannot_be_written_at_the_end_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with opened() as engine:
        engine.profile(1, folder / "trace.json")
        folder.rmdir()
        train(engine, 2)
    assert "the profile was not written" in caplog.text


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_steps_that_are_none_are_refused(tmp_path: Path, steps: Any) -> None:
    with opened() as engine, pytest.raises(UsageError, match="pass a whole number of steps from 1"):
        engine.profile(steps, tmp_path / "trace.json")


def test_files_that_cannot_be_written_are_refused_at_once(tmp_path: Path) -> None:
    with opened() as engine:
        for out in (tmp_path, tmp_path / "missing" / "trace.json"):
            with pytest.raises(UsageError, match="existing, writable folder"):
                engine.profile(1, out)
        for nothing in ("", None, 3):
            with pytest.raises(UsageError, match="names no file"):
                engine.profile(1, nothing)  # type: ignore[arg-type]
        engine.profile(1, tmp_path / "trace.json")


def test_files_that_are_no_regular_ones_are_refused(tmp_path: Path) -> None:
    """They would be replaced: /dev/null, by a process that may, for all others."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with opened() as engine, pytest.raises(UsageError, match="existing, writable folder"):
        engine.profile(1, pipe)
    assert pipe.is_fifo()


def test_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("trace.json")
    with opened() as engine:
        engine.profile(1, link)
        train(engine)
    assert link.is_symlink() and json.loads((tmp_path / "trace.json").read_text())


def test_a_second_profile_at_a_time_is_refused(tmp_path: Path) -> None:
    with opened() as engine:
        engine.profile(2, tmp_path / "trace.json")
        with pytest.raises(UsageError, match=r"another profile goes on, which writes .*trace\.json after 2 more steps"):
            engine.profile(2, tmp_path / "other.json")
    with pytest.raises(UsageError, match="closed"):
        engine.profile(2, tmp_path / "other.json")


def test_another_engines_file_is_refused_while_it_will_be_written(tmp_path: Path) -> None:
    """The later one would replace the earlier one's trace."""
    first, second, later = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "later.json"
    with opened() as one, opened() as other:
        one.profile(2, first)
        with pytest.raises(UsageError, match=r"another engine's profile goes on that writes .*first\.json"):
            other.profile(1, first)
        other.profile(1, second)
        train(one, 2)
        train(other, 1)
        other.profile(1, first)
        one.profile(1, later)  # is closed before it begins
    with opened() as engine:
        engine.profile(1, later)
        train(engine)
    assert all(json.loads(file.read_text())["traceEvents"] for file in (second, later))


# -- simulation --------------------------------------------------------------------------------------------------------


def test_a_simulated_trace_has_the_shape_of_a_real_one(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    shape = GPT2Config(vocab_size=96, seq_length=16, num_layers=2, hidden_size=64, num_attention_heads=4)
    tokens = torch.zeros(4, 17, dtype=torch.int64)
    config = Config.model_validate(engine_config(unit_size=60_000, debug=False))
    with TrainingEngine(GPT2(shape), config, device=CpuDevice()) as engine:
        engine.profile(1, file)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
    with torch.device("meta"):
        model = GPT2(shape)
    links = Links(1e9, 1e9, 1e9, 1e9, None, None, None, {"float32": 1e11}, 0)
    simulated = simulate(model, config, links, batch=(tokens[:, :-1], tokens[:, 1:])).chrome_trace()
    real = json.loads(file.read_text())
    assert shape_of(simulated) == shape_of(real)


def shape_of(trace: dict[str, Any]) -> Any:
    """The keys of a trace, of its kinds of events, and its lanes."""
    events = trace["traceEvents"]
    keys = {(event["ph"], *sorted(event), *sorted(event["args"])) for event in events}
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    return sorted(trace), sorted(keys), lanes, counters, [sorted(step) for step in trace["otherData"]["steps"]]
