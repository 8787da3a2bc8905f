"""Updates of states on a device: by our kernels, or by torch's fused AdamW where it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.errors import ConfigError
from infinity.native import cuda
from infinity.optim import cuda_adam
from infinity.optim.cpu_adam import join_master_torch, split_master_torch, sum_of_squares
from infinity.plan.layout import Part
from infinity.rules import Hyper
from infinity.update.kernels import _update_by_torch, check_on_device, squared_norm, update_run


def test_states_that_only_our_kernels_update_are_refused_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_adam, cuda):
        monkeypatch.setattr(module, "why_not", lambda: "this build has none")
    check_on_device("cuda", "adamw", "fp32")
    check_on_device("cuda", "adam", "fp32")
    for rule, moments in (("adamw", "8bit"), ("adam", "bf16"), ("lion", "fp32"), ("sgd", "fp32"), ("adagrad", "fp32")):
        with pytest.raises(ConfigError, match=rf"states of {rule} .*{moments}.*this build has none.*cpu or nvme"):
            check_on_device("cuda", rule, moments)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "why_not", lambda: "")
    check_on_device("cuda", "lion", "8bit")


@pytest.mark.parametrize("kept", ["", "remainder", "master"])
@pytest.mark.parametrize("rule", ["adam", "adamw"])
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0])
def test_torchs_kernels_do_what_ours_do(kept: str, rule: Any, scale: float) -> None:
    """Torch's kernels, which replace ours on CUDA if these are missing, here on the CPU."""
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(1000, generator=generator)
    grad = torch.randn(1000, generator=generator)
    hyper = Hyper(rule, lr=1e-2, weight_decay=0.1)
    results = []
    for update in (update_run, _update_by_torch):
        states = {"exp_avg": torch.full((1000,), 0.1), "exp_avg_sq": torch.full((1000,), 0.2)}
        param = master.clone()
        if kept:
            param, states["remainder"] = split_master_torch(master)
        if kept == "master":
            del states["remainder"]
            states["master"] = master.clone()
        update(states, param, grad, hyper, 3, scale, *([0] if update is update_run else []))
        exact = join_master_torch(param, states["remainder"]) if kept == "remainder" else states.get("master", param)
        results.append([exact, states["exp_avg"], states["exp_avg_sq"]])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_norm_is_of_the_parts_and_nothing_else() -> None:
    """The norm sums each part from its own start, in order, and ignores the bytes in between."""
    shard = torch.randn(20_000, generator=torch.Generator().manual_seed(2)) * 10.0 ** torch.linspace(-10, 10, 20_000)
    parts = [Part(0, 100), Part(256, 9_000), Part(9_216, 19_999, copies=4)]
    shard[100:256], shard[19_999:] = float("nan"), float("inf")
    expected = 0.0
    for part in parts:
        expected += sum_of_squares(shard[part.start : part.stop]) / part.copies
    assert squared_norm(shard, [*parts, Part(9_000, 9_100, in_norm=False)]) == squared_norm(shard, parts) == expected
    assert squared_norm(shard, []) == 0.0
