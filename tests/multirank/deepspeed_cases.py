"""Code of the ranks in test_deepspeed.py."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from infinity.deepspeed.runtime.zero import GatheredParameters
from torch import nn
from torch.utils.data import TensorDataset

import infinity.deepspeed as deepspeed
from infinity.errors import InfinityError, RanksError, StorageError, UsageError
from multirank.cases import SAMPLES, global_batches, part
from support.models import Stack, seeded


def stack(tied: bool = False) -> Stack:
    return Stack(depth=3, tied=tied)


def trained(rank: int, *, stage: int, folder: str) -> dict[str, Any]:
    """Train two steps on this rank's part of every batch, with two micro-batches a step; return what is observed."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "infinity": {"unit_size": 20_000},
    }
    data = TensorDataset(torch.arange(13))
    engine, _, loader, _ = deepspeed.initialize(model=seeded(Stack), training_data=data, config=config)
    for batch in global_batches(4, SAMPLES * 2):
        engine.backward(engine(*part(batch, rank)))
        engine.step()
    weight = engine.module.head.weight
    seen: dict[str, Any] = {
        "sizes": (engine.world_size, engine.dp_world_size, engine.global_rank, engine.train_batch_size()),
        "counts": (engine.global_steps, engine.global_samples, engine.micro_steps),
        "norm": engine.get_global_grad_norm(),
        "samples": torch.cat([row[0] for row in loader]).tolist(),
        "saved": engine.save_16bit_model(folder),
        "states": values_of(engine),
    }
    if stage == 3:
        utils = deepspeed.utils
        local = utils.safe_get_local_fp32_param(weight)
        seen["local"] = local.clone()
        utils.safe_set_local_fp32_param(weight, torch.full_like(local, float(rank)))
        seen["set"] = utils.safe_get_full_fp32_param(weight)
    with GatheredParameters(engine.module.head.parameters(), modifier_rank=1):
        if rank == 1:
            torch.nn.init.constant_(weight, 5.0)
    seen["edited"] = values_of(engine)["head.weight"]
    engine.destroy()
    return seen


def trained_in_part(rank: int, *, stage: int) -> dict[str, Any]:
    """Train the matrices of the blocks for two steps with clipping; return the norm and the values."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        "infinity": {"unit_size": 20_000},
    }
    model = seeded(stack)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of_matrices(model), config=config)
    for batch in global_batches(2, SAMPLES * 2):
        engine.backward(engine(*part(batch, rank)))
        engine.step()
    seen = {"norm": engine.get_global_grad_norm(), "states": values_of(engine)}
    engine.destroy()
    return seen


def optimizer_of_matrices(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.get_submodule("blocks").parameters() if parameter.dim() > 1]
    return torch.optim.SGD(matrices, lr=0.1)  # its update is proportional to the clipped gradient


def gathered(rank: int) -> dict[str, Any]:
    """Edit parameters of no engine on one rank, in blocks of `GatheredParameters`; return the values after them."""
    plain, tensor = nn.Linear(2, 2), torch.zeros(2)
    with deepspeed.zero.GatheredParameters([*plain.parameters(), tensor], modifier_rank=0):
        nn.init.constant_(plain.weight, float(rank))
        tensor.fill_(rank)
    return {"plain": plain.weight.detach(), "tensor": tensor}


def gathered_between_steps(
    rank: int, *, folder: str, editor: int | None, loads: bool = False
) -> dict[str, torch.Tensor]:
    """Train two steps, each followed by edits of rank `editor` in a block without modifier_rank. loads: at the end,
    rank 0 loads the values of another seed in a block with modifier_rank.
    """
    warnings.filterwarnings("ignore", "edits of unit")
    place = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"unit_size": 2000},
    }
    engine, *_ = deepspeed.initialize(model=seeded(stack), config=config)
    for batch in global_batches(2, SAMPLES * 2):
        engine.backward(engine(*part(batch, rank)))
        engine.step()
        with GatheredParameters(list(engine.module.parameters())):
            for parameter in engine.module.parameters() if rank == editor else ():
                parameter.data.mul_(2)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if rank == 0 and loads:
            engine.module.load_state_dict(seeded(stack, 1).state_dict())
    values = values_of(engine)
    engine.destroy()
    return values


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the model's values, unsharded."""
    return dict(engine.training_engine.stream_state_dict())


