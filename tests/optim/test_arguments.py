"""Invalid arguments raise an error with the fix, and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infinity.native import _adam
from support.adam_arrays import PLAIN

SINGLE = ("param", "master", "grad")
HYPER = PLAIN | {"step": 1}


def arguments(problem: Any) -> dict[str, Any]:
    return problem.arguments() | HYPER  # type: ignore[no-any-return]


BAD = [
    ({"n": -1}, r"n is -1: pass the number of elements"),
    ({"n": 2**62}, r"no address space"),
    ({"n": 2**70}, r"pass the number of elements"),
    ({"rule": "rmsprop"}, r"rule is 'rmsprop': pass 'adam', 'adamw', 'adagrad', 'lion', 'sgd' or 'ademamix'"),
    ({"format": "fp16"}, r"format is 'fp16': pass 'fp32', 'remainder', 'master' or 'master_fp16'"),
    ({"format": ""}, r"format is ''"),
    ({"grad_dtype": "fp8"}, r"grad_dtype is 'fp8': pass 'fp32', 'bf16' or 'fp16'"),
    ({"moment_format": "4bit"}, r"moment_format is '4bit': pass 'fp32', 'bf16' or '8bit'"),
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
    ({"momentum": -0.1, "rule": "sgd"}, r"momentum is -0\.1"),
    ({"dampening": math.nan, "rule": "sgd"}, r"dampening is -?nan"),
    ({"lr_decay": -1.0, "rule": "adagrad"}, r"lr_decay is -1"),
    ({"beta3": 1.0, "rule": "ademamix"}, r"beta3 is 1\.0+: pass a number in \[0, 1\)"),
    ({"t_beta3": -1, "rule": "ademamix"}, r"t_beta3 is -1"),
    ({"first": 100}, r"first is 100: arrays start at a block, so pass a multiple of 256"),
    ({"threads": -1}, r"threads is -1: pass 1 to 1024, or 0"),
    ({"threads": 100_000}, r"threads is 100000"),
    *(({name: 0}, rf"{name} is a null address") for name in SINGLE),
    *(({name: -8}, rf"{name} is -8: pass the address of an array") for name in SINGLE),
    *(({name: 2**80}, rf"{name} is {2**80}: pass the address") for name in SINGLE),
    *(({name: 2**63 - 4}, rf"{name} at 0x7f.* ends beyond the address space") for name in SINGLE),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda x: str(x)[:40])
def test_update_refuses(make: Callable[..., Any], change: dict[str, Any], message: str) -> None:
    problem = make("remainder", "fp32", 100)
    before = problem.copy()
    with pytest.raises(ValueError, match=message):
        _adam.update(**(arguments(problem) | change))
    problem.assert_same(before)


@pytest.mark.parametrize("name", ["moments", "scales"])
@pytest.mark.parametrize("k", [0, 1])
def test_update_refuses_moments_and_scales(make: Callable[..., Any], name: str, k: int) -> None:
    problem = make("remainder", "fp32", 300, moments="8bit")
    before = problem.copy()
    given = arguments(problem)

    def refuses(addresses: list[Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            _adam.update(**(given | {name: addresses}))
        problem.assert_same(before)

    addresses = given[name]
    refuses([*addresses[:k], 0, *addresses[k + 1 :]], rf"{name}\[{k}\] is a null address")
    refuses([*addresses[:k], given["param"] + 2, *addresses[k + 1 :]], rf"{name}\[{k}\] overlaps param")
    refuses(addresses[:k], rf"takes 2 moments and 2 scales, not {k if name == 'moments' else 2} and")
    refuses([*addresses, addresses[0]], "takes 2 moments and 2 scales, not")


def test_moments_without_scales_and_rules_with_one(make: Callable[..., Any]) -> None:
    given = arguments(make("remainder", "fp32", 300, moments="bf16"))
    with pytest.raises(ValueError, match="moments of bf16 takes 2 moments and 0 scales, not 2 and 1"):
        _adam.update(**(given | {"scales": given["moments"][:1]}))
    with pytest.raises(ValueError, match="lion with moments of bf16 takes 1 moments and 0 scales, not 2 and 0"):
        _adam.update(**(given | {"rule": "lion"}))


@pytest.mark.parametrize(("name", "by"), [("param", 1), ("master", 1), ("grad", 2)])
def test_update_refuses_misaligned(make: Callable[..., Any], name: str, by: int) -> None:
    given = arguments(make("remainder", "fp32", 100))
    given[name] += by
    with pytest.raises(ValueError, match=rf"{name} at 0x[0-9a-f]+ is not aligned to its \d-byte elements"):
        _adam.update(**given)


@pytest.mark.parametrize(("kind", "by"), [("fp32", 2), ("bf16", 1)])
def test_update_refuses_misaligned_moments(make: Callable[..., Any], kind: str, by: int) -> None:
    given = arguments(make("remainder", "fp32", 100, moments=kind))
    given["moments"][1] += by
    with pytest.raises(ValueError, match=r"moments\[1\] at 0x[0-9a-f]+ is not aligned"):
        _adam.update(**given)


def test_update_refuses_overlap(make: Callable[..., Any]) -> None:
    given = arguments(make("remainder", "fp32", 200)) | {"n": 100}  # the rest keeps what is in memory next to it away
    given["moments"][1] = given["moments"][0] + 4 * 99
    with pytest.raises(ValueError, match=r"moments\[1\] overlaps moments\[0\]: pass arrays that share no memory"):
        _adam.update(**given)


@pytest.mark.parametrize(
    "change",
    [{"n": 1.5}, {"step": "1"}, {"param": None}, {"lr": "x"}, {"format": 3}, {"moments": 5}, {"key": -1}, {"key": 0.5}],
    ids=str,
)
def test_update_refuses_other_types(make: Callable[..., Any], change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        _adam.update(**(arguments(make("remainder", "fp32", 100)) | change))


def test_isa_of_another_machine_is_refused() -> None:
    for isa in {"avx512", "avx2", "plain"} - set(_adam.available_isas()):
        with pytest.raises(ValueError, match="not available on this machine"):
            _adam.sum_of_squares(0, 0, "fp32", isa=isa)


def test_integers_of_numpy_are_integers(make: Callable[..., Any]) -> None:
    problem = make("remainder", "fp32", 100)
    numbers = {"n": np.int64(100), "step": np.int32(1), "param": np.uint64(problem.arrays["param"].ctypes.data)}
    _adam.update(**(arguments(problem) | numbers))


def test_nothing_to_do(make: Callable[..., Any], moments: str) -> None:
    """n == 0 is a no-op, also at null addresses (an empty tensor's); other arguments are still checked."""
    given = arguments(make("remainder", "fp32", 1, moments=moments)) | dict.fromkeys(SINGLE, 0) | {"n": 0}
    given |= {"moments": [0, 0], "scales": [0, 0] if moments == "8bit" else []}
    _adam.update(**given)
    assert _adam.sum_of_squares(0, 0, "fp32") == 0.0
    assert _adam.sum_of_squares(0, 0, "bf16", initial=2.5) == 2.5
    _adam.split(0, 0, 0, 0)
    _adam.join(0, 0, 0, 0)
    with pytest.raises(ValueError, match="step is 0"):
        _adam.update(**(given | {"step": 0}))


def test_fp32_ignores_the_master(make: Callable[..., Any]) -> None:
    given = arguments(make("fp32", "fp32", 100))
    _adam.update(**(given | {"master": given["param"] + 1}))


def test_the_other_functions_refuse() -> None:
    x = np.ones(100, np.float32)
    for stream in [(0, 8, False), (2, 8, True), ((1 << 63) - 8, 16, True), (8, (1 << 64) - 8, False)]:
        with pytest.raises(ValueError, match="a stream"):
            _adam.bare([stream])
    high, low = np.zeros(100, np.uint16), np.zeros(100, np.int16)
    with pytest.raises(ValueError, match="dtype is 'fp8'"):
        _adam.sum_of_squares(x.ctypes.data, 100, "fp8")  # type: ignore[arg-type]
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


def test_constants_of_the_rule_are_needed_and_others_known(make: Callable[..., Any]) -> None:
    given = arguments(make("remainder", "fp32", 100))
    with pytest.raises(TypeError, match="adamw needs beta2: pass it"):
        _adam.update(**{name: value for name, value in given.items() if name != "beta2"})
    with pytest.raises(TypeError, match="betta is no argument"):
        _adam.update(**given, betta=0.9)
    with pytest.raises(TypeError, match="betta is no argument"):
        _adam.Group("lion", lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, betta=0.9)
