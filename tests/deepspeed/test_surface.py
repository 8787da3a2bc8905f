"""Functions and classes of `infinity.deepspeed`: construction, arguments, single states, optimizers, checkpoints."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infinity.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from infinity.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from infinity.deepspeed.ops.lion import DeepSpeedCPULion
from infinity.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from safetensors.torch import load_file
from torch import nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.deepspeed.accelerator import Accelerator
from infinity.errors import CheckpointError, ConfigError, ModelError, StorageError, UsageError
from support.deepspeed_model import TinyModel
from support.models import Stack, seeded, token_batches

Opens = Callable[..., Any]
CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "steps_per_print": 0}


# -- the package -------------------------------------------------------------------------------------------------------


def test_names_are_found_where_scripts_import_them() -> None:
    """The package's attributes are those of its submodules, and its version is DeepSpeed's."""
    assert deepspeed.__version__.startswith("0.19.8")
    assert deepspeed.__infinity_version__ == infinity.__version__
    homes = {
        "DeepSpeedEngine": "runtime.engine",
        "DeepSpeedConfig": "runtime.config",
        "get_accelerator": "accelerator",
        "init_distributed": "comm",
        "log_dist": "utils",
        "RepeatingLoader": "utils",
    }
    for name, home in homes.items():
        assert getattr(deepspeed, name) is getattr(importlib.import_module(f"infinity.deepspeed.{home}"), name)
    assert deepspeed.ops.adam.DeepSpeedCPUAdam is DeepSpeedCPUAdam
    assert deepspeed.utils.groups.get_model_parallel_world_size() == 1
    assert deepspeed.zero is importlib.import_module("infinity.deepspeed.runtime.zero")
    assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert {"initialize", "zero", "comm"} <= set(dir(deepspeed))


def test_names_without_a_counterpart_say_the_alternative() -> None:
    """Transformer kernels and the like are AttributeErrors that name the alternative."""
    with pytest.raises(AttributeError, match=r"deepspeed\.DeepSpeedHybridEngine has no counterpart.*generate\(\)"):
        deepspeed.DeepSpeedHybridEngine  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        deepspeed.nothing  # noqa: B018


def test_the_import_alone_is_cheap() -> None:
    """`import infinity.deepspeed` imports neither torch nor a submodule."""
    code = "import sys, infinity.deepspeed; print([m for m in sys.modules if m == 'torch' or 'deepspeed.' in m])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# -- initialize --------------------------------------------------------------------------------------------------------


def test_the_config_comes_from_the_arguments_that_deepspeed_reads(opens: Opens, tmp_path: Path) -> None:
    """`--deepspeed_config`, `config` and `config_params` give the same engine; none or two of them raise."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**CONFIG, "gradient_clipping": None}))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed is True and args.deepscale is False
    silent = {**CONFIG, "steps_per_print": float("inf")}  # as Accelerate writes it
    for given in ({"args": args}, {"config": str(path)}, {"config_params": silent}):
        engine, optimizer, loader, scheduler = deepspeed.initialize(model=nn.Linear(2, 2), **given)
        assert engine.train_batch_size() == 4 and engine.gradient_clipping() == 1.0
        assert optimizer is engine.optimizer and loader is None and scheduler is None
        engine.destroy()
    for given, problem in (({}, "there is no config"), ({"args": args, "config": CONFIG}, "are different configs")):
        with pytest.raises(ConfigError, match=problem):
            deepspeed.initialize(model=nn.Linear(2, 2), **given)
    opens()  # its end releases the process group


def test_arguments_without_a_counterpart_are_refused(opens: Opens) -> None:
    """Another optimizer, model parallelism and engines as models raise by name."""
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"optimizer is a torch\..*LBFGS, which an engine cannot apply"):
        deepspeed.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=CONFIG)
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    with pytest.raises(ConfigError, match=r"mpu\.get_model_parallel_world_size\(\) is 2"):
        deepspeed.initialize(model=model, mpu=mpu, config=CONFIG)
    with pytest.raises(ModelError, match="model is already an engine"):
        deepspeed.initialize(model=opens(), config=CONFIG)
    with pytest.raises(ModelError, match="has no model"):
        deepspeed.initialize(config=CONFIG)


