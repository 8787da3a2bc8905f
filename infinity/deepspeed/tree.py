"""DeepSpeed's modules that have no file here: their paths below the package, and where their names come from.

`mirror` makes each when it is imported. Adding a module or a name of DeepSpeed is a row here.

Its other tables hold names and packages of DeepSpeed that have no counterpart.

Modules of parallelism can be imported, since libraries import them for isinstance: their names are placeholder
classes, which have no instances. Other names and packages are missing, with an error that names the alternative.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from infinity.errors import UsageError

_ABSENT = {
    "DeepSpeedHybridEngine": "engine.generate() runs the model that is being trained",
    "DeepSpeedTransformerLayer": "use torch.nn.functional.scaled_dot_product_attention",
    "DeepSpeedTransformerConfig": "use torch.nn.functional.scaled_dot_product_attention",
    "replace_transformer_layer": "pass the model unchanged, since no kernels are injected",
    "compression": "use torchao",
    "monitor": "call engine.monitor.write_events()",
    "profiling": "set flops_profiler in the config",
    "sequence": "use torch.distributed.tensor.parallel",
    "OnDevice": "use `with torch.device('meta')`, or zero.Init",
}
"""DeepSpeed's names that have no counterpart → what to use instead."""


def alternative(name: str) -> str | None:
    """Return an error text with the alternative to `deepspeed.<name>`; None if the name is not one of DeepSpeed's."""
    if name not in _ABSENT:
        return None
    return f"deepspeed.{name} has no counterpart in Infinity: {_ABSENT[name]}"


class _Placeholder(type):
    """Type of placeholder classes and of classes derived from them, which libraries define when they are imported."""

    _refusal: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(cls._refusal)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"{cls.__name__}.{name} was read, and {cls._refusal}")


@cache
def placeholder(name: str, instead: str) -> type:
    """Return the placeholder class `name`, the same one for the same arguments. A call of it raises UsageError."""
    refusal = f"DeepSpeed's {name} has no counterpart in Infinity: {instead}"
    return _Placeholder(name, (), {"_refusal": refusal, "__doc__": f"Placeholder: {instead}."})


PIPELINE = "use torch.distributed.pipelining"
EXPERTS = "experts are trained as parameters of their block, without expert parallelism: pass the model as it is"
TENSOR_PARALLEL = "use torch.distributed.tensor.parallel, and pass process_group to infinity.initialize()"
SEQUENCE = "use torch.distributed.tensor.experimental.context_parallel"
KERNELS = "pass the model unchanged, since no kernels are injected"
TILES = (
    "call the module on chunks of the sequence under torch.utils.checkpoint, and concatenate; infinity.nn.TiledLinear "
    "splits the weights"
)


WHOLE = {
    "ops.aio_handle": "aio_handle",
    "ops.op_builder": "op_builder",
    "runtime.activation_checkpointing.checkpointing": "recompute",
    "runtime.zero.partition_parameters": "zero_init",
    "runtime.zero.tiling": "tiling",
    "utils.tensor_fragment": "tensor_fragment",
    "utils.z3_leaf_module": "leaf_modules",
    "utils.zero_to_fp32": "zero_to_fp32",
}
"""Path → the module of this package that it is."""

