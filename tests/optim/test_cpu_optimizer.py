"""CPUAdam compared with torch.optim.AdamW: the same steps and state dicts, and errors for unsupported options."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError, ModelError
from infinity.optim import CPUAdam
from infinity.optim.cpu_adam import join_master

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 70), nn.GELU(), nn.Linear(70, 24), nn.LayerNorm(24))
    return layers.to(dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 50, (16,), generator=generator)
        optimizer.zero_grad()
        loss = (net(tokens).float() - torch.randn(16, 24, generator=generator)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def parameters(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


def assert_close(a: nn.Module, b: nn.Module, tolerance: float = 1e-6) -> None:
    assert float((parameters(a) - parameters(b)).norm() / parameters(b).norm()) < tolerance


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_twenty_steps_of_torch(adamw_mode: bool, maximize: bool) -> None:
    ours, theirs = model(), model()
    optimizer = CPUAdam(ours.parameters(), adamw_mode=adamw_mode, maximize=maximize, **OPTIONS)
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    other = kind(theirs.parameters(), maximize=maximize, foreach=False, **OPTIONS)
    train(ours, optimizer, range(20))
    train(theirs, other, range(20))
    assert_close(ours, theirs)
    states = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for mine, reference in zip(states[0].values(), states[1].values(), strict=True):
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            assert mine[name].shape == value.shape and mine[name].dtype == value.dtype
            torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("order", ["torch first", "ours first", "back and forth"])
def test_state_dicts_are_exchanged_in_mid_training(order: str) -> None:
    """20 steps, 5 with each of four optimizers, each of which loads the state of the previous one."""
    turns = {"torch first": "TTOO", "ours first": "OOTT", "back and forth": "OTOT"}[order]
    expected = model()
    train(expected, torch.optim.AdamW(expected.parameters(), foreach=False, **OPTIONS), range(20))
    net = model()
    state: dict[str, Any] | None = None
    for part, turn in enumerate(turns):
        kind: Any = CPUAdam if turn == "O" else torch.optim.AdamW
        optimizer = kind(net.parameters(), lr=1.0)  # the right one comes with the state
        if state is None:
            optimizer = kind(net.parameters(), **OPTIONS)
        else:
            optimizer.load_state_dict(state)
        train(net, optimizer, range(5 * part, 5 * part + 5))
        state = through_a_file(optimizer.state_dict())
    assert_close(net, expected)


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_a_group_that_does_not_name_its_decay_keeps_that_of_the_optimizer(adamw_mode: bool) -> None:
    """Groups of Adam and AdamW of torch 2.6 are alike."""
    state = CPUAdam(model().parameters(), adamw_mode=not adamw_mode, **OPTIONS).state_dict()
    del state["param_groups"][0]["decoupled_weight_decay"]
    optimizer = CPUAdam(model().parameters(), adamw_mode=adamw_mode)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is adamw_mode


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resuming_gives_the_same_bits(dtype: torch.dtype, moments: Any) -> None:
    whole, parts = model(dtype), model(dtype)
    train(whole, CPUAdam(whole.parameters(), moments=moments, seed=3, **OPTIONS), range(10))
    first = CPUAdam(parts.parameters(), moments=moments, seed=3, **OPTIONS)
    train(parts, first, range(4))
    second = CPUAdam(parts.parameters(), moments=moments, seed=3)
    second.load_state_dict(through_a_file(first.state_dict()))
    train(parts, second, range(4, 7))
    third = copy.deepcopy(second)
    assert third.moments == moments and third.seed == 3
    train(parts, second, range(7, 10))
    assert torch.equal(parameters(parts), parameters(whole))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_learns_as_fp32_does(dtype: torch.dtype, moments: Any) -> None:
    """The loss of memorising one batch follows that of torch in fp32."""
    tokens = torch.arange(16)
    target = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))

    def losses(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        seen = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (net(tokens).float() - target).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.append(float(loss.detach()))
        return seen

    ours, theirs = model(dtype), model()
    mine = losses(ours, CPUAdam(ours.parameters(), moments=moments, **OPTIONS))
    reference = losses(theirs, torch.optim.AdamW(theirs.parameters(), **OPTIONS))
    assert mine[-1] == pytest.approx(reference[-1], rel=0.25, abs=0.02)
    assert mine[-1] < 0.3 * mine[0]


def test_moments_change_their_format_when_loaded() -> None:
    net = model()
    first = CPUAdam(net.parameters(), **OPTIONS)
    train(net, first, range(5))
    for moments, tolerance in (("bf16", 1e-2), ("8bit", 0.15)):
        small = CPUAdam(net.parameters(), moments=moments)  # type: ignore[arg-type]
        small.load_state_dict(first.state_dict())
        back = CPUAdam(net.parameters())
        back.load_state_dict(small.state_dict())
        for param in net.parameters():
            for name in ("exp_avg", "exp_avg_sq"):
                a, b = back.state[param][name], first.state[param][name]
                assert a.dtype == torch.float32 and float((a - b).norm()) <= tolerance * float(b.norm())
            assert back.state[param]["step"] == 5
        train(copy.deepcopy(net), small, range(0))


def test_a_remainder_that_torch_has_trained_past_is_dropped() -> None:
    net = model(torch.bfloat16)
    ours = CPUAdam(net.parameters(), **OPTIONS)
    train(net, ours, range(3))
    theirs = torch.optim.AdamW(net.parameters())
    theirs.load_state_dict(ours.state_dict())
    train(net, theirs, range(3, 6))
    again = CPUAdam(net.parameters())
    again.load_state_dict(through_a_file(theirs.state_dict()))
    assert all(not again.state[p]["remainder"].any() for p in net.parameters())
    train(net, again, range(6, 8))
    assert all(again.state[p]["remainder"].any() and again.state[p]["step"] == 8 for p in net.parameters())


def test_loaded_states_share_no_memory() -> None:
    net = model()
    first = CPUAdam(net.parameters(), **OPTIONS)
    train(net, first, range(2))
    saved = first.state_dict()
    before = copy.deepcopy(saved["state"])
    second = CPUAdam(net.parameters())
    second.load_state_dict(saved)
    train(net, second, range(2, 4))
    for old, now in zip(before.values(), saved["state"].values(), strict=True):
        assert all(torch.equal(old[name], now[name]) for name in old)


def test_bf16_keeps_what_it_cannot_show() -> None:
    """Updates a thousand times smaller than a bf16 step add up."""
    param = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = CPUAdam([param], lr=1e-5, weight_decay=0.0)
    for _ in range(100):
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = join_master(param.detach(), optimizer.state[param]["remainder"])
    torch.testing.assert_close(master, torch.full((1000,), 1 - 1e-3), rtol=1e-5, atol=0)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_any_strides(moments: Any) -> None:
    start, grad = torch.randn(30, 50), torch.randn(30, 50)
    results = []
    strides: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.clone(),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ]
    for lay_param in strides:
        for lay_grad in strides:
            param = nn.Parameter(lay_param(start))
            param.grad = lay_grad(grad)
            CPUAdam([param], moments=moments, **OPTIONS).step()
            results.append(param.detach().clone())
    assert all(torch.equal(result, results[0]) for result in results)


def test_groups_schedulers_closures_and_missing_gradients() -> None:
    nets = model(), model()
    for net, kind in zip(nets, (CPUAdam, torch.optim.AdamW), strict=True):
        some = list(net.parameters())
        optimizer: Any = kind(
            [{"params": some[:2], "lr": torch.tensor(0.02)}, {"params": some[2:], "weight_decay": 0.0}]
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(6):
            tokens = torch.arange(16) + step

            def closure(net: nn.Module = net, optimizer: Any = optimizer, tokens: torch.Tensor = tokens) -> Any:
                optimizer.zero_grad()
                loss = (net(tokens) - torch.linspace(-3, 3, 24)).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            some[3].requires_grad_(step % 2 == 0)
            assert float(optimizer.step(closure).detach()) > 0
            scheduler.step()
    assert_close(*nets)


def test_grad_scale_and_scalars_and_nothing() -> None:
    for scale in (1.0, 1 / 1024):
        params = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(3))]
        for param in params:
            param.grad = torch.full_like(param, 0.5 / scale)
        CPUAdam(params, moments="8bit", **OPTIONS).step(grad_scale=scale)
        torch.testing.assert_close(params[2].detach(), torch.full((3,), 1 - 1e-3 - 1e-2), rtol=1e-6, atol=0)
        assert params[0] == params[2][0]


def test_autograd_notices_the_update() -> None:
    param = nn.Parameter(torch.ones(10))
    loss = (param.square() * param).sum()
    param.grad = torch.ones(10)
    CPUAdam([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_seeds_decide_the_rounding() -> None:
    results = []
    for seed in (0, 0, 1):
        net = model()
        train(net, CPUAdam(net.parameters(), moments="8bit", seed=seed, **OPTIONS), range(3))
        results.append(parameters(net))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_a_model_that_is_cast_between_steps() -> None:
    net = model()
    optimizer = CPUAdam(net.parameters(), **OPTIONS)
    train(net, optimizer, range(2))
    train(net.bfloat16(), optimizer, range(2, 4))
    assert all("remainder" in state for state in optimizer.state.values())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "amsgrad": ({"amsgrad": True}, "does not support amsgrad"),
    "capturable": ({"capturable": True}, "does not support capturable"),
    "differentiable": ({"differentiable": True}, "does not support differentiable"),
    "moments": ({"moments": "4bit"}, "moments is '4bit': give one of fp32, bf16, 8bit"),
    "lr": ({"lr": -1.0}, "lr is -1"),
    "betas": ({"betas": (0.9, 1.0)}, "betas are"),
    "eps": ({"eps": -1.0}, "eps is"),
    "weight_decay": ({"weight_decay": float("nan")}, "weight_decay is nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_are_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        CPUAdam([nn.Parameter(torch.ones(3))], **options)
    if case != "moments":
        optimizer = CPUAdam([nn.Parameter(torch.ones(3))])
        with pytest.raises(ConfigError, match=message):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **options})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.ones(3, dtype=torch.float64), r"is torch\.float64: CPUAdam takes"),
        (torch.ones(3, dtype=torch.complex64), r"is torch\.complex64"),
        (torch.ones(3, device="meta"), "is on meta: CPUAdam works in host memory"),
    ],
    ids=["fp64", "complex", "meta"],
)
def test_parameters_that_are_refused(param: torch.Tensor, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        CPUAdam([nn.Parameter(param)])


def test_sparse_gradients_and_foreign_states_are_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer = CPUAdam(embedding.parameters())
    with pytest.raises(ModelError, match="sparse"):
        optimizer.step()
    assert not optimizer.state
    other = nn.Parameter(torch.ones(5))
    other.grad = torch.ones(5)
    source = CPUAdam([other])
    source.step()
    with pytest.raises(ModelError, match=r"exp_avg of parameter 0 has shape \(5,\), the parameter has \(10, 4\)"):
        optimizer.load_state_dict(source.state_dict())


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, infinity, infinity.optim; assert 'torch' not in sys.modules; infinity.optim.CPUAdam"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_parameters_alike_are_not_rounded_alike() -> None:
    pair = [nn.Parameter(torch.ones(1000)) for _ in range(2)]
    optimizer = CPUAdam(pair, moments="8bit")
    for parameter in pair:
        parameter.grad = torch.linspace(0.1, 1, 1000)
    optimizer.step()
    one, other = (optimizer.state[parameter]["exp_avg_8bit"] for parameter in pair)
    assert not torch.equal(one, other)


def test_hooks_decide_what_is_loaded() -> None:
    net = model()
    optimizer = CPUAdam(net.parameters(), **OPTIONS)
    train(net, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())

    def doubled(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        states = {n: {**s, "exp_avg": 2 * s["exp_avg"]} for n, s in state["state"].items()}
        return {**state, "state": states}

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.load_state_dict(saved)
    for number, parameter in enumerate(net.parameters()):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], 2 * saved["state"][number]["exp_avg"])


def test_a_step_that_is_refused_is_not_counted() -> None:
    net = model()
    optimizer = CPUAdam(net.parameters(), **OPTIONS)
    train(net, optimizer, range(2))
    state = optimizer.state[next(net.parameters())]
    state["exp_avg"] = state["exp_avg"][:-1]
    with pytest.raises(ValueError, match="elements where"):
        optimizer.step()
    assert int(state["step"]) == 2


@pytest.mark.parametrize("between", [torch.float32, torch.bfloat16])
def test_a_master_knows_nothing_of_the_steps_of_a_cast_model(between: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = CPUAdam([parameter], lr=0.1, weight_decay=0.0)

    def step(dtype: torch.dtype) -> float:
        parameter.data = parameter.data.to(dtype)
        parameter.grad = torch.ones(64, dtype=dtype)
        optimizer.step()
        return float(parameter.detach().float().mean())

    step(torch.float16)
    before = [step(between) for _ in range(5)][-1]
    assert step(torch.float16) == pytest.approx(before - 0.1, abs=0.01)


def test_a_gradient_with_the_negative_bit() -> None:
    pair = [nn.Parameter(torch.ones(300)) for _ in range(2)]
    values = torch.randn(300)
    pair[0].grad, pair[1].grad = torch._neg_view(values), -values
    CPUAdam(pair).step()
    assert torch.equal(pair[0], pair[1])


class Wrapped(torch.Tensor):
    """A tensor like a DTensor, with shards elsewhere."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1.5}, "seed is 1.5"),
        ({"threads": "4"}, "threads is '4'"),
        ({"threads": -1}, "threads is -1"),
        ({"betas": (0.9,)}, "betas are"),
        ({"eps": "1e-8"}, "eps is '1e-8'"),
        ({"lr": 1e39}, "lr is 1e[+]39"),
    ],
)
def test_arguments_are_refused_when_they_are_given(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CPUAdam([nn.Parameter(torch.ones(3))], **change)


def test_parts_of_a_larger_tensor_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"is a Wrapped: CPUAdam takes plain tensors, as param\.to_local\(\) is"):
        CPUAdam([torch.ones(3).as_subclass(Wrapped).requires_grad_()])


