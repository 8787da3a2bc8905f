"""A disk that fails under an engine: the error names path, offset and size, and the engine goes no further.

Faults are injected below the native I/O engine, where the kernel's completions are read.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infinity.engine.training import TrainingEngine
from infinity.errors import NonFiniteError, UsageError
from infinity.native import _aio
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import assert_same, open_engine, train, trained
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(6)


@pytest.fixture
def faults() -> Iterator[Any]:
    """faults(...): inject faults into engines made in the test, which start with a fault that never occurs."""
    yield _aio._inject
    _aio._inject([])


def run_until_it_fails(engine: TrainingEngine) -> OSError:
    with pytest.raises(OSError) as caught:
        for batch in BATCHES * 4:
            engine.backward(engine(*batch))
            engine.step()
        engine.settle()
    return caught.value


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("only", ["read", "write"])
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"optim": "cpu"}, {"param": "none"}], ids=str)
@pytest.mark.parametrize("after", [30, 100])
def test_the_error_reaches_the_caller(faults: Any, options: dict[str, Any], only: str, after: int, late: bool) -> None:
    """The error may occur in a fetch, an update or the gradients. Every later call raises, too."""
    device = LateDevice() if late else None
    faults([{"where": "event", "error": errno.EIO, "only": only, "after": after, "times": 1}])
    engine = open_engine(seeded(Stack), engine_config(**{"prefetch_bytes": 20_000, **options}), device)
    try:
        error = run_until_it_fails(engine)
        assert error.errno == errno.EIO
        assert error.filename and "states of rank 0" in str(error.filename)
        assert "offset" in str(error) and "bytes" in str(error)
        assert re.search(r"\((parameters|optimizer states|gradient) of unit \S+\)", str(error))
        for call in (lambda: engine(*BATCHES[0]), engine.step, engine.settle):
            with pytest.raises((UsageError, OSError), match=r"the engine stopped|Input/output error"):
                call()
        with pytest.raises(UsageError, match="make a new one and load the last checkpoint"):
            engine(*BATCHES[0])
    finally:
        engine.close()


def test_an_error_at_start_leaves_nothing(faults: Any) -> None:
    faults([{"where": "event", "error": errno.ENOSPC, "only": "write", "after": 3, "times": 1}])
    with pytest.raises(OSError, match="No space left on device"):
        open_engine(seeded(Stack), engine_config())


@pytest.mark.parametrize("where", ["block", "submit", "getevents"])
def test_what_is_no_error_changes_nothing(faults: Any, where: str) -> None:
    """Short transfers, rejected submissions and interrupted waits are continued, and training is bit-identical."""
    config = engine_config(prefetch_bytes=20_000)
    expected = trained(seeded(Stack), BATCHES, config)
    kinds: dict[str, dict[str, Any]] = {
        "block": {"where": "block", "bytes": 4096, "after": 20, "times": 40},
        "submit": {"where": "submit", "error": errno.EAGAIN, "after": 10, "times": 3},
        "getevents": {"where": "getevents", "error": errno.EINTR, "after": 10, "times": 30},
    }
    faults([kinds[where]])
    assert_same(trained(seeded(Stack), BATCHES, config), expected)


# -- gradients that are not finite -----------------------------------------------------------------------------------


def poisoned(bad_at: int) -> Stack:
    """Make the gradient of one weight NaN in backward number `bad_at`, with a finite loss."""
    model = seeded(Stack)
    backwards = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal backwards
        backwards += 1
        return gradient * float("nan") if backwards == bad_at else gradient

    weight = model.blocks[2].up.weight
    assert isinstance(weight, torch.Tensor)
    weight.register_hook(spoil)
    return model


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("options", [{"clip": 0.5}, {"update": "next_forward"}, {"update": "after_backward"}], ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing(options: dict[str, Any], late: bool) -> None:
    """The gradient is found before any update: the step raises, and the next one is unaffected."""
    config = engine_config(prefetch_bytes=20_000, **options)
    expected = trained(seeded(Stack), [*BATCHES[:2], *BATCHES[3:]], config)
    with open_engine(poisoned(3), config, LateDevice() if late else None) as engine:
        losses = train(engine, BATCHES[:2])
        engine.backward(engine(*BATCHES[2]))
        with pytest.raises(NonFiniteError, match="norm is nan"):
            engine.step()
        losses += train(engine, BATCHES[3:])
        assert engine.global_steps == 5
    assert losses == expected.losses


def test_a_gradient_that_is_not_finite_during_backward_stops_the_engine() -> None:
    """Other units of the step are updated by then; the unit itself is unchanged."""
    config = engine_config(prefetch_bytes=20_000)
    with open_engine(poisoned(3), config) as engine:
        train(engine, BATCHES[:2])
        with pytest.raises(NonFiniteError, match=r"blocks\.2.*Load the last checkpoint"):
            train(engine, BATCHES[2:])
        with pytest.raises(UsageError, match="the engine stopped"):
            engine(*BATCHES[0])


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_check_nan_off_lets_it_through(clip: float) -> None:
    config = engine_config(prefetch_bytes=20_000, check_nan=False, clip=clip)
    with open_engine(poisoned(3), config) as engine:
        losses = train(engine, BATCHES[:4])
    assert all(loss == loss for loss in losses[:3]) and losses[3] != losses[3]
