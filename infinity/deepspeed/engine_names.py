"""Names of DeepSpeed 0.19.8's `DeepSpeedEngine` that read the config, names that are refused, and names in arguments.

`infinity.deepspeed.engine` generates one method for each. Its class body defines the names that do something.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

from infinity.deepspeed.tree import TENSOR_PARALLEL

_ZERO = "zero_optimization."
_CPU = _ZERO + "offload_optimizer."

GETTERS: dict[str, tuple[str, Any]] = {
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
    "memory_breakdown": ("memory_breakdown", False),
    "autotuning_enabled": ("autotuning.enabled", False),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "data_sampling_enabled": ("data_efficiency.data_sampling.enabled", False),
    "curriculum_learning_enabled": ("data_efficiency.data_sampling.curriculum_learning.enabled", False),
    "random_ltd_enabled": ("data_efficiency.data_routing.random_ltd.enabled", False),
    "optimizer_params": ("optimizer.params", None),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "zero_reduce_scatter": (_ZERO + "reduce_scatter", True),
    "zero_reduce_bucket_size": (_ZERO + "reduce_bucket_size", 500_000_000),
    "zero_multi_rank_bucket_allreduce": (_ZERO + "use_multi_rank_bucket_allreduce", True),
    "zero_allgather_partitions": (_ZERO + "allgather_partitions", True),
    "zero_allgather_bucket_size": (_ZERO + "allgather_bucket_size", 500_000_000),
    "zero_allgather_sequential": (_ZERO + "stage3_allgather_sequential", False),
    "zero_contiguous_gradients": (_ZERO + "contiguous_gradients", True),
    "zero_compute_grad_norm": (_ZERO + "compute_grad_norm", True),
    "zero_load_from_fp32_weights": (_ZERO + "load_from_fp32_weights", True),
    "zero_elastic_checkpoint": (_ZERO + "elastic_checkpoint", False),
    "zero_sub_group_size": (_ZERO + "sub_group_size", 1_000_000_000),
    "zero_max_live_parameters": (_ZERO + "stage3_max_live_parameters", 1_000_000_000),
    "zero_max_reuse_distance": (_ZERO + "stage3_max_reuse_distance", 1_000_000_000),
    "zero_prefetch_bucket_size": (_ZERO + "stage3_prefetch_bucket_size", 50_000_000),
    "zero_module_granularity_threshold": (_ZERO + "stage3_module_granularity_threshold", 0),
    "zero_param_persistence_threshold": (_ZERO + "stage3_param_persistence_threshold", 100_000),
    "zero_model_persistence_threshold": (_ZERO + "stage3_model_persistence_threshold", sys.maxsize),
    "zero_gather_16bit_weights_on_model_save": (_ZERO + "stage3_gather_16bit_weights_on_model_save", False),
    "zero_legacy_stage1": (_ZERO + "legacy_stage1", False),
    "zero_ignore_unused_parameters": (_ZERO + "ignore_unused_parameters", True),
    "zero_round_robin_gradients": (_ZERO + "round_robin_gradients", False),
    "zero_parameter_alignment": (_ZERO + "parameter_alignment", False),
    "zero_hpz_partition_size": (_ZERO + "zero_hpz_partition_size", 1),
    "zero_quantized_weights": (_ZERO + "zero_quantized_weights", False),
    "zero_quantized_nontrainable_weights": (_ZERO + "zero_quantized_nontrainable_weights", False),
    "zero_quantized_gradients": (_ZERO + "zero_quantized_gradients", False),
    "zero_log_trace_cache_warnings": (_ZERO + "log_trace_cache_warnings", False),
    "zero_save_muon_momentum_buffer_in_memory": (_ZERO + "save_muon_momentum_buffer_in_memory", False),
    "zero_offload_optimizer": (_ZERO + "offload_optimizer", None),
    "zero_offload_param": (_ZERO + "offload_param", None),
    "zero_partial_offload": (_CPU + "ratio", 1.0),
    "super_offload": (_CPU + "super_offload", False),
    "cpuadam_cores_perc": (_CPU + "cpuadam_cores_perc", 0.9),
    "zenflow_config": (_ZERO + "zenflow", None),
    "is_sanity_checks_enabled": (_ZERO + "enable_sanity_checks", False),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "fp16_master_weights_and_gradients": ("fp16.fp16_master_weights_and_grads", False),
    "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
    "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "loss_scale": ("fp16.loss_scale", 0),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "log_level": ("log_level", None),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "steps_per_print": ("steps_per_print", None),
    "dump_state": ("dump_state", False),
    "aio_config": ("aio", None),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "is_deepcompile_enabled": ("compile.deepcompile", False),
}
"""Name of a method → the dotted key of DeepSpeed's JSON whose value it returns, and DeepSpeed's default."""

_INSTEAD = {
    "there is no curriculum learning or random layer token dropping: choose the samples in the data loader": """
        set_custom_curriculum_learning_schedule data_efficiency_config data_sampling_config curriculum_learning_config
        random_ltd_config random_ltd_initialize
    """,
    "there is no autotuning: `infinity tune` measures a drive's best I/O settings": """
        autotuning_start_profile_step autotuning_end_profile_step autotuning_metric_path autotuning_model_info_path
        autotuning_metric autotuning_profile_model_info
    """,
    "checkpoints hold each parameter once, in safetensors: use save_checkpoint() and load_checkpoint()": (
        "checkpoint_serialization_enabled checkpoint_writer_enabled"
    ),
    "experts are parameters of their block: use load_checkpoint()": "load_moe_state_dict",
    TENSOR_PARALLEL: """
        get_tensor_parallel_rank get_model_parallel_rank get_sequence_parallel_group tensor_parallel_config
        autotp_size compile_autotp get_autotp_backend
    """,
    "pass torch.compile(model) as model to initialize()": """
        compile compile_zero_optimization_stage compile_autosp uses_parallelization_pass_only get_autosp_backend
        get_deepcompile_backend get_deepspeed_compile_backend get_compile_time register_compile_pass
    """,
    "the tiers' files are set by nvme_path and the section aio": "swap_tensor_config",
    "micro-batches and gradient buffers are fixed when the engine is constructed: pass another config": (
        "set_train_micro_batch_size"
    ),
    "wrap the data loader, or pass collate_fn to initialize()": "set_data_post_process_func",
    "the optimizer is constructed from the config: read engine.optimizer": "get_optimizer_configuration",
    "there are no timers of mixtures of experts: use torch.profiler": "print_forward_breakdown",
    "engine.training_engine.ledger.snapshot() returns the seconds and bytes so far": "get_wall_clock_timers",
    "use engine.no_sync(), or gradient_accumulation_steps": "coalesce_grad_reduction",
    "set gradient_clipping in the config, which clips in engine.step()": "clip_fp32_gradients",
    "gradients are reduced unit by unit during backward: use torch.distributed for other tensors": (
        "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback all_gather_scalar"
    ),
    "gradients are dense: construct embeddings with sparse=False": (
        "sparse_allreduce_no_retain sparse_allreduce_bucket sparse_allreduce sparse_all_gather"
    ),
}
"""A sentence on what to use instead → names without a counterpart."""

REFUSED = {name: instead for instead, names in _INSTEAD.items() for name in names.split()}
"""Name → a sentence on what to use instead."""


def read(settings: Any, key: str, default: Any = None) -> Any:
    """Return the value of the dotted `key` in the config `settings`, or `default` where a part of it is absent."""
    value = settings
    for part in key.split("."):
        if not isinstance(value, dict) or value.get(part) is None:
            return default
        value = value[part]
    return value


def scaler_arguments(fp16: Any, init_scale: float) -> dict[str, Any]:
    """Return the parameters of the dynamic scale in section `fp16`, under the names of DeepSpeed's loss scaler."""
    return {
        "init_scale": init_scale,
        "scale_window": fp16.loss_scale_window,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_scale": fp16.min_loss_scale,
    }


class OffloadDeviceEnum(str, Enum):
    """Destination of offloaded states."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Names of states for `engine.offload_states`. lp: in the model's dtype; hp: in fp32."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
