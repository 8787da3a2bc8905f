"""Cases for the native kernels, as fixtures; support/adam_arrays.py builds their arrays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infinity.native import _adam
from infinity.rules import RULES
from support.adam_arrays import Problem, make_problem


@pytest.fixture(scope="session")
def make() -> Callable[..., Problem]:
    """make(format, grad_dtype, n, rule="adamw", moments="fp32", seed=0, hostile=False) -> Problem"""
    return make_problem


@pytest.fixture(params=["fp32", "remainder", "master", "master_fp16"])
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["fp32", "bf16", "fp16"])
def grad_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["fp32", "bf16", "8bit"])
def moments(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(RULES))
def rule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["avx512", "avx2", "plain"])
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in _adam.available_isas():
        pytest.skip(f"this machine or build lacks {request.param}")
    return str(request.param)
