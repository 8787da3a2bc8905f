"""Names that libraries read when they are imported: they are there, and uses without a counterpart raise by name."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infinity.deepspeed.runtime import swap_tensor
from infinity.deepspeed.utils.zero_to_fp32 import get_model_state_file, get_model_state_files, get_optim_files
from torch import nn

import infinity.deepspeed as deepspeed
from infinity.errors import CheckpointError, ConfigError, UsageError
from infinity.plan.placement import State
from infinity.sizes import show_bytes

Opens = Callable[..., Any]
MAX_IN_CPU = "zero_optimization.offload_param.max_in_cpu"

REFUSED = {
    "PipelineModule": "torch.distributed.pipelining",
    "PipelineEngine": "torch.distributed.pipelining",
    "pipe.LayerSpec": "torch.distributed.pipelining",
    "runtime.pipe.engine.PipelineEngine": "torch.distributed.pipelining",
    "runtime.pipe.topology.PipeModelDataParallelTopology": "torch.distributed.pipelining",
    "runtime.pipe.schedule.TrainSchedule": "torch.distributed.pipelining",
    "runtime.pipe.module.TiedLayerSpec": "torch.distributed.pipelining",
    "runtime.pipe.ProcessTopology": "torch.distributed.pipelining",
    "moe.layer.MoE": "experts are trained as parameters of their block",
    "moe.sharded_moe.top1gating": "experts are trained as parameters of their block",
    "moe.experts.Experts": "experts are trained as parameters of their block",
    "moe.mappings.gather_tokens": "experts are trained as parameters of their block",
    "module_inject.layers.LinearLayer": "torch.distributed.tensor.parallel",
    "module_inject.replace_transformer_layer": "pass the model unchanged",
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": "context_parallel",
    "runtime.sequence_parallel.ulysses_sp.TiledMLP": "on chunks of the sequence under torch.utils.checkpoint",
    "runtime.sequence_parallel.ulysses_sp.sequence_tiled_compute": "on chunks of the sequence",
}
"""Name below the package → a part of the error."""


@pytest.mark.parametrize("path", REFUSED)
def test_names_without_a_counterpart_are_imported_and_refused_when_used(path: str) -> None:
    """Imports, isinstance and derived classes work; calls and attributes name the class and the alternative."""
    home, _, name = path.rpartition(".")
    module = importlib.import_module(f"infinity.deepspeed{home and '.'}{home}")
    kind = getattr(module, name)
    assert not isinstance(nn.Linear(2, 2), kind)
    derived = type("Derived", (kind, nn.Module), {})
    for make in (lambda: kind(1, option=2), derived):
        with pytest.raises(UsageError, match=f"DeepSpeed's {name} has no counterpart in Infinity: .*{REFUSED[path]}"):
            make()
    with pytest.raises(AttributeError, match=rf"{name}\.apply was read, and DeepSpeed's {name} has no counterpart"):
        kind.apply  # noqa: B018
    assert getattr(module, name) is kind and not hasattr(module, "Nothing")
    value: Any = deepspeed
    for part in path.split("."):
        value = getattr(value, part)
    assert value is kind


def test_versions_and_operators() -> None:
    """`git_version_info` describes the torch that runs; operators that exist are compatible."""
    info = deepspeed.git_version_info
    assert info.version == deepspeed.version == deepspeed.__version__
    assert torch.__version__.startswith(info.torch_info["version"]) and info.torch_info["bf16_support"] is True
    operators = deepspeed.ops.__compatible_ops__
    builders = deepspeed.ops.op_builder.ALL_OPS
    assert operators is info.compatible_ops and operators[deepspeed.ops.aio.AsyncIOBuilder.NAME] is True
    assert not operators["gds"] and not operators["transformer_inference"]
    assert {name: kind().is_compatible() for name, kind in builders.items()}.items() <= operators.items()


def test_functions_of_libraries_checks() -> None:
    """The accelerator, torch's version, experts, layers, tensor parallelism, elasticity and sequence parallelism."""
    assert deepspeed.get_accelerator().is_current_accelerator_supported()
    assert deepspeed.accelerator.is_current_accelerator_supported()
    assert deepspeed.utils.is_initialized() is torch.distributed.is_initialized()
    utils = importlib.import_module("infinity.deepspeed.utils.torch")
    assert utils.required_torch_version(min_version=2.1) and not utils.required_torch_version(min_version="99.1")
    assert utils.required_torch_version(max_version="99") and not utils.required_torch_version(max_version=2.1)
    assert not utils.is_functorch_transforming()
    torch.func.grad(lambda x: x * utils.is_functorch_transforming())(torch.ones(()))
    model = nn.Linear(2, 2)
    seen: list[Any] = []
    utils.register_grad_hook(model.bias, seen.append)
    model(torch.ones(1, 2)).sum().backward()
    assert [each is model.bias for each in seen] == [True]
    groups = [{"params": list(model.parameters())}]
    experts = deepspeed.moe.utils
    assert experts.has_moe_layers(model) == (False, 0) and not experts.is_moe_param_group(groups[0])
    assert experts.split_params_into_different_moe_groups_for_optimizer(groups) == groups
    model.bias.allreduce = False  # type: ignore[attr-defined]
    shared, of_one_rank = experts.split_params_into_shared_and_expert_params(model.parameters())
    assert shared[0] is model.weight and of_one_rank[0] is model.bias
    with pytest.raises(UsageError, match="marked by allreduce = False"):
        experts.split_params_into_different_moe_groups_for_optimizer(groups[0])
    with deepspeed.module_inject.layers.GatherReplacedLayerParams([model.weight], model, enabled=True) as entered:
        assert entered is None
    assert deepspeed.tp_model_init(model, tp_size=1, dtype=torch.float32) is model
    with pytest.raises(ConfigError, match=r"tp_size=2\) has no counterpart.*torch\.distributed\.tensor\.parallel"):
        deepspeed.tp_model_init(model=model, tp_size=2, dtype=torch.float32, config={})
    elastic = {"elasticity": {"enabled": True, "max_train_batch_size": 8}}
    assert deepspeed.elasticity.elasticity_enabled(elastic) and not deepspeed.elasticity.elasticity_enabled({})
    with pytest.raises(deepspeed.elasticity.ElasticityError, match=r"'max_train_batch_size': 8.*set train_batch_size"):
        deepspeed.elasticity.compute_elastic_config(elastic, deepspeed.git_version_info.version, world_size=2)
    sequences = deepspeed.runtime.sequence_parallel.parallel_state_sp
    sequences.initialize_sequence_parallel(1)
    assert (sequences.get_sequence_parallel_world_size(), sequences.get_sequence_parallel_rank()) == (1, 0)
    with pytest.raises(UsageError, match="sequence_parallel_size is 2"):
        sequences.initialize_sequence_parallel(2)


