"""The wrapper on tensors: formats follow dtypes, and each tensor that does not fit raises one clear error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity.optim.cpu_adam import join_master, split_master, update_flat
from infinity.optim.moments import zero_moments
from infinity.rules import RULES, Hyper
from support.adam_arrays import hyper_for

N = 300
HYPER = Hyper()


def tensors() -> dict[str, Any]:
    return {
        "param": torch.ones(N),
        "master_or_remainder": None,
        "grad": torch.ones(N),
        "moments": [torch.zeros(N), torch.zeros(N)],
        "scales": [],
    }


def eight() -> dict[str, Any]:
    moments, scales = zero_moments("adamw", N, "8bit")
    return {"moments": moments, "scales": scales}


BF16, FP16 = torch.ones(N, dtype=torch.bfloat16), torch.ones(N, dtype=torch.float16)
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "dtype of param": (lambda: {"param": torch.ones(N, dtype=torch.float64)}, r"param is torch\.float64: pass"),
    "dtype of grad": (lambda: {"grad": torch.ones(N, dtype=torch.float64)}, r"grad is torch\.float64"),
    "dtype of moments": (
        lambda: {"moments": [torch.zeros(N, dtype=torch.float16)] * 2},
        r"moments\[0\] is torch\.float16: pass torch\.float32 or torch\.bfloat16 or torch\.uint8",
    ),
    "mixed moments": (
        lambda: {"moments": [torch.zeros(N), torch.zeros(N, dtype=torch.bfloat16)]},
        r"moments\[1\] is torch\.bfloat16: pass torch\.float32",
    ),
    "too few moments": (lambda: {"moments": [torch.zeros(N)]}, "adamw has 2 moments, not 1"),
    "numel": (lambda: {"moments": [torch.zeros(N), torch.zeros(N - 1)]}, r"moments\[1\] has 299 elements where 300"),
    "no scales": (lambda: eight() | {"scales": []}, r"moments of torch\.uint8 have 2 scales, not 0"),
    "scales of fp32": (lambda: {"scales": eight()["scales"]}, r"moments of torch\.float32 have 0 scales, not 2"),
    "size of a scale": (
        lambda: eight() | {"scales": [torch.zeros(2, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)]},
        r"scales\[1\] has 1 elements where 2 are needed",
    ),
    "dtype of a scale": (lambda: eight() | {"scales": [torch.zeros(2)] * 2}, r"scales\[0\] is torch\.float32"),
    "strides": (lambda: {"grad": torch.ones(2 * N)[::2]}, r"grad of shape \(300,\) is not contiguous"),
    "transposed": (lambda: {"grad": torch.ones(10, 30).t()}, r"not contiguous"),
    "expanded": (lambda: {"grad": torch.ones(1).expand(N)}, r"not contiguous"),
    "sparse": (lambda: {"grad": torch.ones(N).to_sparse()}, r"not contiguous"),
    "device": (lambda: {"moments": [torch.zeros(N, device="meta")] * 2}, r"moments\[0\] is on meta: pass a CPU tensor"),
    "master of fp32": (lambda: {"master_or_remainder": torch.zeros(N)}, r"its own master: pass None"),
    "master of bf16": (lambda: {"param": BF16}, r"int16 remainder .* or its fp32 master"),
    "master of fp16": (lambda: {"param": FP16}, r"param is torch\.float16: pass its fp32 master"),
    "remainder of fp16": (
        lambda: {"param": FP16, "master_or_remainder": torch.zeros(N, dtype=torch.int16)},
        r"param is torch\.float16: pass its fp32 master",
    ),
    "shared memory": (lambda: {"moments": [torch.zeros(N)] * 2}, r"moments\[1\] overlaps moments\[0\]"),
    "step 0": (lambda: {"step": 0}, "step is 0"),
    "first": (lambda: {"first": 5}, "first is 5"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    change, message = BAD[case]
    given = tensors() | {"hyper": HYPER, "step": 1} | change()
    with pytest.raises(ValueError, match=message):
        update_flat(**given)
    assert bool((given["param"] == 1).all())


@pytest.mark.parametrize(
    "change",
    [
        {"rule": "rmsprop"},
        {"lr": -1.0},
        {"lr": math.nan},
        {"eps": -1e-8},
        {"weight_decay": math.inf},
        {"momentum": -0.1},
        {"dampening": math.nan},
        {"lr_decay": -1.0},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"betas": (0.9, 0.9), "rule": "ademamix"},
        {"betas": (0.9, 0.9, 1.0), "rule": "ademamix"},
        {"alpha": -1.0},
        {"t_alpha": -1},
        {"t_beta3": 0.5},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
    ],
    ids=str,
)
def test_hyper_refuses(change: dict[str, Any]) -> None:
    rule = next((name for name, row in RULES.items() if change.keys() <= {*row.keys}), "adamw")
    with pytest.raises(ValueError, match=rf"{next(iter(change))} (is|are) .*: give"):
        Hyper(**{"rule": rule, **change})  # type: ignore[arg-type]


def test_hyper_refuses_keys_of_other_rules() -> None:
    with pytest.raises(TypeError, match="adamw has no momentum: give lr, betas, eps, weight_decay"):
        Hyper("adamw", momentum=0.9)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("kind", ["fp32", "remainder", "master", "master_fp16"])
def test_shapes_slices_and_empty_tensors(kind: str, moments: Any, rule: Any) -> None:
    """A slice of a flat tensor is updated like a tensor of its own, and its neighbours stay as they are."""
    total, part = 3 * 512, slice(512, 1024)
    start = torch.randn(total, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(512, generator=torch.Generator().manual_seed(1))
    hyper = hyper_for(rule, momentum=0.9)

    def states() -> list[torch.Tensor]:
        """Return param, moments, scales, and the master if there is one."""
        param, remainder = split_master(start)
        lists = zero_moments(rule, total, moments)
        target = {"fp32": start.clone(), "master_fp16": start.half()}.get(kind, param)
        kept = {"fp32": [], "remainder": [remainder]}.get(kind, [start.clone()])
        return [target, *lists[0], *lists[1], *kept]

    def update(tensors: list[torch.Tensor], grad: torch.Tensor) -> None:
        count = len(RULES[rule].moments)
        scaled = count if moments == "8bit" else 0
        kept = tensors[1 + count + scaled] if kind != "fp32" else None
        given = tensors[1 : 1 + count], tensors[1 + count : 1 + count + scaled]
        update_flat(tensors[0], kept, grad, *given, hyper, 1, key=7, first=256)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x[part] if x.numel() == total else x[2:4]

    flat = states()
    update([cut(x) for x in flat], grad)
    alone = [cut(x).clone().reshape(2, -1) for x in states()]
    update(alone, grad.reshape(2, -1))
    for whole, single, before in zip(flat, alone, states(), strict=True):
        assert torch.equal(cut(whole), single.flatten())
        cut(whole).copy_(cut(before))
        assert torch.equal(whole, before)
    update([x[:0] for x in flat], grad[:0])


def test_split_and_join_into_given_tensors() -> None:
    master = torch.randn(10, 30)
    param, remainder = split_master(master)
    assert param.shape == remainder.shape == master.shape
    out = torch.empty(N, dtype=torch.bfloat16), torch.empty(N, dtype=torch.int16)
    assert split_master(master, out) is not None and torch.equal(out[0].view(10, 30), param)
    back = torch.empty(N)
    assert join_master(*out, out=back) is back and torch.equal(back.view(10, 30), master)
    with pytest.raises(ValueError, match="remainder has 299 elements"):
        join_master(out[0], out[1][:-1])
    with pytest.raises(ValueError, match=r"master is torch\.float64"):
        split_master(master.double())


def test_a_parameter_that_requires_grad_is_updated() -> None:
    param = torch.nn.Parameter(torch.ones(N))
    update_flat(param, None, torch.ones(N), [torch.zeros(N), torch.zeros(N)], [], HYPER, 1)
    assert bool((param < 1).all())


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e300])
def test_a_scale_that_is_not_finite_goes_through(scale: float) -> None:
    """A non-finite scale acts like a non-finite gradient: clipping by a norm of NaN updates to NaN."""
    param, moments = torch.ones(300), [torch.zeros(300), torch.zeros(300)]
    update_flat(param, None, torch.ones(300), moments, [], Hyper(), 1, grad_scale=scale)
    assert param.isnan().all() and not any(moment.isfinite().any() for moment in moments)