USES: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.zero_,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    lambda weight: weight.sum().item(),
    lambda weight: float(weight.T[0].mean()),
    lambda weight: bool((weight * 2 == 0).any()),
    lambda weight: weight.clone().tolist(),
    lambda weight: copy.deepcopy(weight).tolist(),
    lambda weight: weight.data.mul_(2),
    lambda weight: weight.detach().fill_(2),
    lambda weight: weight.__setitem__(0, 2.0),
    lambda weight: nn.functional.linear(torch.ones(1, weight.shape[1]), weight),
    lambda weight: torch.equal(weight, weight.detach()),
    lambda weight: torch.zeros_like(weight).copy_(weight),
    lambda weight: torch.add(weight, weight, out=torch.zeros_like(weight)),
    lambda weight: weight.set_(torch.zeros_like(weight)),
    pickle.dumps,
)
"""Uses of a parameter's values."""


def error_of(use: Callable[[torch.Tensor], Any], parameter: torch.Tensor) -> str:
    """Return the text of the UsageError that a use of the parameter's values raises; "" if it raises none."""
    try:
        use(parameter)
    except UsageError as error:
        return str(error)
    return ""


def resident(model: nn.Module) -> int:
    """Return the bytes of memory behind the model's parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def built(rank: int, *, zero: dict[str, Any]) -> dict[str, Any]:
    """Build a model under zero.Init with another seed on each rank; return what is observed up to a trained engine."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, **zero},
        "infinity": {"unit_size": 20_000},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = seeded(stack, seed=rank)
    head, norms = model.head, [block.norm for block in model.blocks]
    shown = {name: (tuple(value.shape), value.dtype, value.device.type) for name, value in model.state_dict().items()}
    model.double().float()
    seen: dict[str, Any] = {"shown": shown, "memory": resident(model)}
    norms[0].weight.data = nn.functional.pad(norms[0].weight.data, (0, 0))
    seen["refused"] = [error_of(use, head.weight) for use in USES] if rank else []
    with GatheredParameters(head.weight, modifier_rank=0), torch.no_grad():
        seen["gathered"] = head.weight.clone()
        if rank == 0:
            head.weight[0] = head.weight[1] = 7.0
    with GatheredParameters([norms[1].bias, head.weight], modifier_rank=1), torch.no_grad():
        seen["edited"] = head.weight.clone()
        if rank == 1:
            norms[1].bias.fill_(3.0)
    with GatheredParameters({norms[number].bias for number in range(3)}):
        pass
    seen["equal"] = [torch.equal(norms[0].bias, norm.bias) for norm in norms[1:3]]
    with GatheredParameters(model.parameters()):
        seen["before"] = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    seen["states"] = values_of(engine)
    (batch,) = global_batches(1, SAMPLES * 2)
    hook = head.register_forward_pre_hook(read_gathered)  # as TRL's fused losses gather the head in the forward
    engine.backward(engine(*part(batch, rank)))
    engine.step()
    hook.remove()
    seen["trained"] = values_of(engine)
    engine.training_engine.close(restore=True)
    with GatheredParameters(model.parameters(), modifier_rank=0):
        pass
    seen["returned"] = {name: value.clone() for name, value in model.state_dict().items()}
    return seen


def read_gathered(head: Any, inputs: Any) -> None:
    with GatheredParameters(head.weight):
        assert not head.weight.isnan().any()