def test_initialize_logs_deepspeeds_line_of_the_version(opens: Opens, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=deepspeed.logger.name):
        opens()
    assert f"DeepSpeed info: version={deepspeed.__version__}" in caplog.text


def test_initialize_sums_up_the_states_where_only_warnings_are_shown(
    opens: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' Trainer shows no more by default. The details at level INFO have the same lines."""
    with caplog.at_level(logging.WARNING, logger=deepspeed.logger.name):
        caplog.handler.setLevel(logging.NOTSET)
        engine = opens(3)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    name, *lines = caplog.messages[0].splitlines()
    assert name == f"states of {type(engine.module).__name__}"
    assert any(line.startswith("this rank holds ") for line in lines)
    assert engine.training_engine.describe().endswith("\n\n" + "\n".join(lines))


@pytest.mark.parametrize("own", [False, True], ids=["config", "script"])
def test_the_summary_names_the_scheduler_of_the_config(
    own: bool, opens: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses differ from those with a Trainer's schedule. A schedule of the script comes before the config's."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    given = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)} if own else {}
    with caplog.at_level(logging.WARNING, logger=deepspeed.logger.name):
        caplog.handler.setLevel(logging.NOTSET)
        opens(3, scheduler=scheduler, given=given)
    assert ("the config's WarmupLR sets the learning rates" in caplog.text) is not own


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING], ids=["loop", "trainer"])
def test_the_summary_names_the_key_that_keeps_states_in_memory(
    level: int, opens: Opens, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """In DeepSpeed's words, with the bytes. Without the key no line names it."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    with caplog.at_level(level, logger=deepspeed.logger.name):
        caplog.handler.setLevel(logging.NOTSET)
        for more, count in (({}, 0), ({"max_in_cpu": 1e9}, 1)):
            caplog.clear()
            engine = opens(3, zero_optimization={"offload_param": {**nvme, **more}, "offload_optimizer": nvme})
            extents = engine.training_engine.parts.plan.placement.extents
            nbytes = show_bytes(sum(extent.nbytes for (_, state), extent in extents.items() if state is State.PARAM))
            line = f"{MAX_IN_CPU} 1e+09 keeps {nbytes} of parameters in host memory instead of on nvme"
            assert caplog.text.splitlines().count(line) == count, caplog.text


def test_files_of_a_checkpoint_hold_its_stage_and_client_state(opens: Opens, tmp_path: Path) -> None:
    """Both are read as in DeepSpeed's folders, in which the files are DeepSpeed's own, in the order of ranks."""
    engine = opens(3)
    engine.save_checkpoint(tmp_path, tag="saved", client_state={"epoch": 3})
    folder = tmp_path / "saved"
    before = sorted(path.name for path in folder.iterdir())
    stage = torch.load(get_optim_files(folder)[0], weights_only=False)["optimizer_state_dict"]["zero_stage"]
    assert torch.load(get_model_state_file(folder, stage), weights_only=False) == {"epoch": 3}
    assert sorted(path.name for path in folder.iterdir()) == before
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        get_optim_files(tmp_path)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for rank in (10, 0, 2):
        for kind in ("model", "optim"):
            (theirs / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt").touch()
    ranks = [Path(path).name.split("_")[3] for path in get_optim_files(theirs)]
    assert ranks == ["0", "2", "10"] and len(get_model_state_files(theirs)) == 3
    assert Path(get_model_state_file(theirs, 3)).name == "zero_pp_rank_0_mp_rank_00_model_states.pt"


def test_the_level_of_a_logger_is_set_by_name() -> None:
    logger = logging.Logger("other")
    logger.addHandler(logging.NullHandler())
    deepspeed.utils.set_log_level_from_string("Error", logger)
    assert logger.level == logger.handlers[0].level == logging.ERROR
    with pytest.raises(ValueError, match="log level is 'loud': pass one of debug, info"):
        deepspeed.utils.set_log_level_from_string("loud")


def test_names_without_effect(opens: Opens) -> None:
    assert opens().sparse_tensor_module_names == set()
    assert swap_tensor.MIN_SWAPPABLE_BYTES == 2**20