_FRAGMENTS = """
    safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
    safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
    safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
    safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized
"""
_LEAVES = """
    get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
    set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter
"""
_GROUPS = """
    get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_rank
    get_model_parallel_world_size get_tensor_model_parallel_rank get_tensor_model_parallel_world_size
"""
_SEQUENCE_GROUPS = """
    get_sequence_data_parallel_rank get_sequence_data_parallel_world_size get_sequence_parallel_rank
    get_sequence_parallel_world_size initialize_sequence_parallel
"""
_EXPERTS = """
    has_moe_layers is_moe_param is_moe_param_group split_params_into_different_moe_groups_for_optimizer
    split_params_into_shared_and_expert_params
"""
_ELASTICITY = """
    ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize compute_elastic_config elasticity_enabled
"""
_ZERO_SECTIONS = """
    DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig ZERO_OPTIMIZATION
    ZeroStageEnum get_zero_config DeepSpeedConfigModel DeepSpeedZeroLeafModuleConfig
"""
_LEAF_SECTION = """
    DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES DeepSpeedConfigModel
    DeepSpeedZeroLeafModuleConfig
"""
_PRECISION = """
    BFLOAT16 BFLOAT16_OLD DeepSpeedBF16Config DeepSpeedConfigModel DeepSpeedFP16Config get_bfloat16_config
    get_float16_config
"""
_ZERO = """
    DeepSpeedZeRoOffload GatheredParameters Init ZeroParamStatus register_external_parameter
    unregister_external_parameter unwrap_model_for_generation
"""
_OFFLOAD = "OffloadDeviceEnum OffloadStateTypeEnum"
_SCHEDULES = "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR"

