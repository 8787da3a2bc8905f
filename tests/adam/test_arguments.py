"""Whatever is wrong with the arguments is an error that says what to do, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infinity import _adam

NAMES = ("param", "master", "grad", "exp_avg", "exp_avg_sq")
HYPER: dict[str, Any] = {
    "format": "remainder",
    "grad_dtype": "fp32",
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 1,
    "decoupled": True,
}


def arguments(problem: Any) -> dict[str, Any]:
    return {name: problem.arrays[name].ctypes.data for name in NAMES} | {"n": problem.n} | HYPER


BAD = [
    ({"n": -1}, r"n is -1: pass the number of elements"),
    ({"n": 2**62}, r"no address space"),
    ({"n": 2**70}, r"pass the number of elements"),
    ({"format": "fp16"}, r"format is 'fp16': pass 'fp32', 'remainder' or 'master'"),
    ({"format": ""}, r"format is ''"),
    ({"grad_dtype": "fp16"}, r"grad_dtype is 'fp16': pass 'fp32' or 'bf16'"),
    ({"isa": "sse9"}, r"isa 'sse9' is not available on this machine: pass one of 'auto', .*'plain'"),
    ({"step": 0}, r"step is 0: .*counting from 1"),
    ({"step": -3}, r"step is -3: .*counting from 1"),
    ({"beta1": 1.0}, r"beta1 is 1\.0+: pass a number in \[0, 1\)"),
    ({"beta1": -0.1}, r"beta1"),
    ({"beta2": 1.5}, r"beta2"),
    ({"beta2": math.nan}, r"beta2 is -?nan"),
    ({"eps": -1e-8}, r"eps is -.*: pass 0 or more"),
    ({"eps": math.inf}, r"eps is inf: pass a finite number"),
    ({"lr": math.nan}, r"lr is -?nan: pass a finite number"),
    ({"lr": -1.0}, r"lr is -1"),
    ({"lr": 1e39}, r"lr is .*fp32's range"),
    ({"lr": 1e30, "weight_decay": 1e30}, r"lr \* weight_decay"),
    ({"weight_decay": -0.1}, r"weight_decay is -0\.1"),
    ({"grad_scale": math.inf}, r"grad_scale is inf"),
    ({"grad_scale": 1e300}, r"grad_scale"),
    ({"threads": -1}, r"threads is -1: pass 1 to 1024, or 0"),
    ({"threads": 100_000}, r"threads is 100000"),
    *(({name: 0}, rf"{name} is a null address") for name in NAMES),
    *(({name: -8}, rf"{name} is -8: pass the address of an array") for name in NAMES),
    *(({name: 2**80}, rf"{name} is {2**80}: pass the address") for name in NAMES),
    *(({name: 2**63 - 4}, rf"{name} at 0x7f.* ends beyond the address space") for name in NAMES),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda x: str(x)[:40])
def test_adam_refuses(make: Callable[..., Any], change: dict[str, Any], message: str) -> None:
    problem = make("remainder", "fp32", 100)
    before = problem.copy()
    with pytest.raises(ValueError, match=message):
        _adam.adam(**(arguments(problem) | change))
    problem.assert_same(before)


@pytest.mark.parametrize(("name", "by"), [("param", 1), ("master", 1), ("grad", 2), ("exp_avg", 2), ("exp_avg_sq", 1)])
def test_adam_refuses_misaligned(make: Callable[..., Any], name: str, by: int) -> None:
    given = arguments(make("remainder", "fp32", 100))
    given[name] += by
    with pytest.raises(ValueError, match=rf"{name} at 0x[0-9a-f]+ is not aligned to its \d-byte elements"):
        _adam.adam(**given)


def test_adam_refuses_overlap(make: Callable[..., Any]) -> None:
    given = arguments(make("remainder", "fp32", 200)) | {"n": 100}  # the rest keeps what is in memory next to it away
    given["exp_avg_sq"] = given["exp_avg"] + 4 * 99
    with pytest.raises(ValueError, match="exp_avg_sq overlaps exp_avg: pass arrays that share no memory"):
        _adam.adam(**given)


@pytest.mark.parametrize("change", [{"n": 1.5}, {"step": "1"}, {"param": None}, {"lr": "x"}, {"format": 3}], ids=str)
def test_adam_refuses_other_types(make: Callable[..., Any], change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        _adam.adam(**(arguments(make("remainder", "fp32", 100)) | change))


def test_isa_of_another_machine_is_refused() -> None:
    for isa in {"avx512", "avx2", "plain"} - set(_adam.available_isas()):
        with pytest.raises(ValueError, match="not available on this machine"):
            _adam.sum_of_squares(0, 0, "fp32", isa=isa)


def test_integers_of_numpy_are_integers(make: Callable[..., Any]) -> None:
    problem = make("remainder", "fp32", 100)
    _adam.adam(
        **(
            arguments(problem)
            | {"n": np.int64(100), "step": np.int32(1), "param": np.uint64(problem.arrays["param"].ctypes.data)}
        )
    )


def test_nothing_to_do() -> None:
    """n == 0 is a no-op, also at null addresses (an empty tensor's); other arguments are still checked."""
    nothing: dict[str, Any] = dict.fromkeys(NAMES, 0) | {"n": 0}
    _adam.adam(**(HYPER | nothing))
    assert _adam.sum_of_squares(0, 0, "fp32") == 0.0
    assert _adam.sum_of_squares(0, 0, "bf16", initial=2.5) == 2.5
    _adam.split(0, 0, 0, 0)
    _adam.join(0, 0, 0, 0)
    with pytest.raises(ValueError, match="step is 0"):
        _adam.adam(**(HYPER | nothing | {"step": 0}))


def test_fp32_ignores_the_master(make: Callable[..., Any]) -> None:
    problem = make("fp32", "fp32", 100)
    given = {name: array.ctypes.data for name, array in problem.arrays.items() if array is not None}
    _adam.adam(**(HYPER | given | {"format": "fp32", "n": 100, "master": given["param"] + 1}))


def test_the_other_functions_refuse() -> None:
    x = np.ones(100, np.float32)
    high, low = np.zeros(100, np.uint16), np.zeros(100, np.int16)
    with pytest.raises(ValueError, match="dtype is 'fp16'"):
        _adam.sum_of_squares(x.ctypes.data, 100, "fp16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="address is a null address"):
        _adam.sum_of_squares(0, 100, "fp32")
    with pytest.raises(ValueError, match="not aligned"):
        _adam.sum_of_squares(x.ctypes.data + 2, 10, "fp32")
    with pytest.raises(ValueError, match="scale is nan"):
        _adam.sum_of_squares(x.ctypes.data, 100, "fp32", scale=math.nan)
    with pytest.raises(ValueError, match="remainder overlaps param"):
        _adam.split(x.ctypes.data, high.ctypes.data, high.ctypes.data, 100)
    with pytest.raises(ValueError, match="n is -1"):
        _adam.split(x.ctypes.data, high.ctypes.data, low.ctypes.data, -1)
    with pytest.raises(ValueError, match="remainder is a null address"):
        _adam.join(high.ctypes.data, 0, x.ctypes.data, 100)
    with pytest.raises(ValueError, match="threads is -2"):
        _adam.join(high.ctypes.data, low.ctypes.data, x.ctypes.data, 100, threads=-2)
