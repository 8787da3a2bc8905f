"""Cases in which the last rank fails alone, after the last exchange of a call. They run in a `support.ranks.Group`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import infinity
from infinity.engine import inference, training
from infinity.engine.training import TrainingEngine
from infinity.tiers.device import CpuDevice
from infinity.units.states import UnitStates
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches

SAMPLES = 4
TEXT = "the last rank's own"
Case = Callable[[str, pytest.MonkeyPatch, bool], None]


def _opened(folder: str) -> TrainingEngine:
    """Open an engine whose ranks exchange gradients only."""
    return open_engine(seeded(Stack), engine_config("none", "cpu", folder=folder, micro=SAMPLES, stage=0))


def _fail(*_: Any, **__: Any) -> Any:
    raise ValueError(TEXT)


def _fail_in_the_last_unit(patch: pytest.MonkeyPatch, units: int) -> None:
    write, written = UnitStates.write_range, []

    def limited(states: UnitStates, layout: Any, *given: Any, **options: Any) -> None:
        written.append(layout.index)
        if len(written) == units:
            _fail()
        write(states, layout, *given, **options)

    patch.setattr(UnitStates, "write_range", limited)


def construct(folder: str, patch: pytest.MonkeyPatch, fails: bool) -> None:
    if fails:
        patch.setattr(training, "monitor_of", _fail)
    _opened(folder).close()


def construct_for_inference(folder: str, patch: pytest.MonkeyPatch, fails: bool) -> None:
    assemble = inference.assemble

    def failing(*arguments: Any) -> Any:
        assemble(*arguments).closer()()
        _fail()

    if fails:
        patch.setattr(inference, "assemble", failing)
    infinity.init_inference(seeded(Stack), {"zero_optimization": {"stage": 0}}, device=CpuDevice()).close()


def load(folder: str, patch: pytest.MonkeyPatch, fails: bool) -> None:
    with _opened(folder) as engine:
        engine.save_checkpoint(Path(folder, "saved"))
        if fails:
            _fail_in_the_last_unit(patch, len(engine.units))
        engine.load_checkpoint(Path(folder, "saved"))


def load_for_inference(folder: str, patch: pytest.MonkeyPatch, fails: bool) -> None:
    with _opened(folder) as engine:
        engine.save_checkpoint(Path(folder, "saved"))
    with infinity.init_inference(seeded(Stack), {"zero_optimization": {"stage": 0}}, device=CpuDevice()) as runner:
        if fails:
            _fail_in_the_last_unit(patch, len(runner.units))
        runner.load_checkpoint(Path(folder, "saved"))


def load_state_dict(folder: str, patch: pytest.MonkeyPatch, fails: bool) -> None:
    with _opened(folder) as engine:
        train(engine, token_batches(1, batch=SAMPLES))
        saved = engine.optimizer.state_dict()
        if fails:
            _fail_in_the_last_unit(patch, len(engine.units))
        engine.optimizer.load_state_dict(saved)


CASES: dict[str, Case] = {
    each.__name__: each for each in (construct, construct_for_inference, load, load_for_inference, load_state_dict)
}


def failing_alone(rank: int, *, folder: str, case: str) -> str:
    """Return the error of this rank."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            CASES[case](folder, patch, rank == dist.get_world_size() - 1)
        except Exception as error:  # noqa: BLE001 - compared by the test
            return f"{type(error).__name__}: {error}"
    return ""
