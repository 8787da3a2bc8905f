"""An update split into tiles is bit-identical to a single one, since rounding follows the number of an element."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infinity.plan.formats import BLOCK


def in_tiles(whole: Any, cuts: list[int], first: int, isa: str, order: int) -> Any:
    """Return the arrays after each [begin, end) was updated separately, in memory of its own."""
    result = whole.copy()
    for begin, end in list(itertools.pairwise(cuts))[::order]:
        tile = whole.copy((1, 0, 3, 0, 1, 5, 2, 0, 1), n=end, begin=begin).call(isa, first=first + begin)
        for name, array in tile.arrays.items():
            if array is not None:
                per = BLOCK if name.startswith("scale") else 1
                result.arrays[name][begin // per : begin // per + array.size] = array
    return result


@pytest.mark.parametrize("first", [0, 256, 2**32 - 1024, 2**32, 2**40 - 512])
def test_cut_at_multiples_of_a_block(make: Callable[..., Any], rule: str, moments: str, isa: str, first: int) -> None:
    n = 3333
    whole = make("remainder", "bf16", n, rule=rule, moments=moments, seed=1, hostile=True)
    expected = whole.copy().call("plain", first=first)
    for cuts in ([0, 256, 1024, n], [0, 512, 768, 3328, n], [*range(0, n, 256), n]):
        in_tiles(whole, cuts, first, isa, order=-1).assert_same(expected)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_keys_and_places_decide_the_rounding(make: Callable[..., Any], moments: str) -> None:
    whole = make("fp32", "fp32", 4096, moments=moments, seed=2)
    once = whole.copy().call(key=1, first=0)
    whole.copy().call(key=1, first=0).assert_same(once)
    for other in ({"key": 2, "first": 0}, {"key": 1, "first": 256}, {"key": 1, "first": 2**32}):
        again = whole.copy().call(**other)
        assert np.array_equal(again.arrays["param"], once.arrays["param"])
        for name in ("moment0", "moment1"):
            share = (again.arrays[name] != once.arrays[name]).mean()
            assert 0.15 < share < 0.6, (other, name)


def test_fp32_moments_take_no_notice_of_keys(make: Callable[..., Any], format: str) -> None:
    whole = make(format, "fp32", 1000, seed=3, hostile=True)
    whole.copy().call(key=1, first=0).assert_same(whole.copy().call(key=2, first=512))


def test_threads(make: Callable[..., Any], format: str, moments: str, isa: str) -> None:
    whole = make(format, "bf16", 200_003, moments=moments, seed=4, hostile=True)
    first = 2**32 - 256 * 400  # the numbers cross 2^32 within a tile
    expected = whole.copy().call("plain", threads=1, first=first)
    for threads in (2, 3, 7):
        whole.copy().call(isa, threads=threads, first=first).assert_same(expected)
