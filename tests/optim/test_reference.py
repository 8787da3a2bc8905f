"""The plain kernel against torch.optim, and the 16-bit formats against the fp32 one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from infinity.optim.cpu_adam import join_master, split_master, split_master_torch, update_flat
from infinity.optim.moments import zero_moments
from infinity.rules import Hyper
from support.adam_arrays import hyper_for
from support.ademamix import AdEMAMix

STEPS, N = 20, 10_007


def gradients(seed: int) -> list[torch.Tensor]:
    """Return gradients of very different sizes, as in layers and steps; some elements are always zero."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.linspace(-9, 1, N)
    scales[::17] = 0.0
    return [torch.randn(N, generator=generator) * scales for _ in range(STEPS)]


def torch_loop(start: torch.Tensor, grads: list[torch.Tensor], hyper: Hyper, **options: Any) -> torch.Tensor:
    param = torch.nn.Parameter(start.clone())
    kind = torch.optim.AdamW if hyper.rule == "adamw" else torch.optim.Adam
    optimizer = kind([param], hyper.lr, hyper.betas, hyper.eps, hyper.weight_decay, **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("rule", ["adamw", "adam"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.3, 0.5), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_of_torch(
    options: dict[str, bool], rule: Any, betas: tuple[float, float], weight_decay: float
) -> None:
    hyper = Hyper(rule, lr=1e-2, betas=betas, eps=1e-8, weight_decay=weight_decay)
    start = torch.randn(N, generator=torch.Generator().manual_seed(1))
    grads = gradients(2)
    param, exp_avg, exp_avg_sq = start.clone(), torch.zeros(N), torch.zeros(N)
    for step, grad in enumerate(grads, 1):
        update_flat(param, None, grad, [exp_avg, exp_avg_sq], [], hyper, step)
    expected = torch_loop(start, grads, hyper, **options)
    assert relative(param, expected) < 1e-7
    assert relative(param - start, expected - start) < 1e-6


@settings(max_examples=50, deadline=None)
@given(
    lr=st.floats(1e-8, 1.0),
    betas=st.tuples(st.floats(0, 0.9999), st.floats(0, 0.99999)),
    eps=st.floats(1e-10, 1e-2),
    weight_decay=st.floats(0, 1),
    step=st.integers(1, 10**7),
    seed=st.integers(0, 1000),
)
def test_one_step_against_fp64(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    seed: int,
) -> None:
    """Tests AdamW only, since an L2 gradient may cancel to any relative error."""
    rng = np.random.default_rng(seed)
    p, g, m = (rng.standard_normal(100).astype(np.float32) for _ in range(3))
    v = np.square(rng.standard_normal(100)).astype(np.float32)
    param, exp_avg, exp_avg_sq = (torch.from_numpy(x.copy()) for x in (p, m, v))
    hyper = Hyper("adamw", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    update_flat(param, None, torch.from_numpy(g), [exp_avg, exp_avg_sq], [], hyper, step)

    p64, g64, m64, v64 = (x.astype(np.float64) for x in (p, g, m, v))
    p64 *= 1 - lr * weight_decay
    m64 = betas[0] * m64 + (1 - betas[0]) * g64
    v64 = betas[1] * v64 + (1 - betas[1]) * g64**2
    move = lr / (1 - betas[0] ** step) * m64 / (np.sqrt(v64 / (1 - betas[1] ** step)) + eps)
    np.testing.assert_allclose(exp_avg.numpy(), m64, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(exp_avg_sq.numpy(), v64, rtol=2e-6)
    # where gradient and average oppose each other, the error is that of the terms that cancel
    error = np.abs(param.numpy() - (p64 - move))
    terms = lr / (1 - betas[0] ** step) / (np.sqrt(v64 / (1 - betas[1] ** step)) + eps) * (np.abs(m) + np.abs(g64))
    assert (error <= 1e-6 * (np.abs(p64) + terms)).all()


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_formats_hold_the_same_master(rule: Any, moments: Any) -> None:
    """After 20 steps from bf16 gradients, all formats have the same master, and param is its rounding."""
    hyper = hyper_for(rule, lr=1e-2, eps=1e-8, weight_decay=0.1, momentum=0.9)
    start = torch.randn(N, generator=torch.Generator().manual_seed(3))
    masters: dict[str, torch.Tensor] = {}
    for kind in ("fp32", "remainder", "master", "master_fp16"):
        kept_moments, scales = zero_moments(rule, N, moments)
        param, remainder = split_master(start)
        kept = {"fp32": None, "remainder": remainder}.get(kind, start.clone())
        target = {"fp32": start.clone(), "master_fp16": start.half()}.get(kind, param)
        for step, grad in enumerate(gradients(4), 1):
            given = (target, kept, grad.bfloat16(), kept_moments, scales)
            update_flat(*given, hyper, step, grad_scale=0.37, key=step)
        if kind == "remainder":
            masters[kind] = join_master(target, remainder)
        else:
            masters[kind] = target if kept is None else kept
        if kind != "fp32":
            rounded = masters[kind].half() if kind == "master_fp16" else split_master_torch(masters[kind])[0]
            assert torch.equal(target, rounded)
    assert all(torch.equal(masters["fp32"], other) for other in masters.values())


def test_grad_scale_is_multiplied_first() -> None:
    hyper = Hyper("adamw", lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    results = []
    for factor, scale in ((1.0, 1.0), (1024.0, 1 / 1024)):
        param, exp_avg, exp_avg_sq = torch.ones(100), torch.zeros(100), torch.zeros(100)
        update_flat(param, None, torch.arange(100.0) * factor, [exp_avg, exp_avg_sq], [], hyper, 1, grad_scale=scale)
        results.append((param, exp_avg, exp_avg_sq))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.3},
        {"dampening": 0.3},
    ],
    ids=str,
)
def test_twenty_steps_of_sgd(weight_decay: float, options: dict[str, Any]) -> None:
    grads = gradients(5)

    def kind(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 1e-2, weight_decay=weight_decay, foreach=False, **options)

    follows(Hyper("sgd", lr=1e-2, weight_decay=weight_decay, **options), grads, kind)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr_decay", [0.0, 0.1])
def test_twenty_steps_of_adagrad(weight_decay: float, lr_decay: float) -> None:
    def kind(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, 1e-2, lr_decay, weight_decay, eps=1e-8, foreach=False)

    follows(Hyper("adagrad", lr=1e-2, eps=1e-8, weight_decay=weight_decay, lr_decay=lr_decay), gradients(6), kind)


def follows(hyper: Hyper, grads: list[torch.Tensor], kind: Any) -> None:
    """Compare 20 steps of `hyper` and of torch's optimizer, made by kind([param])."""
    start = torch.randn(N, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.Parameter(start.clone())
    optimizer = kind([expected])
    param, (moments, scales) = start.clone(), zero_moments(hyper.rule, N, "fp32")
    for step, grad in enumerate(grads, 1):
        update_flat(param, None, grad, moments, scales, hyper, step)
        expected.grad = grad.clone()
        optimizer.step()
    assert relative(param, expected.detach()) < 1e-7
    assert relative(param - start, expected.detach() - start) < 1e-6


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.0), (0.0, 0.9)], ids=str)
def test_twenty_steps_of_lion(betas: tuple[float, float]) -> None:
    """Compares with the paper's formula in fp64. Gradients are not near zero, where rounding decides the sign."""
    hyper = Hyper("lion", lr=1e-2, betas=betas, weight_decay=0.1)
    start = torch.randn(N, generator=torch.Generator().manual_seed(1))
    param, (moments, scales) = start.clone(), zero_moments("lion", N, "fp32")
    expected, average = start.double(), torch.zeros(N, dtype=torch.float64)
    for step, grad in enumerate(gradients(7), 1):
        update_flat(param, None, grad, moments, scales, hyper, step)
        direction = betas[0] * average + (1 - betas[0]) * grad.double()
        expected = (1 - 1e-2 * 0.1) * expected - 1e-2 * direction.sign()
        average = betas[1] * average + (1 - betas[1]) * grad.double()
    assert relative(moments[0], average) < 1e-6
    assert float((param - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.9, 0.95, 0.99), "alpha": 8.0, "weight_decay": 0.1},
        {"t_alpha": 15, "t_beta3": 25},
        {"betas": (0.5, 0.0, 0.9), "t_alpha": 1, "t_beta3": 5},
    ],
    ids=str,
)
def test_twenty_steps_of_ademamix(options: dict[str, Any]) -> None:
    """Warm-ups end within the steps, or go on beyond them."""
    follows(Hyper("ademamix", lr=1e-2, **options), gradients(8), lambda params: AdEMAMix(params, 1e-2, **options))


