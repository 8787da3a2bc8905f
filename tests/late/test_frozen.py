"""A frozen base in a code on the late device: copies of codes and decoding in place, in every order of execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.plan.frozen import CODED_DTYPES, RECORD, FrozenCode, FrozenFormat
from infinity.tiers import frozen
from late.device import LateAccelerator
from support.configs import engine_config
from support.loops import Result, assert_same, open_engine, parameters_of, train
from support.models import adapted, seeded, token_batches

BATCHES = token_batches(4)
REFERENCES: dict[tuple[Any, ...], Result] = {}


def on_the_cpu(format: FrozenFormat, *, bf16: bool) -> Result:
    """The result where the host computes, which tests/parity/test_frozen.py compares with the rounded model's."""
    key = format, bf16
    if key not in REFERENCES:
        config = engine_config("cpu", "cpu", frozen=format, bf16=bf16)
        with open_engine(seeded(adapted), config) as engine:
            REFERENCES[key] = Result(train(engine, BATCHES), parameters_of(engine))
    return REFERENCES[key]


@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
@pytest.mark.parametrize(("format", "bf16"), [("8bit", False), ("nf4", True)])
def test_trains_as_on_the_cpu(order: None, format: FrozenFormat, bf16: bool, param: str) -> None:
    device = LateAccelerator(0)
    config = engine_config(param, "cpu", frozen=format, bf16=bf16, prefetch_bytes=20_000)
    batches = [tuple(tensor.to(device.torch_device) for tensor in batch) for batch in BATCHES]
    with open_engine(seeded(adapted), config, device) as engine:
        losses = train(engine, batches)
        found = Result(losses, {name: value.cpu() for name, value in parameters_of(engine).items()})
    assert_same(found, on_the_cpu(format, bf16=bf16))


@pytest.mark.parametrize("dtype", CODED_DTYPES, ids=CODED_DTYPES.get)
@pytest.mark.parametrize("format", ["8bit", "nf4"])
def test_torch_decodes_in_place_on_the_device(lazy: None, format: FrozenFormat, dtype: torch.dtype) -> None:
    code = FrozenCode(format, dtype)
    weight = torch.randn(300 * RECORD, generator=torch.Generator().manual_seed(2)).to(dtype)
    stored, _ = frozen.encode(code, weight)
    expected = torch.empty(weight.nbytes, dtype=torch.uint8)
    frozen.decode(code, stored, expected)
    memory = torch.empty(weight.nbytes, dtype=torch.uint8)
    code.stored_in(memory).copy_(stored)
    on_device = memory.to("late:0")
    frozen.decode_by_torch(code, on_device)
    assert torch.equal(on_device.cpu(), expected)
