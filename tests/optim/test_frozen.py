"""Codes of frozen parameters: every kernel has the bits of the definition by torch, and decoding in place reads no byte
that it has written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from infinity.native import _adam
from infinity.optim.frozen import dequantise, frozen_values, quantise
from infinity.plan.frozen import CODED_DTYPES, GROUP, RECORD, FrozenCode, FrozenFormat
from infinity.tiers import frozen
from infinity.tiers.memory import host_tensor

FORMATS: list[FrozenFormat] = ["8bit", "nf4"]
DTYPES = list(CODED_DTYPES)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: CODED_DTYPES[dtype])
isas = pytest.mark.parametrize("isa", _adam.available_isas())


def values(records: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, down to subnormal ones, with groups of zeros and of the largest values."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(records * RECORD, generator=generator)
    found *= torch.rand(records * RECORD // GROUP, generator=generator).mul(-150).exp2().repeat_interleave(GROUP)
    found = found.to(dtype)
    found[: 2 * GROUP] = 0
    found[GROUP] = -0.0
    found[-GROUP:] = torch.linspace(-1, 1, GROUP).mul(torch.finfo(dtype).max).to(dtype)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.dtype])


def how(code: FrozenCode, isa: str, threads: int = 0) -> dict[str, Any]:
    return {"code": code.format, "dtype": CODED_DTYPES[code.dtype], "isa": isa, "threads": threads}


@formats
@dtypes
@isas
@pytest.mark.parametrize("records", [1, 2, 31, 200])
@pytest.mark.pairwise
def test_kernels_have_the_bits_of_the_definition(
    format: FrozenFormat, dtype: torch.dtype, isa: str, records: int
) -> None:
    """Into other memory and in place, with one thread and with several, under any floating-point environment."""
    code, weight = FrozenCode(format, dtype), values(records, dtype)
    n, expected = weight.numel(), frozen_values(weight, format)
    stored = host_tensor(code.nbytes(n))
    torch.set_flush_denormal(True)
    try:
        at = code.records_of(stored, n).data_ptr()
        assert _adam.encode_frozen(weight.data_ptr(), at, n, **how(code, isa)) == n
        for threads in (1, 3):
            apart = host_tensor(weight.nbytes)
            hashed = _adam.decode_frozen(at, apart.data_ptr(), n, **how(code, isa, threads))
            assert torch.equal(apart.view(BITS[dtype]), bits(expected))
            assert hashed == _adam.fingerprint(apart.data_ptr(), apart.numel())
            memory = host_tensor(weight.nbytes).fill_(0xFF)
            code.stored_in(memory).copy_(stored)
            within = code.records_of(code.stored_in(memory), n).data_ptr()
            assert _adam.decode_frozen(within, memory.data_ptr(), n, **how(code, isa, threads)) == hashed
            assert torch.equal(memory, apart)
    finally:
        torch.set_flush_denormal(False)


@formats
@dtypes
def test_torch_decodes_in_place(format: FrozenFormat, dtype: torch.dtype) -> None:
    code, weight = FrozenCode(format, dtype), values(600, dtype)
    stored, bad = frozen.encode(code, weight)
    memory = host_tensor(weight.nbytes)
    code.stored_in(memory).copy_(stored)
    frozen.decode_by_torch(code, memory)
    assert bad == weight.numel()
    assert torch.equal(memory.view(BITS[dtype]), bits(frozen_values(weight, format)))


@formats
@dtypes
@given(records=st.integers(1, 1 << 40))
def test_values_never_reach_a_record_that_was_not_read(format: FrozenFormat, dtype: torch.dtype, records: int) -> None:
    """In order, and in the ranges that kernels decode at once (`records_at_once` in csrc/adam/frozen.h)."""
    code = FrozenCode(format, dtype)
    record, decoded, n = code.record_nbytes, RECORD * dtype.itemsize, records * RECORD
    end = records * decoded
    assert code.records_nbytes(n) <= code.nbytes(n) <= end
    first = done = 0
    while done < records and first < 64:
        some = max(1, (records - done) * (decoded - record) // decoded)
        begins = end - (records - done) * record
        written = (done + some) * decoded
        assert written <= (begins if some > 1 else begins + record)
        done, first = done + some, first + 1
    assert done == records, "more launches than a kernel should take"


def scales_and_codes(format: FrozenFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every scale of 16 bits with every code: (scales, 1) and (1, codes)."""
    finite = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    scales = finite[finite.isfinite()]
    levels = 127 if format == "8bit" else 15
    return scales, torch.arange(-127 if format == "8bit" else 0, levels + 1, dtype=torch.int8)


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_value_of_16_bits_is_its_own_value(format: FrozenFormat, dtype: torch.dtype) -> None:
    """All scales and all codes: quantising dequantised values changes none of them."""
    scales, codes = scales_and_codes(format, dtype)
    for start in range(0, len(codes), GROUP - 1):
        # A group holds the code of its scale, as every encoded group does.
        group = torch.full((GROUP,), int(codes[-1]), dtype=torch.int8)
        some = codes[start : start + GROUP - 1]
        group[1 : 1 + len(some)] = some
        first = dequantise(group.expand(len(scales), GROUP), scales, (len(scales) * GROUP,), format)
        assert torch.equal(first.view(-1, GROUP)[:, 0], scales)
        assert torch.equal(frozen_values(first, format), first)


