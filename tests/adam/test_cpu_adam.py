"""The wrapper on tensors: formats from dtypes, and one clear error for each tensor that does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from infinity.optim.cpu_adam import AdamHyper, adam_update, join_master, split_master

N = 100
HYPER = AdamHyper()


def tensors() -> dict[str, torch.Tensor | None]:
    return {
        "param": torch.ones(N),
        "master_or_remainder": None,
        "grad": torch.ones(N),
        "exp_avg": torch.zeros(N),
        "exp_avg_sq": torch.zeros(N),
    }


BAD: dict[str, tuple[str, Callable[[], torch.Tensor | None], str]] = {
    "dtype of param": ("param", lambda: torch.ones(N, dtype=torch.float16), r"param is torch\.float16: pass"),
    "dtype of grad": ("grad", lambda: torch.ones(N, dtype=torch.float64), r"grad is torch\.float64"),
    "dtype of a moment": ("exp_avg", lambda: torch.zeros(N, dtype=torch.bfloat16), r"exp_avg is torch\.bfloat16"),
    "numel": ("exp_avg_sq", lambda: torch.zeros(N - 1), r"exp_avg_sq has 99 elements where 100 are needed"),
    "strides": ("grad", lambda: torch.ones(2 * N)[::2], r"grad of shape \(100,\) is not contiguous"),
    "transposed": ("grad", lambda: torch.ones(10, 10).t(), r"not contiguous"),
    "expanded": ("grad", lambda: torch.ones(1).expand(N), r"not contiguous"),
    "sparse": ("grad", lambda: torch.ones(N).to_sparse(), r"not contiguous"),
    "device": ("exp_avg", lambda: torch.zeros(N, device="meta"), r"exp_avg is on meta: pass a CPU tensor"),
    "master of fp32": ("master_or_remainder", lambda: torch.zeros(N), r"its own master: pass None"),
    "master of bf16": ("param", lambda: torch.ones(N, dtype=torch.bfloat16), r"int16 remainder .* or its fp32 master"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    name, bad, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        adam_update(**(tensors() | {name: bad()}), hyper=HYPER, step=1)  # type: ignore[arg-type]


def test_refuses_shared_memory_and_step_0() -> None:
    given = tensors()
    with pytest.raises(ValueError, match="exp_avg_sq overlaps exp_avg"):
        adam_update(**(given | {"exp_avg_sq": given["exp_avg"]}), hyper=HYPER, step=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step is 0"):
        adam_update(**given, hyper=HYPER, step=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"eps": -1e-8},
        {"weight_decay": math.inf},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
    ],
    ids=str,
)
def test_hyper_refuses(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(change))} (is|are) .*: give"):
        AdamHyper(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["fp32", "remainder", "master"])
def test_shapes_slices_and_empty_tensors(kind: str) -> None:
    """A slice of a flat tensor is updated like a tensor of its own, and its neighbours stay as they are."""
    start = torch.randn(3 * N, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(N, generator=torch.Generator().manual_seed(1))

    def states() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        param, remainder = split_master(start)
        kept = {"fp32": None, "remainder": remainder, "master": start.clone()}[kind]
        return start.clone() if kind == "fp32" else param, kept, torch.zeros(3 * N), torch.zeros(3 * N)

    flat = states()
    parts = [None if x is None else x[N : 2 * N] for x in flat]
    adam_update(parts[0], parts[1], grad, parts[2], parts[3], HYPER, 1)  # type: ignore[arg-type]
    alone = [None if x is None else x[N : 2 * N].clone().reshape(10, 10) for x in states()]
    adam_update(alone[0], alone[1], grad.reshape(10, 10), alone[2], alone[3], HYPER, 1)  # type: ignore[arg-type]
    for whole, single, before in zip(flat, alone, states(), strict=True):
        if whole is not None and single is not None and before is not None:
            assert torch.equal(whole[N : 2 * N], single.flatten())
            assert torch.equal(whole[:N], before[:N]) and torch.equal(whole[2 * N :], before[2 * N :])
    empty = [None if x is None else x[:0] for x in flat]
    adam_update(empty[0], empty[1], grad[:0], empty[2], empty[3], HYPER, 1)  # type: ignore[arg-type]


def test_split_and_join_into_given_tensors() -> None:
    master = torch.randn(10, 10)
    param, remainder = split_master(master)
    assert param.shape == remainder.shape == master.shape
    out = torch.empty(N, dtype=torch.bfloat16), torch.empty(N, dtype=torch.int16)
    assert split_master(master, out) is not None and torch.equal(out[0].view(10, 10), param)
    back = torch.empty(N)
    assert join_master(*out, out=back) is back and torch.equal(back.view(10, 10), master)
    with pytest.raises(ValueError, match="remainder has 99 elements"):
        join_master(out[0], out[1][:-1])
    with pytest.raises(ValueError, match=r"master is torch\.float64"):
        split_master(master.double())


def test_a_parameter_that_requires_grad_is_updated() -> None:
    param = torch.nn.Parameter(torch.ones(N))
    adam_update(param, None, torch.ones(N), torch.zeros(N), torch.zeros(N), HYPER, 1)
    assert bool((param < 1).all())