def copied(rank: int) -> dict[str, Any]:
    """Copy a module of a model built under zero.Init, as PEFT's modules_to_save does, and train both."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = seeded(stack, seed=rank)
    model.blocks[1] = copy.deepcopy(model.blocks[0])
    with GatheredParameters(model.blocks[0].parameters()):
        model.blocks[2] = copy.deepcopy(model.blocks[0])
    outside, inside = (model.blocks[number].norm.weight for number in (1, 2))
    with GatheredParameters([outside, inside]):
        errors = [error_of(torch.Tensor.tolist, weight) for weight in (outside, inside)]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    states = values_of(engine)
    (batch,) = global_batches(1, SAMPLES * 2)
    engine.backward(engine(*part(batch, rank)))
    engine.step()
    seen = {"errors": errors, "states": states, "trained": values_of(engine)}
    engine.destroy()
    return seen


def built_apart(rank: int) -> str:
    """Build a model that is tied on rank 1 only; return the text of the error of `initialize`."""
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = seeded(lambda: stack(tied=rank == 1))
    try:
        deepspeed.initialize(model=model, config=config)
    except InfinityError as error:
        return str(error)
    return ""


def tagged(rank: int, *, mode: str, folder: str) -> tuple[str, str]:
    """Save under a tag of the rank's own. Return the kind of error, and the text of the file `latest`."""
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "checkpoint": {"tag_validation": mode}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    error = ""
    try:
        engine.save_checkpoint(folder, tag=f"tag-{rank}")
    except AssertionError as caught:
        error = f"{isinstance(caught, RanksError)}: {caught}"
    engine.destroy()
    latest = Path(folder, "latest")
    return error, latest.read_text() if latest.exists() else ""


def derived(rank: int, *, stage: int) -> list[float]:
    """Return a derivative through the engine on this rank only, after a step."""
    engine, *_ = deepspeed.initialize(
        model=seeded(lambda: nn.Linear(3, 1)),
        config={"train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}},
    )
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    found = torch.func.grad(lambda x: engine(x).sum())(torch.ones(3)) if rank == 0 else torch.zeros(3)
    weight = engine.module.weight.detach().clone()
    engine.destroy()
    return [*found.tolist(), *weight.flatten().tolist()]


def initialized_inside(rank: int, *, config: dict[str, Any], depth: int) -> dict[str, Any]:
    """Construct and train an engine in `depth` nested blocks of zero.Init, and step it again after them."""
    (batch,) = global_batches(1, SAMPLES * 2)
    with ExitStack() as blocks:
        for _ in range(depth):
            blocks.enter_context(deepspeed.zero.Init(config_dict_or_path=config))
        with torch_default(torch.bfloat16 if config["bf16"]["enabled"] else torch.float32):
            model = seeded(stack, seed=rank)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        rest = seeded(lambda: nn.Linear(8, 8), seed=rank)  # without an engine until the blocks end
        rest.register_parameter("shared", engine.module.head.weight)
        train(engine, part(batch, rank))
    train(engine, part(batch, rank))
    seen = {"states": values_of(engine), "rest": error_of(torch.Tensor.tolist, rest.weight)}
    engine.training_engine.close(restore=True)
    with GatheredParameters(engine.module.parameters()):
        pass
    seen["restored"] = {name: value.clone() for name, value in engine.module.state_dict().items()}
    return seen


@contextmanager
def torch_default(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype for the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def train(engine: Any, batch: tuple[torch.Tensor, ...]) -> None:
    engine.backward(engine(*batch))
    engine.step()


def failed_inside(rank: int, *, folders: list[str]) -> dict[str, Any]:
    """Leave blocks of zero.Init by exceptions: in a block, after `initialize`, and on entry; then use another one."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    with suppress(ZeroDivisionError), deepspeed.zero.Init(config_dict_or_path=config):
        engine, *_ = deepspeed.initialize(model=seeded(stack), config=config)
        raise ZeroDivisionError
    (batch,) = global_batches(1, SAMPLES * 2)
    train(engine, part(batch, rank))
    engine.destroy()
    nvme = {"device": "nvme", "nvme_path": folders[rank]}
    zero = {"stage": 3, "offload_param": nvme}
    block = deepspeed.zero.Init(config_dict_or_path={"zero_optimization": zero})
    Path(folders[rank]).rmdir()
    with suppress(StorageError), block:
        raise AssertionError("a block was entered without its file")
    outside = nn.Linear(2, 2)
    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
        inside = nn.Linear(2, 2)
    return {
        "outside": error_of(torch.Tensor.tolist, outside.weight),
        "inside": error_of(torch.Tensor.tolist, inside.weight),
        "dtype": torch.get_default_dtype(),
    }