def test_nvme_path_is_created(opens: Opens, tmp_path: Path) -> None:
    """A folder that does not exist is made, and states live in it."""
    folder = tmp_path / "new" / "nvme"
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    engine = opens(3, zero_optimization={"offload_optimizer": nvme, "offload_param": nvme})
    assert folder.is_dir()
    assert engine.zero_nvme_offload_optimizer() and engine.zero_use_cpu_optimizer() and not engine.zero_cpu_offload()
    [batch] = token_batches(1)
    engine.backward(engine(*batch))
    engine.step()
    assert engine.was_step_applied()


def test_an_nvme_path_that_cannot_be_created_is_named(opens: Opens, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "file" / "folder")}
    with pytest.raises(StorageError, match=r"nvme_path: .*/file/folder cannot be created: Not a directory. Create it"):
        opens(3, zero_optimization={"offload_optimizer": nvme, "offload_param": nvme})


@pytest.mark.parametrize("kinds", [("param", "optimizer"), ("optimizer",)])
@pytest.mark.parametrize("build", ["initialize", "Init", "DeepSpeedConfig"])
def test_the_text_none_is_no_nvme_path(
    build: str, kinds: tuple[str, ...], opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate's plugin fills it in for a missing path. The error names the variables, and no folder is made."""
    monkeypatch.chdir(tmp_path)
    zero = {"stage": 3, **{f"offload_{kind}": {"device": "nvme", "nvme_path": "none"} for kind in kinds}}
    with pytest.raises(ConfigError) as found:
        if build == "initialize":
            opens(3, zero_optimization=zero)
        elif build == "Init":
            deepspeed.zero.Init(config_dict_or_path={"zero_optimization": zero})
        else:
            deepspeed.DeepSpeedConfig({**CONFIG, "zero_optimization": zero})
    message = str(found.value)
    for kind in ("PARAM", "OPTIMIZER"):
        assert (f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_NVME_PATH" in message) == (kind.lower() in kinds)
    assert "--deepspeed_config_file" in message
    assert list(tmp_path.iterdir()) == []


def test_none_is_a_path_of_states_in_memory(opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opens(3, zero_optimization={"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "none"}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("section", "rule", "params"),
    [
        ({"type": "Adam"}, "adamw", {"weight_decay": 0.0}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "adamw", {"weight_decay": 0.01}),
        ({"type": "AdamW"}, "adamw", {"weight_decay": 0.0}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "adam", {"weight_decay": 0.0}),
        ({"type": "Lion"}, "lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ({"type": "SGD", "params": {"lr": 0.5}}, "sgd", {"lr": 0.5, "momentum": 0.0}),
    ],
    ids=str,
)
def test_optimizers_have_deepspeeds_defaults(
    opens: Opens, section: dict[str, Any], rule: str, params: dict[str, Any]
) -> None:
    """Constants that the config leaves out are those of DeepSpeed's own optimizers."""
    engine = opens(model=nn.Linear(2, 2), optimizer=section)
    assert engine.optimizer.rule == rule
    group = engine.optimizer.param_groups[0]
    assert {name: group[name] for name in params} == params


def test_a_config_object_resolves_the_batch() -> None:
    """`DeepSpeedConfig` validates a dict, and has DeepSpeed's attributes."""
    config = deepspeed.DeepSpeedConfig({**CONFIG, "train_batch_size": 16, "gradient_accumulation_steps": 2})
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (8, 2)
    assert (config.zero_enabled, config.gradient_clipping, config.optimizer_name) == (False, 1.0, "AdamW")
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="unknown"):
        deepspeed.DeepSpeedConfig({"train_batch": 3})
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r'no batch size: .*Set "train_micro_batch_size_per_gpu"'):
        deepspeed.DeepSpeedConfig({"zero_optimization": {"stage": 1}})


def test_a_config_of_a_trainer_is_read_before_it_is_filled_in() -> None:
    """`DeepSpeedConfig` and `zero.Init` take the "auto" values of Hugging Face's files."""
    auto = {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    config = deepspeed.DeepSpeedConfig(auto)
    assert (config.train_batch_size, config.zero_optimization_stage) == (None, 3)
    assert config.scheduler_params["total_num_steps"] == "auto"
    assert deepspeed.DeepSpeedConfig({**auto, "train_batch_size": 8}).train_micro_batch_size_per_gpu == 8
    with deepspeed.zero.Init(config_dict_or_path=auto):
        assert nn.Linear(2, 2).weight.dtype == torch.float32


def test_inference_runs_in_deepspeeds_default_dtype(opens: Opens) -> None:
    """Parameters are float16 unless dtype says otherwise; tensor parallelism is refused."""
    engine = deepspeed.init_inference(nn.Linear(4, 4), replace_with_kernel_inject=True)
    assert next(engine.parameters()).dtype == torch.float16
    engine.destroy()
    model = nn.Linear(4, 4)
    expected = model(torch.ones(1, 4))
    engine = deepspeed.init_inference(model, {"dtype": "fp32", "zero": {"stage": 3}})
    torch.testing.assert_close(engine(torch.ones(1, 4)), expected)
    engine.destroy()
    with pytest.raises(ConfigError, match="mp_size is 2"):
        deepspeed.init_inference(nn.Linear(4, 4), mp_size=2)
    with pytest.raises(ConfigError, match="quant is not supported in an inference config"):
        deepspeed.init_inference(nn.Linear(4, 4), quant={"enabled": True})


# -- states of single parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_single_states_are_read_and_set(opens: Opens, stage: int) -> None:
    """Masters, moments and gradients of one parameter; None for frozen parameters and those of no engine."""
    utils = deepspeed.utils
    model = seeded(Stack)
    model.embedding.weight.requires_grad_(False)
    engine = opens(stage, model=model)
    [batch] = token_batches(1)
    weight = model.head.weight
    engine.backward(engine(*batch))
    grad = utils.safe_get_full_grad(weight)
    plain = seeded(Stack)
    plain(*batch).backward()
    torch.testing.assert_close(grad, plain.head.weight.grad)
    utils.safe_update_full_grad_vectorized([weight, model.embedding.weight], lambda value, _: torch.zeros_like(value))
    assert not utils.safe_get_full_grad(weight).any()
    engine.step()
    assert torch.equal(utils.safe_get_full_fp32_param(weight), plain.head.weight)
    assert not utils.safe_get_full_optimizer_state(weight, "exp_avg").any()
    utils.safe_set_full_fp32_param(weight, torch.ones_like(grad))
    utils.safe_set_full_optimizer_state(weight, torch.full_like(grad, 2.0), "exp_avg")
    assert (utils.safe_get_full_fp32_param(weight) == 1).all()
    assert (utils.safe_get_full_optimizer_state(weight, "exp_avg") == 2).all()
    for other in (model.embedding.weight, nn.Parameter(torch.ones(2))):
        assert utils.safe_get_full_fp32_param(other) is None
        assert utils.safe_get_full_optimizer_state(other, "exp_avg") is None
        assert utils.safe_get_full_grad(other) is None
    if stage == 3:
        assert torch.equal(utils.safe_get_local_fp32_param(weight), torch.ones(weight.numel()))
    else:
        with pytest.raises(UsageError, match=r"zero_optimization\.stage is 0"):
            utils.safe_get_local_fp32_param(weight)


def test_parameters_are_gathered_and_edited(opens: Opens) -> None:
    """`GatheredParameters` gives whole values, and keeps rank 0's edits; plain parameters pass through."""
    model = seeded(Stack)
    engine = opens(3, model=model)
    with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        nn.init.constant_(model.head.weight, 3.0)
    assert (engine.module_state_dict()["head.weight"] == 3).all()
    with deepspeed.zero.GatheredParameters(nn.Linear(2, 2).parameters(), modifier_rank=0):
        pass
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=False):
        pass
    deepspeed.zero.register_external_parameter(model, model.head.weight)


def test_a_model_built_in_zero_init_is_the_same_model(opens: Opens, tmp_path: Path) -> None:
    """`zero.Init` changes no value; its dtype is the config's."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    config = {"zero_optimization": {"stage": 3, "offload_param": nvme}, "infinity": {"unit_size": 1000}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = seeded(Stack)
    for built, plain in zip(model.parameters(), seeded(Stack).parameters(), strict=True):
        assert torch.equal(built, plain)
    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    with deepspeed.zero.Init(enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    with pytest.raises(ConfigError, match="zero_quantized_weights"):
        deepspeed.zero.Init(zero_quantized_weights=True)


@pytest.mark.parametrize("nvme", [False, True], ids=["memory", "nvme"])
def test_one_rank_constructs_an_engine_in_zero_init(opens: Opens, nvme: bool, tmp_path: Path) -> None:
    """It trains as one that is constructed after nested blocks, in them and after them, with bf16 as default dtype."""
    place = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    zero = {"stage": 3, **({"offload_param": place, "offload_optimizer": place} if nvme else {})}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    engines = []
    for inside in (True, False):
        with deepspeed.zero.Init(config_dict_or_path=config), deepspeed.zero.Init(config_dict_or_path=config):
            model = seeded(Stack)
            engine = opens(3, model, **config) if inside else None
            if engine is not None:
                engine.backward(engine(*token_batches(1)[0]))
                engine.step()
        if engine is None:
            engine = opens(3, model, **config)
            engine.backward(engine(*token_batches(1)[0]))
            engine.step()
        engine.backward(engine(*token_batches(1)[0]))
        engine.step()
        engines.append(engine)
    first, second = (engine.module_state_dict() for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert torch.get_default_dtype() == torch.float32


def test_leaf_modules_are_marked() -> None:
    """Marks by class, name of a class, module name and suffix; a class that does not occur raises."""
    utils = deepspeed.utils
    model = Stack(depth=2)
    blocks = list(model.blocks)
    assert utils.set_z3_leaf_modules(model, [type(blocks[0])]) == blocks
    assert utils.get_z3_leaf_modules(model) == blocks and utils.z3_leaf_module(blocks[1])
    assert utils.unset_z3_leaf_modules(model, ["Block"]) == blocks
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules_by_name(model, ["blocks.1", "blocks.9"]) == (blocks[1:], ["blocks.9"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["s.0", "s.8"]) == (blocks[:1], ["s.8"])
    assert utils.set_z3_leaf_modules_by_name(model, ["other"], raise_if_not_found=False) == ([], ["other"])
    with pytest.raises(ValueError, match="Stack has no module Conv2d"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])


# -- optimizers --------------------------------------------------------------------------------------------------------


def lion(params: list[nn.Parameter]) -> Callable[[], None]:
    """Return a step of Lion as in its paper, with DeepSpeed's defaults."""
    means = [torch.zeros_like(param) for param in params]

    def step() -> None:
        for param, mean in zip(params, means, strict=True):
            update = (0.9 * mean + 0.1 * param.grad).sign()  # type: ignore[operator]
            param.data.mul_(1 - 1e-3 * 0.1).add_(update, alpha=-1e-3)
            mean.mul_(0.999).add_(param.grad, alpha=0.001)  # type: ignore[arg-type]

    return step


@pytest.mark.parametrize("name", ["cpu_adam", "cpu_adam_l2", "fused_adam", "fused_adam_l2", "adagrad", "lion"])
def test_optimizers_equal_torchs(name: str) -> None:
    """DeepSpeed's optimizers, with its defaults, produce the parameters of torch's or of the paper's rule."""
    ours, plain = seeded(lambda: nn.Linear(8, 8)), seeded(lambda: nn.Linear(8, 8))
    made: dict[str, tuple[Any, Any]] = {
        "cpu_adam": (lambda p: DeepSpeedCPUAdam(p), lambda p: torch.optim.AdamW(p, weight_decay=0.0)),
        "cpu_adam_l2": (
            lambda p: DeepSpeedCPUAdam(p, weight_decay=0.1, adamw_mode=False),
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
        ),
        "fused_adam": (lambda p: FusedAdam(p), lambda p: torch.optim.AdamW(p, weight_decay=0.0)),
        "fused_adam_l2": (
            lambda p: FusedAdam(p, weight_decay=0.1, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
        ),
        "adagrad": (lambda p: DeepSpeedCPUAdagrad(p), lambda p: torch.optim.Adagrad(p)),
        "lion": (lambda p: DeepSpeedCPULion(p, weight_decay=0.1), lambda p: SimpleNamespace(step=lion(p))),
    }
    optimizer, reference = (
        make(list(model.parameters())) for make, model in zip(made[name], (ours, plain), strict=True)
    )
    for number in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        for model in (ours, plain):
            model.zero_grad()
            model(x).square().mean().backward()
        optimizer.step()
        reference.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_16_bit_parameter_has_an_fp32_master() -> None:
    """Updates below bf16's resolution accumulate in the master of DeepSpeedCPULion."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPULion([param], lr=1e-3)
    for _ in range(10):
        param.grad = torch.ones_like(param)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["master"], torch.full((4,), 0.99))
    assert torch.equal(param, torch.full((4,), 0.99).bfloat16())


def test_arguments_that_would_change_results_are_refused() -> None:
    """bias_correction=False, amsgrad and 16-bit moments without kernels raise."""
    params = [nn.Parameter(torch.ones(2))]
    for make in (
        lambda: DeepSpeedCPUAdam(params, bias_correction=False),
        lambda: DeepSpeedCPUAdam(params, amsgrad=True),
        lambda: FusedAdam(params, amsgrad=True),
        lambda: DeepSpeedCPULion(params, fp32_optimizer_states=False),
        lambda: DeepSpeedCPUAdagrad(params, lr=-1.0),
    ):
        with pytest.raises(ConfigError):
            make()


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_checkpointing_recomputes_with_the_same_gradients(opens: Opens) -> None:
    """A block under `deepspeed.checkpointing.checkpoint` trains as without it; settings that are on are refused."""
    deepspeed.checkpointing.configure(None, partition_activations=False)
    assert deepspeed.checkpointing.is_configured()
    calls = []

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(block)
        result: torch.Tensor = deepspeed.checkpointing.checkpoint(block, x)
        return result

    engines = opens(3, model=seeded(lambda: Stack(run=run))), opens(3)
    [batch] = token_batches(1)
    for engine in engines:
        engine.backward(engine(*batch))
        engine.step()
    first, second = (engine.module_state_dict() for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in second) and len(calls) == 6
    with pytest.raises(UsageError, match="partition_activations=True"):
        deepspeed.checkpointing.configure(None, partition_activations=True)


def test_one_process_has_a_group_of_its_own(opens: Opens) -> None:
    """Without a launcher, `init_distributed` makes a group of one rank, in which collectives work."""
    comm = deepspeed.comm
    opens()
    deepspeed.init_distributed()
    assert comm.is_initialized() and (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
    value = torch.ones(2)
    comm.all_reduce(value, prof=True, log_name="sum")
    comm.barrier()
    assert torch.equal(value, torch.ones(2))
    with pytest.raises(AttributeError, match="use torch"):
        comm.enable_symm_mem_for_group  # noqa: B018


def test_the_accelerator_is_torchs() -> None:
    """`get_accelerator` describes CUDA or the CPU."""
    accelerator = deepspeed.get_accelerator()
    assert accelerator.device_name() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert accelerator.device_count() >= 1 and accelerator.total_memory() > accelerator.available_memory() > 0
    assert accelerator.on_accelerator(torch.empty(1, device=accelerator.current_device_name()))
    accelerator.manual_seed(3)
    assert accelerator.initial_seed() == 3
    with pytest.raises(AttributeError, match="has no 'warp_drive'"):
        accelerator.warp_drive  # noqa: B018


def test_an_accelerator_is_waited_for_and_pins_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has nothing to wait for and no pinned memory."""
    waits: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    cpu, cuda = Accelerator("cpu"), Accelerator("cuda")
    cpu.synchronize(1)
    cuda.synchronize(2)
    assert waits == [2]
    for pinned in (True, False):
        tensor: Any = SimpleNamespace(is_pinned=lambda pinned=pinned: pinned)
        assert not cpu.is_pinned(tensor) and cuda.is_pinned(tensor) == pinned


def test_loaders_repeat_and_objects_move() -> None:
    """`RepeatingLoader` starts again; `move_to_device` and `clone_tensors_for_torch_save` keep the structure."""
    loader = deepspeed.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    from infinity.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from infinity.deepspeed.runtime.utils import move_to_device

    assert move_to_device({"a": [torch.ones(1)], "b": 3}, "meta")["a"][0].device.type == "meta"
    whole = torch.arange(100)
    copied = clone_tensors_for_torch_save({"x": whole[:2]})["x"]
    assert copied.untyped_storage().nbytes() == 16 and torch.equal(copied, whole[:2])


def test_fp32_weights_are_read_from_a_checkpoint(opens: Opens, tmp_path: Path) -> None:
    """The masters of a bf16 model, tied weights included, load into a plain model; the converted file has them too."""
    engine = opens(2, model=seeded(lambda: Stack(tied=True)), bf16={"enabled": True})
    [batch] = token_batches(1)
    engine.backward(engine(*batch))
    engine.step()
    engine.save_checkpoint(tmp_path)
    masters = {
        name: deepspeed.utils.safe_get_full_fp32_param(parameter)
        for name, parameter in engine.module.named_parameters()
    }
    states = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert all(torch.equal(states[name], value) for name, value in masters.items())
    model = load_state_dict_from_zero_checkpoint(Stack(tied=True), tmp_path)
    assert torch.equal(model.head.weight, masters["embedding.weight"])
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert set(written) == set(states)
    with pytest.raises(UsageError, match="more than max_shard_size"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "small", max_shard_size="1KB")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "safe", safe_serialization=True)
    assert (tmp_path / "safe" / "model.safetensors").is_file()


def test_the_script_in_the_folder_of_checkpoints_writes_fp32_weights(opens: Opens, tmp_path: Path) -> None:
    """save_checkpoint leaves zero_to_fp32.py, as DeepSpeed; `-m` runs it for DeepSpeed's own checkpoints, too."""
    engine = opens(3)
    engine.save_checkpoint(tmp_path)
    states = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    command = [sys.executable, tmp_path / "zero_to_fp32.py", tmp_path, tmp_path / "out", "--safe_serialization"]
    subprocess.run(command, check=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == states.keys() and all(torch.equal(written[name], states[name]) for name in states)
    folder = Path(__file__).parents[1] / "integrations" / "deepspeed_checkpoints" / "stage2-frozen"
    module = [sys.executable, "-m", "infinity.deepspeed", "-m", "deepspeed.utils.zero_to_fp32"]
    subprocess.run([*module, folder, tmp_path / "theirs"], check=True)
    assert (tmp_path / "theirs" / "pytorch_model.bin").is_file()


def test_a_checkpoint_of_deepspeed_says_how_to_convert_it(opens: Opens) -> None:
    folder = Path(__file__).parents[1] / "integrations" / "deepspeed_checkpoints" / "stage2-frozen"
    with pytest.raises(CheckpointError, match="it is DeepSpeed's, convert it with `infinity import-deepspeed`"):
        opens(2).load_checkpoint(folder)


def test_fp32_weights_are_read_from_deepspeeds_own_checkpoint(tmp_path: Path) -> None:
    """A folder that DeepSpeed wrote gives the state dict of DeepSpeed's script, in memory and in a file."""
    folder = Path(__file__).parents[1] / "integrations" / "deepspeed_checkpoints" / "stage2-frozen"
    expected = load_file(folder / "fp32.safetensors")
    states = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert states.keys() == expected.keys()
    assert all(torch.equal(states[name], value) for name, value in expected.items())
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert states.keys() - trained.keys() == {"blocks.0.up.weight", "blocks.0.up.bias"}
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    model = load_state_dict_from_zero_checkpoint(TinyModel(), folder)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


# -- tiled layers ------------------------------------------------------------------------------------------------------


def test_a_tiled_layer_takes_deepspeeds_arguments() -> None:
    """It computes what the copied layer does, in parts or as one."""
    plain = nn.Linear(10, 7)
    x = torch.randn(3, 10)
    layer = deepspeed.zero.TiledLinear(10, 7, in_splits=3, out_splits=2, init_linear=plain)
    assert [[*map(type, row)] for row in layer.linears] == [[type(layer.tiles[0])] * 3] * 2
    torch.testing.assert_close(layer(x), plain(x))
    parts = deepspeed.zero.TiledLinear(
        10, 7, True, 3, 2, input_is_already_split=True, combine_out_splits=False, init_linear=plain, dtype=torch.float32
    )
    outputs = parts(x.split([4, 3, 3], -1))
    assert isinstance(outputs, list) and [each.shape[-1] for each in outputs] == [4, 3]
    torch.testing.assert_close(torch.cat(outputs, -1), plain(x))
    with pytest.raises(UsageError, match="the input has 2 parts"):
        parts(x.split(5, -1))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tiled_layer_of_an_engine_is_copied_and_loaded_whole(stage: int, opens: Opens) -> None:
    plain = nn.Linear(8, 6)
    model = nn.Sequential(deepspeed.zero.TiledLinear(8, 6, out_splits=3), nn.Linear(6, 2))
    engine = opens(stage, model)
    engine.module[0].copy_params_from(plain)
    states = engine.module_state_dict()
    assert torch.equal(states["0.weight"], plain.weight) and torch.equal(states["0.bias"], plain.bias)
    states = {name: torch.randn_like(value) for name, value in states.items()}
    engine.load_module_state_dict({"module": states})
    assert all(torch.equal(value, states[name]) for name, value in engine.module_state_dict().items())
    with pytest.raises(UsageError, match=r"0.weight has shape \[6, 8\], the value \[2, 8\]"):
        engine.load_module_state_dict({"module": {**states, "0.weight": torch.zeros(2, 8)}})
    engine.module[0].requires_grad_(False)
    assert {*engine.module_state_dict(exclude_frozen_parameters=True)} == {"1.weight", "1.bias"}


def test_other_tiles_than_linear_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="linear_cls=Bilinear"):
        deepspeed.zero.TiledLinear(8, 6, linear_cls=nn.Bilinear)
    with pytest.raises(UsageError, match="no argument init_method"):
        deepspeed.zero.TiledLinear(8, 6, init_method=None)
    with pytest.raises(UsageError, match="the layer to copy has shapes"):
        deepspeed.zero.TiledLinear(8, 6, init_linear=nn.Linear(8, 5))
    with pytest.raises(AttributeError, match="TiledLinearReturnBias is not supported"):
        _ = deepspeed.zero.TiledLinearReturnBias
