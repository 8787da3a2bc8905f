"""Fingerprints of memory are equal for all instruction sets and change with any edit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from infinity.native import _adam
from infinity.tiers.digests import fingerprint_by_torch
from infinity.tiers.memory import host_tensor

MASK = (1 << 64) - 1
KEY = 0x9E3779B97F4A7C15


def words(count: int, seed: int = 0) -> torch.Tensor:
    """uint8 (8 * count,), page-aligned."""
    made = host_tensor(8 * count)
    generator = torch.Generator().manual_seed(seed)
    made.copy_(torch.randint(0, 256, (8 * count,), dtype=torch.uint8, generator=generator))
    return made


def fingerprint(memory: torch.Tensor, threads: int = 1, isa: str = "auto") -> int:
    return _adam.fingerprint(memory.data_ptr(), memory.numel(), threads, isa)


def by_definition(memory: torch.Tensor) -> int:
    total = 0
    for i, word in enumerate(memory.view(torch.int64).tolist()):
        w = word & MASK
        x = w ^ ((i + 1) * KEY & MASK)
        total += (x & 0xFFFFFFFF) * (x >> 32) + ((w << 32 | w >> 32) & MASK)
    return total & MASK


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 100, 4099])
def test_every_instruction_set_agrees_with_the_definition(count: int) -> None:
    memory = words(count)
    expected = by_definition(memory)
    assert {fingerprint(memory, isa=isa) for isa in _adam.available_isas()} == {expected}
    assert int(fingerprint_by_torch(memory)) & MASK == expected


def test_threads_and_pieces_change_nothing() -> None:
    memory = words((1 << 22) + 70_001)
    expected = fingerprint(memory, threads=1)
    assert fingerprint(memory, threads=2) == fingerprint(memory, threads=7) == expected
    assert int(fingerprint_by_torch(memory)) & MASK == expected


@settings(max_examples=200, deadline=None)
@given(
    count=st.one_of(st.integers(0, 1200), st.integers((1 << 19) - 40, (1 << 19) + 1200)),
    skewed=st.integers(0, 9),
    threads=st.integers(1, 3),
    isa=st.sampled_from(_adam.available_isas()),
)
def test_a_copy_takes_the_fingerprint_and_keeps_every_byte(count: int, skewed: int, threads: int, isa: str) -> None:
    """At any alignment, below and above the size from which it is written past the caches."""
    source = words(count, seed=count)
    room = torch.full((8 * (count + 32),), 0xA5, dtype=torch.uint8)
    target = room[8 * skewed : 8 * (skewed + count)]
    found = _adam.copy(source.data_ptr(), target.data_ptr(), 8 * count, threads, isa)
    assert found == fingerprint(source)
    assert torch.equal(target, source)
    assert room[: 8 * skewed].eq(0xA5).all() and room[8 * (skewed + count) :].eq(0xA5).all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_edit_of_floats_shows(data: st.DataObject) -> None:
    """Edits that keep sums or xors change the fingerprint: flipped signs and bits, swapped elements, permuted rows."""
    memory = words(64, seed=data.draw(st.integers(0, 1000)))
    before = fingerprint(memory)
    values = memory.view(torch.int32).view(16, 8)
    original = values.clone()
    kind = data.draw(st.sampled_from(["negate", "swap", "rows", "bit", "zero", "reverse"]))
    i, j = data.draw(st.integers(0, 15)), data.draw(st.integers(0, 15))
    if kind == "negate":
        values.bitwise_xor_(torch.tensor(-(1 << 31), dtype=torch.int32))
    elif kind == "swap":
        values[i, 0], values[j, 1] = original[j, 1], original[i, 0]
    elif kind == "rows":
        values.copy_(original.roll(data.draw(st.integers(0, 15)), 0))
    elif kind == "bit":
        values[i, j % 8] ^= 1 << data.draw(st.integers(0, 30))
    elif kind == "zero":
        values[i].zero_()
    else:
        values.copy_(original.flip(1))
    assert (fingerprint(memory) == before) == torch.equal(values, original)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 8), (4, 8), (64, 7), (64, -8)])
def test_impossible_arguments_are_refused(address: int, nbytes: int) -> None:
    with pytest.raises(ValueError):
        _adam.fingerprint(address, nbytes)
    with pytest.raises(ValueError):
        _adam.copy(1 << 20, address, nbytes)


def test_a_copy_onto_itself_is_refused() -> None:
    memory = words(64)
    with pytest.raises(ValueError, match="overlap"):
        _adam.copy(memory.data_ptr(), memory.data_ptr() + 64, 256)