def test_states_of_other_optimizers_are_refused_before_anything_is_changed() -> None:
    for other, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"amsgrad": True})):
        theirs = model()
        loser: Any = other(theirs.parameters(), lr=0.1, **options)
        train(theirs, loser, range(1))
        net = model()
        optimizer = CPUAdam(net.parameters(), **OPTIONS)
        train(net, optimizer, range(1))
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"load groups of Adam|amsgrad"):
            optimizer.load_state_dict(loser.state_dict())
        assert optimizer.state_dict()["param_groups"] == before["param_groups"]
        assert all(
            torch.equal(optimizer.state_dict()["state"][n]["exp_avg"], s["exp_avg"]) for n, s in before["state"].items()
        )


def test_an_error_leaves_earlier_parameters_updated() -> None:
    first, second = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))
    first.grad, second.grad = torch.ones(300), torch.ones(300)
    optimizer = CPUAdam([first, second])
    optimizer.step()
    before, version = first.detach().clone(), first._version
    second.grad = torch.ones(300).to_sparse()
    with pytest.raises(ModelError, match="sparse"):
        optimizer.step()
    assert not torch.equal(first, before) and first._version > version
    assert [int(optimizer.state[param]["step"]) for param in (first, second)] == [2, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_gradients_among_others(dtype: torch.dtype) -> None:
    """Parameters and gradients that are not contiguous are updated in their turn, from copies."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(300, 300).to(dtype)) for _ in range(4)]
    params[1].data = params[1].data.t()
    for param in params:
        param.grad = torch.randn(300, 300).to(dtype)
    params[2].grad = torch.randn(300, 300).to(dtype).t()
    alone = [nn.Parameter(param.detach().clone()) for param in params]
    optimizers = [CPUAdam(params), *(CPUAdam([param]) for param in alone)]
    for param, one in zip(params, alone, strict=True):
        one.grad = param.grad
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()
    assert all(torch.equal(param, one) for param, one in zip(params, alone, strict=True))
