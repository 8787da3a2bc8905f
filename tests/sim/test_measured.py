"""Times of operations that are measured here: repeated a few times, cached, of this process's memory, else unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.sim import measured
from infinity.sim.device import DeviceFacts, Times
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.sim.machine import Links
from infinity.sim.measured import ALL, LONGEST, PART_OF_MEMORY, MeasuredTimes
from infinity.sim.simulate import Simulation, simulate
from support.configs import engine_config

LINKS = Links(2e8, 1e8, 2e8, 2e9, 1e9, 1e9, 1e9, {"float32": 1e11}, 0)
SHAPE = GPT2Config(vocab_size=96, seq_length=16, num_layers=2, hidden_size=64, num_attention_heads=4)
TOKENS = torch.zeros(4, 17, dtype=torch.int64)
aten = torch.ops.aten


def ticking(*steps: float) -> Callable[[], float]:
    """Return a clock that advances by each of `steps` in turn, and by the last one ever after."""

    def times() -> Iterator[float]:
        now = 0.0
        for number in count():
            yield now
            now += steps[min(number, len(steps) - 1)]

    return times().__next__


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def seconds(times: MeasuredTimes, function: Any, *args: Any, expected: float = 0.0, **kwargs: Any) -> float | None:
    result = function(*args, **kwargs)
    return times.seconds((function, str(args)), function, args, kwargs, result, expected)


@pytest.fixture(autouse=True)
def without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "cache_bytes", lambda: 0)


def test_a_time_is_the_median_without_the_first() -> None:
    # The clock is read before all, then before and after each call.
    calls = (9.0, 3.0, 1.0, 2.0, 8.0, 2.5)
    steps = [step / 1e6 for each in calls for step in (0.0, each)]
    assert seconds(MeasuredTimes(ticking(*steps)), aten.mm.default, meta(4, 4), meta(4, 4)) == pytest.approx(2.5e-6)


def test_a_slow_operation_is_repeated_once() -> None:
    now = ticking(0.0, 5.0)
    assert seconds(MeasuredTimes(now), aten.mm.default, meta(4, 4), meta(4, 4)) == 5.0
    assert now() == 20.0  # read before all, and before and after both calls


def test_an_operation_is_measured_once() -> None:
    now = ticking(1e-6)
    times = MeasuredTimes(now)
    first = seconds(times, aten.mm.default, meta(4, 4), meta(4, 4))
    before = now()
    assert seconds(times, aten.mm.default, meta(4, 4), meta(4, 4)) == first is not None
    assert now() == pytest.approx(before + 1e-6)
    seconds(times, aten.mm.default, meta(4, 8), meta(8, 4))
    assert now() > before + 3e-6


CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.embedding.default, (meta(10, 4), meta(2, 3, dtype=torch.int64)), {}),
    (aten.embedding_dense_backward.default, (meta(2, 3, 4), meta(2, 3, dtype=torch.int64), 10, -1, False), {}),
    (aten.gather.default, (meta(5, 7), 1, meta(5, 1, dtype=torch.int64)), {}),
    (aten.scatter_add_.default, (meta(5, 7), 1, meta(5, 1, dtype=torch.int64), meta(5, 1)), {}),
    (aten.where.self, (meta(5, dtype=torch.bool), meta(5), meta(5)), {}),
    (aten.mm.default, (meta(8, 4).t(), meta(8, 4)), {}),
    (aten.add.Tensor, (meta(1, 4).expand(3, 4), meta(3, 4)), {}),
    (aten.arange.default, (9,), {"device": torch.device("meta")}),
    (aten.stack.default, ([meta(2), meta(2)],), {}),
    (aten.native_layer_norm_backward.default, (), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CASES, ids=[str(case[0]) for case in CASES])
def test_operations_of_models_run_on_made_up_values(function: Any, args: Any, kwargs: Any) -> None:
    if not args:  # in bf16 the meta device's statistics have another dtype than the host's
        x, weight = meta(2, 8, dtype=torch.bfloat16), meta(8, dtype=torch.bfloat16)
        _, mean, rstd = aten.native_layer_norm.default(x, [8], weight, weight, 1e-5)
        args = (x, x, [8], mean, rstd, weight, weight, [True, True, True])
    assert seconds(MeasuredTimes(), function, *args, **kwargs) is not None


def test_values_that_an_operation_changes_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`exp_` of its own result would be infinite soon."""
    filled = []
    fill = measured._fill
    monkeypatch.setattr(
        measured, "_fill", lambda tensor, limit: (filled.append(tensor.max().item()), fill(tensor, limit))
    )
    seconds(MeasuredTimes(ticking(1e-6)), aten.exp_.default, meta(9))
    assert len(filled) > 3 and max(filled[1:]) < 2


