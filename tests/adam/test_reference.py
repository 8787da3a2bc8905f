"""The plain kernel against torch.optim, and the 16-bit formats against the fp32 one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.optim.cpu_adam import AdamHyper, adam_update, join_master, split_master, split_master_torch

STEPS, N = 20, 10_007


def gradients(seed: int) -> list[torch.Tensor]:
    """Gradients of very different sizes, as layers and steps have them; some elements are always zero."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.linspace(-9, 1, N)
    scales[::17] = 0.0
    return [torch.randn(N, generator=generator) * scales for _ in range(STEPS)]


def torch_loop(start: torch.Tensor, grads: list[torch.Tensor], hyper: AdamHyper, **options: Any) -> torch.Tensor:
    param = torch.nn.Parameter(start.clone())
    kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    optimizer = kind([param], hyper.lr, hyper.betas, hyper.eps, hyper.weight_decay, **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.3, 0.5), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_of_torch(
    options: dict[str, bool], decoupled: bool, betas: tuple[float, float], weight_decay: float
) -> None:
    hyper = AdamHyper(1e-2, betas, 1e-8, weight_decay, decoupled)
    start = torch.randn(N, generator=torch.Generator().manual_seed(1))
    grads = gradients(2)
    param, exp_avg, exp_avg_sq = start.clone(), torch.zeros(N), torch.zeros(N)
    for step, grad in enumerate(grads, 1):
        adam_update(param, None, grad, exp_avg, exp_avg_sq, hyper, step)
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
    """AdamW only: the L2 gradient may cancel to any relative error."""
    rng = np.random.default_rng(seed)
    p, g, m = (rng.standard_normal(100).astype(np.float32) for _ in range(3))
    v = np.square(rng.standard_normal(100)).astype(np.float32)
    param, exp_avg, exp_avg_sq = (torch.from_numpy(x.copy()) for x in (p, m, v))
    hyper = AdamHyper(lr, betas, eps, weight_decay)
    adam_update(param, None, torch.from_numpy(g), exp_avg, exp_avg_sq, hyper, step)

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


@pytest.mark.parametrize("decoupled", [True, False])
def test_formats_hold_the_same_master(decoupled: bool) -> None:
    """20 steps from bf16 gradients: the master in all three formats is the same, and param is its rounding."""
    hyper = AdamHyper(1e-2, (0.9, 0.95), 1e-8, 0.1, decoupled)
    start = torch.randn(N, generator=torch.Generator().manual_seed(3))
    masters: dict[str, torch.Tensor] = {}
    for kind in ("fp32", "remainder", "master"):
        exp_avg, exp_avg_sq = torch.zeros(N), torch.zeros(N)
        param, remainder = split_master(start)
        kept = {"fp32": None, "remainder": remainder, "master": start.clone()}[kind]
        target = start.clone() if kind == "fp32" else param
        for step, grad in enumerate(gradients(4), 1):
            adam_update(target, kept, grad.bfloat16(), exp_avg, exp_avg_sq, hyper, step, grad_scale=0.37)
        if kind == "remainder":
            masters[kind] = join_master(target, remainder)
        else:
            masters[kind] = target if kept is None else kept
        if kind != "fp32":
            assert torch.equal(target, split_master_torch(masters[kind])[0])
    assert torch.equal(masters["fp32"], masters["remainder"])
    assert torch.equal(masters["fp32"], masters["master"])


def test_grad_scale_is_multiplied_first() -> None:
    hyper = AdamHyper(1e-2, (0.9, 0.95), 1e-8, 0.1)
    results = []
    for factor, scale in ((1.0, 1.0), (1024.0, 1 / 1024)):
        param, exp_avg, exp_avg_sq = torch.ones(100), torch.zeros(100), torch.zeros(100)
        adam_update(param, None, torch.arange(100.0) * factor, exp_avg, exp_avg_sq, hyper, 1, grad_scale=scale)
        results.append((param, exp_avg, exp_avg_sq))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_decay_leaves_a_non_finite_parameter_out_of_the_moments() -> None:
    """As in torch, weight_decay = 0 means that the parameter is not read for the gradient: 0 * inf would be NaN."""
    param, exp_avg, exp_avg_sq = torch.full((20,), torch.inf), torch.zeros(20), torch.zeros(20)
    hyper = AdamHyper(weight_decay=0.0, decoupled=False)
    adam_update(param, None, torch.ones(20), exp_avg, exp_avg_sq, hyper, 1)
    assert exp_avg.isfinite().all() and exp_avg_sq.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-40, -1e-45, 3e38, 0.0])
def test_special_gradients_as_in_torch(value: float) -> None:
    hyper = AdamHyper(1e-2, (0.9, 0.95), 1e-8, 0.1)
    grads = [torch.full((37,), value)]
    param, exp_avg, exp_avg_sq = torch.ones(37), torch.zeros(37), torch.zeros(37)
    adam_update(param, None, grads[0], exp_avg, exp_avg_sq, hyper, 1)
    expected = torch_loop(torch.ones(37), grads, hyper, foreach=False)
    torch.testing.assert_close(param, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_nans_are_stored_as_one_pattern(make: Callable[..., Any], format: str, isa: str) -> None:
    problem = make(format, "fp32", 100, seed=6)
    problem.arrays["grad"][:] = 0xFFABCDEF
    problem.call(isa)
    assert (problem.arrays["exp_avg"] == 0x7FC00000).all()
    assert (problem.arrays["exp_avg_sq"] == 0x7FC00000).all()
    param = problem.arrays["param"]
    assert (param == (0x7FC0 if param.dtype == np.uint16 else 0x7FC00000)).all()