@formats
@given(data=st.data())
def test_a_second_rounding_changes_nothing(format: FrozenFormat, data: st.DataObject) -> None:
    """Arbitrary finite fp32 values, by the definition and by the kernels."""
    numbers = data.draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=80))
    weight = torch.tensor(numbers, dtype=torch.float32)
    once = frozen_values(weight, format)
    assert once.shape == weight.shape and once.isfinite().all()
    assert torch.equal(frozen_values(once, format), once)
    code = FrozenCode(format, torch.float32)
    padded = torch.nn.functional.pad(once, (0, RECORD - once.numel()))
    stored, _ = frozen.encode(code, padded)
    out = host_tensor(padded.nbytes)
    frozen.decode(code, stored, out)
    assert torch.equal(out.view(torch.float32), padded)


@formats
def test_errors_are_bounded(format: FrozenFormat) -> None:
    """Half a step of the group's largest value; and NF4's levels are those of QLoRA, 1 and 0 among them."""
    weight = torch.randn(64 * 100, generator=torch.Generator().manual_seed(3))
    step = 1 / 254 if format == "8bit" else 0.152  # half of the widest gap of levels
    error = (frozen_values(weight, format) - weight).abs().view(-1, GROUP)
    assert (error <= step * 1.001 * weight.view(-1, GROUP).abs().amax(1, keepdim=True)).all()
    assert set(quantise(torch.zeros(GROUP), format)[0].unique().tolist()) == {0 if format == "8bit" else 7}


def hostile(dtype: torch.dtype) -> Iterator[float]:
    yield from (float("inf"), float("-inf"), float("nan"))


@formats
@dtypes
@isas
@pytest.mark.pairwise
def test_the_first_value_that_is_not_finite_is_found(format: FrozenFormat, dtype: torch.dtype, isa: str) -> None:
    code = FrozenCode(format, dtype)
    for value, places in product(hostile(dtype), [(0,), (RECORD - 1,), (5 * RECORD + 77, 41 * RECORD), (90_000, 7)]):
        weight = values(60, dtype)
        weight[list(places)] = value
        stored = host_tensor(code.nbytes(weight.numel()))
        at = code.records_of(stored, weight.numel()).data_ptr()
        assert _adam.encode_frozen(weight.data_ptr(), at, weight.numel(), **how(code, isa)) == min(places)


def test_arguments_are_checked() -> None:
    weight, stored = torch.zeros(2 * RECORD), host_tensor(8192)
    given: dict[str, Any] = {"code": "8bit", "dtype": "fp32"}
    place = weight.data_ptr(), stored.data_ptr()
    for wrong, message in (
        ({"code": "4bit"}, "code is '4bit': pass '8bit' or 'nf4'"),
        ({"dtype": "fp64"}, "dtype is 'fp64'"),
        ({"isa": "neon"}, "isa 'neon' is not available"),
        ({"threads": -1}, "threads"),
    ):
        with pytest.raises(ValueError, match=message):
            _adam.encode_frozen(*place, RECORD, **(given | wrong))
        with pytest.raises(ValueError, match=message):
            _adam.decode_frozen(place[1], place[0], RECORD, **(given | wrong))
    with pytest.raises(ValueError, match="n is 100: pass a multiple of 2048"):
        _adam.encode_frozen(*place, 100, **given)
    with pytest.raises(ValueError, match="values overlaps records"):
        _adam.decode_frozen(weight.data_ptr() + 64, weight.data_ptr(), RECORD, **given)
    with pytest.raises(ValueError, match="values is a null address"):
        _adam.decode_frozen(place[1], 0, RECORD, **given)
    assert _adam.encode_frozen(0, 0, 0, **given) == 0
    with pytest.raises(ValueError, match="format is 'int3'"):
        quantise(weight, "int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight is torch\.float64"):
        quantise(weight.double(), "nf4")
    with pytest.raises(ValueError, match="not finite"):
        quantise(torch.tensor([1.0, float("nan")]), "nf4")


def test_the_kernels_groups_are_the_plans() -> None:
    assert (_adam.FROZEN_GROUP, _adam.FROZEN_RECORD) == (GROUP, RECORD)
    assert np.float32(127) * frozen.EIGHT_STEP.numpy() == 1