def test_the_slow_mean_of_ademamix_warms_up_from_no_fast_mean() -> None:
    """With the first beta 0, whose half-life is 0, the third warms up from 0: its half-life is a share of its own."""
    hyper = Hyper("ademamix", lr=0.0, betas=(0.0, 0.9, 0.81), t_beta3=2)
    param, (moments, _) = torch.zeros(20), zero_moments("ademamix", 20, "fp32")
    for step, beta3 in ((1, 0.81**2), (2, 0.81)):
        before = moments[1].clone()
        update_flat(param, None, torch.ones(20), moments, [], hyper, step)
        torch.testing.assert_close(moments[1], beta3 * before + 1 - beta3)


def test_lions_sign_of_zero_and_nan() -> None:
    param, moment = torch.ones(20), torch.zeros(20)
    grad = torch.zeros(20)
    grad[5], grad[6], grad[7] = -0.0, float("nan"), 1e-45
    update_flat(param, None, grad, [moment], [], Hyper("lion", lr=0.5, betas=(0.0, 0.0), weight_decay=0.0), 1)
    assert param[6].isnan() and param[7] == 0.5 and bool((param[[0, 5, 19]] == 1).all())


@pytest.mark.parametrize("rule", ["adam", "adagrad", "sgd"])
def test_no_decay_leaves_a_non_finite_parameter_out_of_the_moments(rule: Any) -> None:
    """As in torch, weight_decay = 0 means that the parameter is not read for the gradient: 0 * inf would be NaN."""
    param, (moments, _) = torch.full((20,), torch.inf), zero_moments(rule, 20, "fp32")
    update_flat(param, None, torch.ones(20), moments, [], Hyper(rule, weight_decay=0.0), 1)
    assert all(moment.isfinite().all() for moment in moments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-40, -1e-45, 3e38, 0.0])