def test_an_operation_larger_than_its_part_of_memory_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    fill = measured._fill
    monkeypatch.setattr(measured, "_fill", lambda tensor, limit: (made.append(tensor.nbytes), fill(tensor, limit)))
    needed = (64 * 32 + 32 * 16 + 64 * 16) * 4  # two operands and a result
    operands = meta(64, 32), meta(32, 16)
    for memory, is_measured in ((PART_OF_MEMORY * needed - 1, False), (PART_OF_MEMORY * needed, True)):
        made.clear()
        found = seconds(MeasuredTimes(memory=memory), aten.mm.default, *operands)
        assert (found is not None, bool(made)) == (is_measured, is_measured)


def test_an_operation_that_is_expected_to_be_slow_is_not_executed() -> None:
    assert seconds(MeasuredTimes(), aten.mm.default, meta(4, 4), meta(4, 4), expected=2 * LONGEST) is None


def test_nothing_more_is_executed_once_all_calls_have_taken_long() -> None:
    times = MeasuredTimes(ticking(ALL / 2 + 1))  # a warm-up and a repetition of each
    assert seconds(times, aten.mm.default, meta(4, 4), meta(4, 4)) == ALL / 2 + 1
    assert seconds(times, aten.mm.default, meta(4, 8), meta(8, 4)) is None
    assert seconds(times, aten.mm.default, meta(4, 4), meta(4, 4)) == ALL / 2 + 1


def test_an_operation_that_rejects_the_values_is_unknown() -> None:
    assert MeasuredTimes().seconds("key", aten.mm.default, (meta(2, 3), meta(4, 5)), {}, meta(2, 5), 0.0) is None


class Fixed:
    """Times of the same length. without: functions that are unknown."""

    def __init__(self, each: float, without: Any = None) -> None:
        self.each, self.without = each, without
        self.functions: list[Any] = []

    def seconds(self, key: Any, function: Any, args: Any, kwargs: Any, result: Any, expected: float) -> float | None:
        hash(key)
        self.functions.append(function)
        return None if function is self.without else self.each


def simulated(folder: Path, times: Times | None, **options: Any) -> Simulation:
    with torch.device("meta"):
        model: nn.Module = GPT2(SHAPE)
    config = engine_config(folder=folder, unit_size=60_000, debug=False)
    return simulate(model, config, LINKS, batch=(TOKENS[:, :-1], TOKENS[:, 1:]), times=times, **options)


def test_a_simulated_step_takes_the_times_of_its_operations_and_kernels(tmp_path: Path) -> None:
    none, short, long = (simulated(tmp_path, times) for times in (None, Fixed(1e-9), Fixed(1e-2)))
    assert short.compute_seconds < none.compute_seconds < long.compute_seconds
    of_update = [[r.alone for r in run.records if r.lane == "update"] for run in (none, long)]
    assert of_update[1] == [1e-2] * len(of_update[0])


def test_unknown_operations_take_the_time_of_their_operands(tmp_path: Path) -> None:
    class Unknown(Fixed):
        def seconds(self, *args: Any) -> None:
            return None

    assert simulated(tmp_path, Unknown(0.0)).seconds == simulated(tmp_path, None).seconds
    times = Fixed(1e-9)
    without = Fixed(1e-9, without=aten.addmm.default)
    assert simulated(tmp_path, without).compute_seconds > simulated(tmp_path, times).compute_seconds
    assert aten.addmm.default in without.functions


def test_times_of_the_host_are_not_those_of_an_accelerator(tmp_path: Path) -> None:
    times, gpu = Fixed(1e-2), DeviceFacts(host_addressable=False, nbytes=1 << 30, bandwidth=1e11)
    assert simulated(tmp_path, times, device=gpu).seconds == simulated(tmp_path, None, device=gpu).seconds
    assert not times.functions


def test_every_operation_and_kernel_of_a_gpt2_can_be_measured(tmp_path: Path) -> None:
    times = MeasuredTimes()
    found = simulated(tmp_path, times)
    assert None not in times._known.values()
    again = simulated(tmp_path, times)
    assert again.seconds == found.seconds
