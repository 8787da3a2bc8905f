"""Verdicts on the keys of DeepSpeed's section `zero_optimization`, as of version 0.19.8, and on older keys in use."""

from __future__ import annotations

import sys

from infinity.config.deepspeed.verdicts import Entry, mapped, no_effect, refused

_BUCKETS = "a unit is one all-gather and one reduce-scatter; infinity.unit_size sets its size"
_OVERLAP = "transfers and collectives always overlap the computation"
_SMALL = "small parameters are gathered with their unit"
_TRACE = "units are cached and evicted by the recorded trace"
_BUFFERS = "buffers follow from the model and infinity.tile_size"
_EXPORT = "checkpoints and exports hold every parameter unsharded"
_ONE_GROUP = "a unit is sharded over all ranks, which takes less memory"
_EXACT = "collectives transfer exact values: remove it"
_CHECKED = "every state transition of a unit is checked"

_PREFETCH = mapped("infinity.prefetch_bytes")
_LIVE = mapped("infinity.cache_bytes")

_ZERO: dict[str, Entry] = {
    "contiguous_gradients": no_effect("a unit's gradients are always contiguous", True),
    "reduce_scatter": no_effect(_BUCKETS, True),
    "reduce_bucket_size": no_effect(_BUCKETS, 5e8),
    "use_multi_rank_bucket_allreduce": no_effect(_BUCKETS, True),
    "allgather_partitions": no_effect(_BUCKETS, True),
    "allgather_bucket_size": no_effect(_BUCKETS, 5e8),
    "overlap_comm": no_effect(_OVERLAP, True),
    "compute_grad_norm": no_effect("the norm comes from sums that the update needs anyway", True),
    "load_from_fp32_weights": refused(
        "a checkpoint always restores the exact master: remove it", True, false_is_off=False
    ),
    "elastic_checkpoint": no_effect(_EXPORT),
    "zenflow": refused("gradients are applied whole and in their own step: remove it", whole=True, presence_is_on=True),
    "sub_group_size": mapped("infinity.tile_size", 1e9),
    "cpu_offload": mapped("zero_optimization.offload_optimizer.device"),
    "cpu_offload_param": mapped("zero_optimization.offload_param.device"),
    "cpu_offload_params": mapped("zero_optimization.offload_param.device"),
    "cpu_offload_use_pin_memory": no_effect("set pin_memory in offload_param and offload_optimizer", True),
    "prefetch_bucket_size": _PREFETCH,
    "stage3_prefetch_bucket_size": _PREFETCH,
    "max_live_parameters": _LIVE,
    "stage3_max_live_parameters": _LIVE,
    "max_reuse_distance": no_effect(_TRACE, 1e9),
    "stage3_max_reuse_distance": no_effect(_TRACE, 1e9),
    "param_persistence_threshold": no_effect(_SMALL, 1e5),
    "stage3_param_persistence_threshold": no_effect(_SMALL, 1e5),
    "model_persistence_threshold": no_effect(_SMALL, sys.maxsize),
    "stage3_model_persistence_threshold": no_effect(_SMALL, sys.maxsize),
    "gather_16bit_weights_on_model_save": no_effect(_EXPORT, True),
    "stage3_gather_16bit_weights_on_model_save": no_effect(_EXPORT, True),
    "stage3_gather_fp16_weights_on_model_save": no_effect(_EXPORT, True),
    "module_granularity_threshold": no_effect(_BUCKETS, 0),
    "stage3_module_granularity_threshold": no_effect(_BUCKETS, 0),
    "use_all_reduce_for_fetch_params": no_effect(_BUCKETS),
    "stage3_use_all_reduce_for_fetch_params": no_effect(_BUCKETS),
    "allgather_sequential": no_effect(_BUCKETS),
    "stage3_allgather_sequential": no_effect(_BUCKETS),
    "ignore_unused_parameters": no_effect("a parameter without a gradient is always allowed", True),
    "find_unused_parameters": no_effect("a parameter without a gradient is always allowed"),
    "legacy_stage1": no_effect("one implementation serves all stages"),
    "round_robin_gradients": no_effect("every rank offloads its own shards"),
    "parameter_alignment": no_effect("parameters are always aligned in their unit"),
    "zero_hpz_partition_size": no_effect(_ONE_GROUP, 0, 1),
    "mics_shard_size": no_effect(_ONE_GROUP, -1),
    "mics_hierarchical_params_gather": no_effect(_ONE_GROUP),
    "zero_quantized_weights": refused(_EXACT),
    "zero_quantized_nontrainable_weights": refused("frozen weights are stored in their own dtype: remove it"),
    "zero_quantized_gradients": refused(_EXACT),
    "zeropp_loco_param": refused(_EXACT, whole=True),
    "memory_efficient_linear": no_effect("autograd saves references for every module", True),
    "pipeline_loading_checkpoint": no_effect(_EXPORT),
    "override_module_apply": no_effect("Module.apply works on units", True),
    "log_trace_cache_warnings": no_effect("the trace is a hint, and deviations need no warning"),
    "enable_sanity_checks": no_effect(_CHECKED),
    "save_muon_momentum_buffer_in_memory": no_effect("there is no Muon optimizer"),
    "aio": mapped("aio"),
    "leaf_module": no_effect("units on data-dependent paths are fetched on demand", whole=True),
}

_OFFLOAD: dict[str, Entry] = {
    "offload_param.buffer_count": no_effect(_BUFFERS, 5),
    "offload_param.buffer_size": no_effect(_BUFFERS, 1e8),
    "offload_param.max_in_cpu": mapped("infinity.memory.host_params"),
    "offload_optimizer.buffer_count": no_effect(_BUFFERS, 4),
    "offload_optimizer.pipeline": no_effect(_OVERLAP),
    "offload_optimizer.pipeline_read": no_effect(_OVERLAP),
    "offload_optimizer.pipeline_write": no_effect(_OVERLAP),
    "offload_optimizer.fast_init": no_effect("states are laid out unit by unit at start"),
    "offload_optimizer.ratio": mapped("infinity.memory.device_optimizer"),
    "offload_optimizer.super_offload": no_effect("updates always overlap backward or the next forward"),
    "offload_optimizer.cpuadam_cores_perc": no_effect("set infinity.adam_threads", 0.8),
}

ZERO_KEYS: dict[str, Entry] = {f"zero_optimization.{key}": entry for key, entry in {**_ZERO, **_OFFLOAD}.items()}