def test_special_gradients_as_in_torch(value: float) -> None:
    hyper = Hyper("adamw", lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    grads = [torch.full((37,), value)]
    param, exp_avg, exp_avg_sq = torch.ones(37), torch.zeros(37), torch.zeros(37)
    update_flat(param, None, grads[0], [exp_avg, exp_avg_sq], [], hyper, 1)
    expected = torch_loop(torch.ones(37), grads, hyper, foreach=False)
    torch.testing.assert_close(param, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_nans_are_stored_as_one_pattern(
    make: Callable[..., Any], format: str, rule: str, moments: str, isa: str
) -> None:
    problem = make(format, "fp32", 100, rule=rule, moments=moments, seed=6)
    problem.arrays["grad"][:] = 0xFFABCDEF
    problem.call(isa)
    for name in ("moment0", "moment1", "moment2"):
        moment = problem.arrays[name]
        assert moment is None or (moment == (0x7FC00000 if moments == "fp32" else 0x7FC0)).all()
    param = {"fp32": 0x7FC00000, "master_fp16": 0x7E00}.get(format, 0x7FC0)
    assert (problem.arrays["param"] == param).all()


@pytest.mark.parametrize("change", [{}, {"lr": 0.0}, {"beta1": 0.0, "beta2": 0.0, "momentum": 0.0}, {"nesterov": True}])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_hostile_values_store_no_other_nan(
    make: Callable[..., Any], rule: str, moments: str, change: dict[str, Any], isa: str
) -> None:
    """Kernels look for a NaN in the parameter only: one in a moment shows there."""
    problem = make("fp32", "fp32", 60_000, rule=rule, moments=moments, seed=8, hostile=True).call(isa, **change)
    for name in ("param", "moment0", "moment1", "moment2"):
        array = problem.arrays[name]
        if array is None:
            continue
        sign, infinity, nan = (0x80000000, 0x7F800000, 0x7FC00000) if array.itemsize == 4 else (0x8000, 0x7F80, 0x7FC0)
        found = array[(array & (sign - 1)) > infinity]
        assert found.size > 100 and (found == nan).all()
