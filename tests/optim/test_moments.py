"""Moments of 16 and 8 bits: stored codes follow the description, are within one step, and unbiased."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from infinity.native import _adam
from infinity.optim.moments import _chance, _random_bits, moment_from_fp32, moment_to_fp32, zero_moments
from infinity.plan.formats import BLOCK
from infinity.rules import RULES
from support.adam_arrays import PLAIN

Array = npt.NDArray[Any]
KEYS = [0, 1, 12345, 0xFFFFFFFFFFFFFFFF]


def store(values: Array, kind: Any, *, root: bool = False, key: int = 0, isa: str = "auto") -> tuple[Array, Array]:
    """Return (codes or bf16 patterns, scales) that the kernel stores for fp32 values; for |values| if root."""
    n = values.size
    param = np.zeros(n, np.float32)
    moment = np.zeros(n, np.uint8 if kind == "8bit" else np.uint16)
    scale = np.zeros(-(-n // BLOCK), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    # Without momentum SGD's moment is the gradient; from zero, the root of Adagrad's sum is the gradient's size.
    one_step("adagrad" if root else "sgd", param, values, moment, scale, kind, key=key, lr=0.0, isa=isa)
    return moment, scale


def one_step(
    rule: Any, param: Array, grad: Array, moment: Array, scale: Array, kind: Any, lr: float = 1.0, **options: Any
) -> None:
    given = PLAIN | {"step": 2, "lr": lr} | options
    _adam.update(
        rule,
        param=param.ctypes.data,
        master=0,
        grad=grad.ctypes.data,
        moments=[moment.ctypes.data],
        scales=[scale.ctypes.data] if kind == "8bit" else [],
        n=param.size,
        format="fp32",
        grad_dtype="fp32",
        moment_format=kind,
        **given,
    )


def grid(scale: int, root: bool) -> npt.NDArray[np.float64]:
    """Return the magnitudes of all codes in order, of roots if `root`, from the description in fp64."""
    bits = 4 if root else 3
    code = np.arange(256 if root else 128)
    return np.asarray(((1 + (code & (2**bits - 1)) / 2**bits) * 2.0 ** (code >> bits) - 1) * 2.0 ** (scale - 141))


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
@pytest.mark.parametrize("hostile", [False, True])
def test_an_update_is_that_of_fp32_on_what_is_stored(
    make: Callable[..., Any], format: str, rule: str, moments: str, hostile: bool, isa: str
) -> None:
    """Decoding, an fp32 update and encoding in numpy give the same parameters and moments, also across 2^32."""
    for n, first in ((1, 0), (300, 256), (5000, 2**32 - 1024), (1000, 2**63)):
        whole = make(format, "bf16", n, rule=rule, moments=moments, seed=n, hostile=hostile)
        expected = whole.with_fp32_moments().call("plain").with_moments_as(moments, key=99, first=first)
        whole.copy().call(isa, key=99, first=first).assert_same(expected, n)


def test_random_bits_are_even_and_differ() -> None:
    n = 1 << 16
    rows = [_random_bits(key, first, n) for key in (0, 1, 2, 2**40) for first in (0, n, 2**32, 2**33 + n)]
    for x in rows:
        ones = np.unpackbits(x.view(np.uint8)).reshape(n, 32).mean(axis=0)
        assert (np.abs(ones - 0.5) < 0.012).all()  # six standard deviations
    for i, x in enumerate(rows):
        for y in rows[i + 1 :]:
            assert abs(np.corrcoef(x, y)[0, 1]) < 0.025
    # what decides for one moment says nothing of what decides for another
    for cut in (16, 19, 20):
        draws = [_chance(rows[0], moment, cut) for moment in range(3)]
        for a, b in itertools.combinations(draws, 2):
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.025
            halves = 2 * (a >> (cut - 1)) + (b >> (cut - 1))
            assert (np.abs(np.bincount(halves) / n - 0.25) < 0.012).all()


def test_neighbours_and_steps_draw_independently() -> None:
    """Errors of neighbours, of the moments and of successive steps are uncorrelated."""
    n, lags = 1 << 16, 600
    for key in range(4):
        x = _random_bits(key, 0, n)
        parts = [_chance(x, moment, cut).astype(float) for moment, cut in ((0, 20), (1, 19), (2, 19))]
        draws = [(part - part.mean()) / part.std() for part in parts]
        for a in draws:
            spread = np.square(a.reshape(-1, BLOCK).sum(axis=1)).mean() / BLOCK  # of the blocks' sums
            assert abs(spread - 1) < 6 * np.sqrt(2 * BLOCK / n)
            for b in draws:
                assert max(abs((a[lag:] * b[: n - lag]).mean()) for lag in range(1, lags)) < 8 / np.sqrt(n)
    steps = np.stack([_random_bits(key, 0, BLOCK) for key in range(4000)]).astype(float)
    steps = (steps - 2.0**31) / (2.0**32 / np.sqrt(12))
    assert np.abs(steps.mean(axis=0)).max() < 5 / np.sqrt(4000)
    assert np.abs((steps[1:] * steps[:-1]).mean(axis=0)).max() < 5 / np.sqrt(4000)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (16, 40)])
def test_conversions_keep_shapes(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).square()
    for kind, root in (("fp32", False), ("bf16", False), ("8bit", False), ("8bit", True)):
        moment, scale = moment_from_fp32(values, kind, root=root)  # type: ignore[arg-type]
        back = moment_to_fp32(moment, scale, root=root)
        assert moment.shape == back.shape == values.shape and back.dtype == torch.float32
        assert (scale is None) == (kind != "8bit")
        torch.testing.assert_close(back, values, rtol=0.3, atol=1e-3)
    assert moment_to_fp32(values) is not values and torch.equal(moment_to_fp32(values), values)
    with pytest.raises(ValueError, match=r"values are torch\.float64"):
        moment_from_fp32(values.double(), "bf16")
    with pytest.raises(ValueError, match="scale does not fit"):
        moment_to_fp32(torch.zeros(257, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))


def test_zero_moments() -> None:
    for rule, count in ((name, len(row.moments)) for name, row in RULES.items()):
        assert [len(x) for x in zero_moments(rule, 300, "8bit")] == [count, count]
        moments, scales = zero_moments(rule, 300, "bf16")
        assert len(moments) == count and not scales and moments[0].dtype == torch.bfloat16
    assert zero_moments("sgd", 257, "8bit")[1][0].shape == (2,)


# -- bf16 --------------------------------------------------------------------------------------------------------------


def test_bf16_values_stay(isa: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32)
    values = (patterns << 16).view(np.float32)
    keep = ~np.isnan(values) & (patterns != 0x8000)  # SGD's sum turns -0 into 0
    for key in KEYS:
        stored = store(values, "bf16", key=key, isa=isa)[0]
        assert np.array_equal(stored[keep], patterns[keep].astype(np.uint16))
        assert (stored[np.isnan(values)] == 0x7FC0).all()


def test_bf16_takes_a_neighbour_and_is_right_in_the_mean(isa: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits = bits[(bits & 0x7F800000) != 0x7F800000]
    stored = store(bits.view(np.float32), "bf16", key=5, isa=isa)[0].astype(np.uint32)
    up = stored - (bits >> 16)
    assert (up <= 1).all() and 0.45 < up.mean() < 0.55
    n = 1 << 16
    for low in (0x0001, 0x1000, 0x8000, 0xF000, 0xFFFF):
        wanted = low / 65536
        counts = store(np.full(n, np.uint32(0xBF800000 | low)).view(np.float32), "bf16", key=low, isa=isa)[0]
        assert abs((counts == 0xBF81).mean() - wanted) <= 6 * np.sqrt(wanted * (1 - wanted) / n)


# -- 8 bits ------------------------------------------------------------------------------------------------------------


def test_every_code_at_every_scale_has_its_value() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for scale in range(16, 255):
        scales = np.array([scale], np.uint8)
        param = np.zeros(256, np.float32)
        one_step("sgd", param, param.copy(), codes.copy(), scales.copy(), "8bit", momentum=1.0)  # param = -moment
        sizes = grid(scale, root=False)
        with np.errstate(over="ignore"):
            expected = np.concatenate([sizes, -sizes]).astype(np.float32)
            assert np.array_equal(-param, expected), scale
        decoded = moment_to_fp32(torch.from_numpy(codes), torch.from_numpy(scales)).numpy()
        assert np.array_equal(decoded, expected), scale
        if scale < 190:
            squares = moment_to_fp32(torch.from_numpy(codes), torch.from_numpy(scales), root=True).numpy()
            roots = grid(scale, root=True).astype(np.float32)
            with np.errstate(under="ignore"):
                assert np.array_equal(squares, roots * roots), scale


@pytest.mark.parametrize("root", [False, True])
def test_unchanged_values_keep_their_codes(root: bool, isa: str) -> None:
    """Decoding and encoding is the identity, for all codes that span a block, with every scale."""
    codes = np.arange(0xF1 if root else 0x79)
    if not root:
        codes = np.concatenate([codes, codes[1:] | 0x80])
    block = np.resize(codes, BLOCK).astype(np.uint8)
    for scale in range(82, 191) if root else range(16, 254):  # squares neither vanish nor overflow
        for key in KEYS:
            moment, scales, zeros = block.copy(), np.array([scale], np.uint8), np.zeros(BLOCK, np.float32)
            rule = "adagrad" if root else "sgd"
            one_step(rule, zeros.copy(), zeros, moment, scales, "8bit", momentum=1.0, lr=0.0, key=key, isa=isa)
            assert scales[0] == scale and np.array_equal(moment, block), (scale, key)


@pytest.mark.parametrize("root", [False, True])
def test_codes_are_within_one_step(root: bool, isa: str) -> None:
    """A value gets one of its two neighbouring codes, for blocks of any size and range; the scale is the largest's
    exponent.
    """
    rng = np.random.default_rng(1)
    blocks = 200
    values = rng.standard_normal((blocks, BLOCK)) * 2.0 ** rng.uniform(-30, 0, (blocks, BLOCK))
    values = (values * 2.0 ** rng.uniform(-20 if root else -100, 40, (blocks, 1))).astype(np.float32)
    codes, scales = store(values.ravel(), "8bit", root=root, key=3, isa=isa)
    largest = np.abs(values).max(axis=1)
    assert np.array_equal(scales, largest.view(np.uint32) >> 23)
    for row, block, scale in zip(values.astype(np.float64), codes.reshape(blocks, BLOCK), scales, strict=True):
        sizes = grid(int(scale), root)
        at = block if root else block & 0x7F
        below = np.searchsorted(sizes, np.abs(row), side="right") - 1
        # the sum of value and delta is rounded to fp32 before: that close to a code a value counts as the code
        near = np.searchsorted(sizes, np.abs(row) * (1 + 2.0**-22) + sizes[1] * 2.0**-18, side="right") - 1
        assert ((at == below) | (at == below + 1) | (at == near)).all()
        if not root:
            assert ((block & 0x80 != 0) == (row < 0))[at > 0].all()


@pytest.mark.parametrize("root", [False, True])
def test_codes_are_right_in_the_mean(root: bool) -> None:
    """One value in many blocks, each with a larger one that sets the scale. 1 % of a step is below what counts.

    Roots below the first code become that, and not 0.
    """
    blocks = 400
    for share in (1.0, 0.7, 0.03, 0.001, 1e-5, 1e-6):
        values = np.full((blocks, BLOCK), 0.75 * share, np.float32)
        values[:, 0] = 0.999
        codes, scales = store(values.ravel(), "8bit", root=root, key=int(1e6 * share))
        assert (scales == 126).all()
        sizes = grid(126, root)
        above = int(np.searchsorted(sizes, 0.75 * share, side="right"))
        step = sizes[above] - sizes[above - 1]
        mean = sizes[codes.reshape(blocks, BLOCK)[:, 1:]].mean()
        expected = max(0.75 * np.float32(share), sizes[1] if root else 0.0)
        assert abs(mean - expected) < 6 * step / 2 / np.sqrt(blocks * 255), share


def test_an_average_follows_gradients_that_are_less_than_half_a_step() -> None:
    """Each step changes the average by 1 in 1000, which rounding to nearest would lose."""
    n = 64 * BLOCK
    param, grad = np.zeros(n, np.float32), np.full(n, 2.0, np.float32)
    codes, scales = store(np.full(n, 1.0, np.float32), "8bit")
    for step in range(1, 1001):
        one_step("lion", param, grad, codes, scales, "8bit", lr=0.0, beta1=0.9, beta2=0.999, key=step)
    average = moment_to_fp32(torch.from_numpy(codes), torch.from_numpy(scales)).mean()
    assert float(average) == pytest.approx(2 - 0.999**1000, rel=0.01)


def test_zero_stays_zero(isa: str) -> None:
    for root in (False, True):
        values = np.zeros(3 * BLOCK, np.float32)
        values[BLOCK + 5] = 1e10
        for key in KEYS:
            codes, _ = store(values, "8bit", root=root, key=key, isa=isa)
            assert np.flatnonzero(codes).tolist() == [BLOCK + 5]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 255, 256, 300, 511, 512, 600])
def test_a_block_that_is_not_finite(value: float, at: int, isa: str, rule: Any) -> None:
    """The block has zero codes and scale 255, decodes to NaN, and does not affect its neighbours."""
    n = 601
    rng = np.random.default_rng(2)
    values = rng.standard_normal(n).astype(np.float32)
    calm, wild = values.copy(), values.copy()
    wild[at] = value
    results = []
    for grad in (calm, wild):
        count = len(RULES[rule].moments)
        moments, scales = zero_moments(rule, n, "8bit")  # type: ignore[arg-type]
        params = []
        for step, g in ((1, grad), (2, calm)):
            param = np.ones(n, np.float32)
            given: dict[str, Any] = {"param": param.ctypes.data, "grad": g.ctypes.data, "master": 0, "n": n}
            given |= {"moments": [m.data_ptr() for m in moments], "scales": [s.data_ptr() for s in scales]}
            given |= {"format": "fp32", "grad_dtype": "fp32", "moment_format": "8bit"}
            given = PLAIN | given | {"lr": 0.1, "momentum": 0.9}
            _adam.update(rule, step=step, isa=isa, **given)
            params.append(param)
        results.append((params[1], [m.numpy() for m in moments], [s.numpy() for s in scales], count))
    block = slice(at // BLOCK * BLOCK, min(n, (at // BLOCK + 1) * BLOCK))
    others = np.ones(n, bool)
    others[block] = False
    (calm_param, calm_codes, _, _), (param, codes, scales, count) = results
    assert np.isnan(param[block]).all() and np.array_equal(param[others], calm_param[others])
    for k in range(count):
        assert scales[k][at // BLOCK] == 255 and not codes[k][block].any()
        assert np.array_equal(codes[k][others], calm_codes[k][others])


def test_a_root_that_is_not_zero_never_becomes_zero(make: Callable[..., Any], isa: str) -> None:
    """A non-zero root stays non-zero, however small compared with the block's largest, since updates divide by it."""
    values = torch.zeros(256)
    values[1:200] = torch.logspace(-36, -1, 199)
    values[200] = 1.0
    for key in range(20):
        codes, scale = moment_from_fp32(values, "8bit", root=True, key=key, moment=1)
        assert codes[1:201].min() >= 1 and not codes[0] and not codes[201:].any()
        assert torch.equal(moment_to_fp32(codes, scale, root=True) > 0, values > 0)
    whole = make("fp32", "fp32", 256, moments="8bit", seed=3)
    values[1:200] = torch.logspace(-14, -1, 199)  # whose squares are no zeros
    whole.arrays["grad"][:] = values.numpy().view(np.uint32)
    for name in ("moment0", "moment1", "scale0", "scale1"):
        whole.arrays[name][:] = 0
    whole.call(isa)
    assert whole.arrays["moment1"][1:201].min() >= 1 and not whole.arrays["moment1"][201:].any()