NAMES: dict[str, dict[str, str]] = {
    "checkpoint.utils": {"helpers": "clone_tensors_for_torch_save"},
    "elasticity": {"parallel": _ELASTICITY},
    "module_inject.layers": {"parallel": "GatherReplacedLayerParams"},
    "moe.utils": {"parallel": _EXPERTS},
    "offload_names": {"engine_names": _OFFLOAD},  # in pickles of former versions
    "ops": {"op_builder": "__compatible_ops__=compatible_ops"},
    "ops.adagrad": {"optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {"optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "ops.aio": {"op_builder": "AsyncIOBuilder"},
    "ops.lion": {"optimizers": "DeepSpeedCPULion FusedLion"},
    "runtime.base_optimizer": {
        "infinity.engine.optimizer": "DeepSpeedOptimizer=UnitOptimizer ZeROOptimizer=UnitOptimizer"
    },
    "runtime.config": {
        "config": "DEEPSPEED_OPTIMIZERS DeepSpeedConfig DeepSpeedConfigError get_gradient_clipping get_log_level"
    },
    "runtime.config_utils": {"helpers": "logger", "sections": "DeepSpeedConfigModel"},
    "runtime.constants": {"engine": "ROUTE_TRAIN"},
    "runtime.dataloader": {"helpers": "RepeatingLoader"},
    "runtime.engine": {"engine": "DeepSpeedEngine"},
    "runtime.lr_schedules": {"infinity.engine.schedules": _SCHEDULES},
    "runtime.precision_config": {"sections": _PRECISION},
    "runtime.sequence_parallel.parallel_state_sp": {"parallel": _SEQUENCE_GROUPS},
    "runtime.utils": {"helpers": "logger move_to_device see_memory_usage"},
    "runtime.zero": {"zero_init": _ZERO, "tiling": "TiledLinear"},
    "runtime.zero.config": {"sections": _ZERO_SECTIONS, "engine_names": "OffloadDeviceEnum"},
    "runtime.zero.leaf_module_config": {"sections": _LEAF_SECTION},
    "runtime.zero.offload_config": {
        "engine_names": _OFFLOAD,
        "sections": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
    },
    "runtime.zero.parameter_offload": {"zero_init": "DeepSpeedZeRoOffload"},
    "utils": {
        "comm": "is_initialized",
        "helpers": "RepeatingLoader log_dist logger set_log_level_from_string",
        "leaf_modules": _LEAVES,
        "tensor_fragment": _FRAGMENTS,
    },
    "utils.groups": {"parallel": _GROUPS},
    "utils.logging": {"helpers": "log_dist logger set_log_level_from_string"},
    "utils.torch": {"helpers": "is_functorch_transforming register_grad_hook required_torch_version"},
}
"""Path → module below this package, or a whole path → the names in it; `a=b`: its `b` is `a`."""

PLACEHOLDERS: dict[str, dict[str, str]] = {
    "module_inject": {
        KERNELS: "replace_transformer_layer revert_transformer_layer quantize_transformer_layer DSPolicy"
    },
    "module_inject.layers": {
        TENSOR_PARALLEL: "LinearAllreduce LinearLayer LmHeadLinearAllreduce TensorParallel_Layer set_autotp_mode"
    },
    "moe.experts": {EXPERTS: "Experts"},
    "moe.layer": {EXPERTS: "MoE"},
    "moe.mappings": {EXPERTS: "gather_tokens drop_tokens"},
    "moe.sharded_moe": {EXPERTS: "MOELayer TopKGate top1gating top2gating topkgating"},
    "pipe": {PIPELINE: "PipelineModule LayerSpec TiedLayerSpec"},
    "runtime.pipe": {PIPELINE: "PipelineModule LayerSpec TiedLayerSpec ProcessTopology"},
    "runtime.pipe.engine": {PIPELINE: "PipelineEngine"},
    "runtime.pipe.module": {PIPELINE: "PipelineModule LayerSpec TiedLayerSpec PipelineError"},
    "runtime.pipe.schedule": {
        PIPELINE: "PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule PipeInstruction"
    },
    "runtime.pipe.topology": {
        PIPELINE: "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid"
    },
    "runtime.sequence_parallel.ulysses_sp": {
        SEQUENCE: "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter UlyssesSPFwdLossBwdWithLogits",
        TILES: """
            AutogradComputeMLP SequenceTiledCompute TiledFusedLogitsLoss TiledLoss TiledMLP sequence_tiled_compute
        """,
    },
}
"""Path → the alternative → names without a counterpart, which are placeholder classes."""

REFUSED = {
    "runtime.zero.TiledLinearReturnBias": (
        "deepspeed.zero.TiledLinearReturnBias is not supported: tiles return no bias of their own"
    ),
}
"""Path of a name that is missing → the text of its AttributeError."""

_SCHEDULE_PARAMETERS = """
    lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size lr_range_test_staircase
    cycle_first_step_size cycle_first_stair_count cycle_second_step_size cycle_second_stair_count
    cycle_min_lr cycle_max_lr cycle_min_mom cycle_max_mom decay_step_size decay_lr_rate decay_mom_rate
    warmup_min_lr warmup_max_lr warmup_num_steps warmup_type warmup_min_ratio cos_min_ratio total_num_steps
"""
_SCHEDULE_TYPES = {
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
}
_CONFIG_KEYS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping gradient_allreduce_op
    communication_data_type steps_per_print log_level optimizer scheduler fp16 zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer
"""

_OPTIMIZERS = """
    adagrad adam adamw lion lamb onebit_adam zero_one_adam onebit_lamb muadam muadamw musgd muon
"""

CONSTANTS: dict[str, dict[str, object]] = {
    "runtime.config": {
        **{f"{name.upper()}_OPTIMIZER": name.replace("_", "") for name in _OPTIMIZERS.split()},
        "TORCH_ADAM_PARAM": "torch_adam",
        "ADAM_W_MODE": "adam_w_mode",
        "ADAM_W_MODE_DEFAULT": True,
    },
    "runtime.constants": {
        **{key.upper(): key for key in _CONFIG_KEYS.split()},
        **{f"ROUTE_{route.upper()}": route for route in ("eval", "predict", "encode")},
        "BFLOAT16": "bf16",
        "GRADIENT_CLIPPING_DEFAULT": 1.0,
        "LOG_LEVEL_DEFAULT": None,
    },
    "runtime.lr_schedules": {
        **{parameter.upper(): parameter for parameter in _SCHEDULE_PARAMETERS.split()},
        **_SCHEDULE_TYPES,
        "LR_SCHEDULE": "lr_schedule",
        "VALID_LR_SCHEDULES": [*_SCHEDULE_TYPES.values()],
        "WARMUP_LINEAR_RATE": "linear",
        "WARMUP_LOG_RATE": "log",
    },
    # DeepSpeed keeps smaller tensors in memory. Here units of any size move to NVMe.
    "runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1 << 20},
}
"""Path → constants of the module."""
