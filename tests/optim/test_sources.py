"""An update that starts from other arrays has the bits of one in place, and leaves these arrays alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from infinity.native import _adam
from infinity.optim.cpu_adam import FORMATS, update_arguments, update_flat
from infinity.plan.formats import BLOCK
from infinity.rules import RULES, Hyper, MomentFormat, RuleName

FORMATS_OF_PARAMS = {
    "fp32": (torch.float32, None),
    "remainder": (torch.bfloat16, torch.int16),
    "master": (torch.bfloat16, torch.float32),
    "master_fp16": (torch.float16, torch.float32),
}
SIZES = (1, 255, 256, 257, 2047, 2048, 2049, 4097, 32768, 65535, 65537, 100_003)
CPU = torch.device("cpu")


class Arrays:
    """Values of n elements. shift: elements by which arrays are off their alignment of 64 bytes."""

    def __init__(self, format: str, rule: RuleName, moments: MomentFormat, n: int, shift: int = 0) -> None:
        generator = torch.Generator().manual_seed(n)
        param, master = FORMATS_OF_PARAMS[format]
        self.shift, count = shift, len(RULES[rule].moments)
        self.param = self._new(n, param)
        self.param.copy_(torch.randn(n, generator=generator))
        self.master = None
        if master is not None:
            self.master = self._new(n, master)
            integers = torch.randint(-30000, 30000, (n,), generator=generator)
            self.master.copy_(integers if master is torch.int16 else integers / 1e4)
        self.moments = [self._new(n, FORMATS[moments]) for _ in range(count)]
        self.scales = [self._new(-(-n // BLOCK), torch.uint8) for _ in range(count)] if moments == "8bit" else []
        for moment in (*self.moments, *self.scales):
            moment.copy_(torch.randint(1, 100, moment.shape, generator=generator))

    def _new(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(n + self.shift, dtype=dtype)[self.shift :]

    @property
    def all(self) -> tuple[Any, ...]:
        return self.param, self.master, self.moments, self.scales

    def tensors(self) -> list[torch.Tensor]:
        return [each for each in (self.param, self.master, *self.moments, *self.scales) if each is not None]


def bytes_of(arrays: Arrays) -> list[bytes]:
    return [each.contiguous().view(torch.uint8).numpy().tobytes() for each in arrays.tensors()]


def check(format: str, rule: RuleName, moments: MomentFormat, n: int, *, isa: str, threads: int, shift: int) -> None:
    hyper = Hyper(rule, lr=1e-2, weight_decay=0.1)
    grad = torch.randn(n, generator=torch.Generator().manual_seed(1))
    more: dict[str, Any] = {"step": 3, "key": 11, "first": 512, "threads": threads, "isa": isa, "grad_scale": 0.5}
    before, in_place, target = (Arrays(format, rule, moments, n, shift=each) for each in (0, 0, shift))
    kept = bytes_of(before)
    _adam.update(**update_arguments(CPU, *in_place.all[:2], grad, *in_place.all[2:], hyper), **more)
    for tensor in target.tensors():
        tensor.view(torch.uint8).fill_(0xAB)
    sources = [before.param.data_ptr(), 0 if before.master is None else before.master.data_ptr()]
    sources += [each.data_ptr() for each in (*before.moments, *before.scales)]
    arguments = update_arguments(CPU, *target.all[:2], grad, *target.all[2:], hyper)
    _adam.update(**arguments, **more, sources=sources)
    assert bytes_of(target) == bytes_of(in_place)
    assert bytes_of(before) == kept


@pytest.mark.parametrize("isa", _adam.available_isas())
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("format", FORMATS_OF_PARAMS)
def test_every_format(format: str, moments: MomentFormat, isa: str) -> None:
    for number, rule in enumerate(RULES):
        for n in SIZES:
            check(format, rule, moments, n, isa=isa, threads=1 + number % 2, shift=number % 3)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 200_000),
    format=st.sampled_from(sorted(FORMATS_OF_PARAMS)),
    moments=st.sampled_from(sorted(FORMATS)),
    shift=st.integers(0, 64),
    threads=st.integers(1, 4),
)
def test_any_size_and_alignment(n: int, format: str, moments: MomentFormat, shift: int, threads: int) -> None:
    check(format, "adamw", moments, n, isa="auto", threads=threads, shift=shift)


def test_sources_may_be_the_arrays_themselves() -> None:
    """A unit may have one copy of some states, such as parameters in a buffer."""
    n, hyper, grad = 5000, Hyper("adamw", lr=1e-2), torch.ones(5000)
    one, other = (Arrays("remainder", "adamw", "8bit", n) for _ in range(2))
    update_flat(*one.all[:2], grad, *one.all[2:], hyper, 1)
    update_flat(*other.all[:2], grad, *other.all[2:], hyper, 1, sources=other.all)  # type: ignore[arg-type]
    assert bytes_of(one) == bytes_of(other)


@pytest.mark.parametrize("shared", ["parameters", "moments"])
@pytest.mark.parametrize("format", FORMATS_OF_PARAMS)
@pytest.mark.parametrize("moments", FORMATS)
def test_some_sources_may_be_the_arrays_themselves(format: str, moments: MomentFormat, shared: str) -> None:
    """A tier may have no second slots of parameters, or of optimizer states."""
    n, hyper = 70_001, Hyper("adamw", lr=1e-2)
    grad = torch.randn(n, generator=torch.Generator().manual_seed(1))
    before, in_place, target = (Arrays(format, "adamw", moments, n) for _ in range(3))
    update_flat(*in_place.all[:2], grad, *in_place.all[2:], hyper, 1)
    for tensor in (target.param, target.master) if shared == "moments" else (*target.moments, *target.scales):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xAB)
    sources = (*before.all[:2], *target.all[2:]) if shared == "moments" else (*target.all[:2], *before.all[2:])
    update_flat(*target.all[:2], grad, *target.all[2:], hyper, 1, sources=sources)  # type: ignore[arg-type]
    assert bytes_of(target) == bytes_of(in_place)


def test_sources_of_other_shapes_or_dtypes_are_refused() -> None:
    n, hyper, grad = 512, Hyper("adamw", lr=1e-2), torch.ones(512)
    target = Arrays("remainder", "adamw", "fp32", n)
    for other in (Arrays("remainder", "adamw", "8bit", n), Arrays("master", "adamw", "fp32", n)):
        with pytest.raises(ValueError, match="sources differ"):
            update_flat(*target.all[:2], grad, *target.all[2:], hyper, 1, sources=other.all)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sources has 1 addresses: pass 4, of param, master, moments and scales"):
        arguments = update_arguments(CPU, *target.all[:2], grad, *target.all[2:], hyper)
        _adam.update(**arguments, step=1, sources=[0])
