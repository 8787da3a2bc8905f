"""DeepSpeed keys that Infinity does not accept, each with the reason.

Such a key is an error rather than ignored, since its user expects an effect. Names and sections are DeepSpeed's.
"""

from __future__ import annotations

_AUTOMATIC = "not needed: {}; remove it"
_NOT_YET = "not supported yet{}; remove it"
_ELSEWHERE = "not a key here: {}"

_BUCKETS = _AUTOMATIC.format("each unit is one all-gather and one reduce-scatter, so its size is infinity.unit_size")
_OVERLAP = _AUTOMATIC.format("transfers and collectives always overlap the computation")
_PREFETCH = _AUTOMATIC.format("how much is fetched ahead is infinity.prefetch_bytes")
_BUFFERS = _AUTOMATIC.format("buffers follow from the model and from infinity.tile_size")
_EXPORT = _AUTOMATIC.format("checkpoints hold each parameter unsharded, under its own name")
_OFFLOAD = _ELSEWHERE.format('set "device" in "offload_param" and "offload_optimizer"')
_COMPRESSED = _NOT_YET.format(": collectives transfer values uncompressed")
_ONE_GROUP = _NOT_YET.format(": a unit is sharded over all ranks")
_DIVIDED = _ELSEWHERE.format("use torch.distributed.tensor.parallel, and pass process_group to initialize")
_MODEL = _ELSEWHERE.format("implement it in the model or the training loop")
_WATCH = _NOT_YET.format(": progress and the ledger of bytes are always measured")
_ADAM = _AUTOMATIC.format("there is one Adam per device, chosen by where the optimizer states live")

FOREIGN: dict[str, str] = {
    # Top level.
    "amp": 'not supported: use "bf16": {"enabled": true}; remove it',
    "torch_autocast": _ELSEWHERE.format(
        'use torch.autocast around the model; "bf16" stores the parameters themselves in bfloat16'
    ),
    "seq_parallel_communication_data_type": _NOT_YET.format(": there is no sequence parallelism"),
    "prescale_gradients": _AUTOMATIC.format("gradients are averaged over ranks without a predivide factor"),
    "gradient_predivide_factor": _AUTOMATIC.format("gradients are averaged over ranks without a predivide factor"),
    "sparse_gradients": _NOT_YET.format(": gradients are dense"),
    "disable_allgather": _BUCKETS,
    "zero_allow_untested_optimizer": _AUTOMATIC.format("every optimizer that optimizer.type accepts is supported"),
    "zero_force_ds_cpu_optimizer": _ADAM,
    "wall_clock_breakdown": _WATCH,
    "memory_breakdown": _WATCH,
    "dump_state": _WATCH,
    "comms_logger": _WATCH,
    "flops_profiler": _WATCH,
    "tensorboard": _WATCH,
    "wandb": _WATCH,
    "comet": _WATCH,
    "csv_monitor": _WATCH,
    "monitor_config": _WATCH,
    "activation_checkpointing": _ELSEWHERE.format("call torch.utils.checkpoint in the model; no settings are needed"),
    "checkpoint": _EXPORT,
    "load_universal_checkpoint": _EXPORT,
    "dataloader_drop_last": _MODEL,
    "curriculum_learning": _MODEL,
    "data_efficiency": _MODEL,
    "progressive_layer_drop": _MODEL,
    "sparse_attention": _MODEL,
    "quantize_training": _MODEL,
    "compression_training": _MODEL,
    "eigenvalue": _MODEL,
    "elasticity": _NOT_YET.format(": restart with another number of ranks from a checkpoint"),
    "autotuning": _NOT_YET.format(""),
    "compile": _NOT_YET.format(""),
    "pipeline": _NOT_YET.format(": there is no pipeline parallelism"),
    "tensor_parallel": _DIVIDED,
    "sequence_parallel_size": _DIVIDED,
    "hybrid_engine": _NOT_YET.format(""),
    "weight_quantization": _NOT_YET.format(""),
    "graph_harvesting": _NOT_YET.format(""),
    "use_data_before_expert_parallelism": _NOT_YET.format(": there is no expert parallelism"),
    # fp16 and bf16.
    "fp16.auto_cast": _ELSEWHERE.format("cast float inputs to float16 in the training loop"),
    "fp16.fp16_master_weights_and_grads": _NOT_YET.format(": the master of float16 parameters is fp32"),
    "bf16.immediate_grad_update": _AUTOMATIC.format("gradients are reduced and offloaded unit by unit in backward"),
    "bf16.check_grad_overflow": "not a key here: set infinity.check_nan",
    "bf16.loss_scale": _AUTOMATIC.format("bfloat16 has the range of fp32"),
    "bf16.bf16_master_weights_and_grads": "not a key here: infinity.master sets the format of the master",
    "bf16.bf16_optimizer_states": "not a key here: infinity.moments sets the format of the moments",
    # optimizer.
    "optimizer.legacy_fusion": _ADAM,
    "optimizer.params.torch_adam": _ADAM,
    "optimizer.params.fused": _ADAM,
    "optimizer.params.foreach": _ADAM,
    "optimizer.params.adam_w_mode": 'not a key here: set optimizer.type, "AdamW" for true and "Adam" for false',
    "optimizer.params.bias_correction": _AUTOMATIC.format("the bias is always corrected"),
    "optimizer.params.amsgrad": _NOT_YET.format(""),
    "optimizer.params.maximize": _NOT_YET.format(": negate the loss"),
    "optimizer.params.initial_accumulator_value": _NOT_YET.format(": the sum starts at 0"),
    "optimizer.params.max_grad_norm": "not a key here: set gradient_clipping",
    "optimizer.params.freeze_step": _NOT_YET.format(": it belongs to optimizers with compressed communication"),
    "scheduler.params.last_batch_iteration": _AUTOMATIC.format("a checkpoint restores the step"),
    # zero_optimization.
    "zero_optimization.overlap_comm": _OVERLAP,
    "zero_optimization.contiguous_gradients": _AUTOMATIC.format("a unit's gradients are always contiguous"),
    "zero_optimization.reduce_scatter": _BUCKETS,
    "zero_optimization.reduce_bucket_size": _BUCKETS,
    "zero_optimization.use_multi_rank_bucket_allreduce": _BUCKETS,
    "zero_optimization.allgather_partitions": _BUCKETS,
    "zero_optimization.allgather_bucket_size": _BUCKETS,
    "zero_optimization.allgather_sequential": _BUCKETS,
    "zero_optimization.round_robin_gradients": _BUCKETS,
    "zero_optimization.use_all_reduce_for_fetch_params": _BUCKETS,
    "zero_optimization.stage3_allgather_sequential": _BUCKETS,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _BUCKETS,
    "zero_optimization.stage3_module_granularity_threshold": _BUCKETS,
    "zero_optimization.sub_group_size": _AUTOMATIC.format("the update streams tiles of infinity.tile_size elements"),
    "zero_optimization.stage3_prefetch_bucket_size": _PREFETCH,
    "zero_optimization.stage3_max_live_parameters": _PREFETCH,
    "zero_optimization.stage3_max_reuse_distance": _PREFETCH,
    "zero_optimization.prefetch_bucket_size": _PREFETCH,
    "zero_optimization.max_live_parameters": _PREFETCH,
    "zero_optimization.max_reuse_distance": _PREFETCH,
    "zero_optimization.stage3_param_persistence_threshold": _AUTOMATIC.format(
        "small parameters are gathered with their unit"
    ),
    "zero_optimization.stage3_model_persistence_threshold": _AUTOMATIC.format(
        "small parameters are gathered with their unit"
    ),
    "zero_optimization.param_persistence_threshold": _AUTOMATIC.format("small parameters are gathered with their unit"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _EXPORT,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _EXPORT,
    "zero_optimization.gather_16bit_weights_on_model_save": _EXPORT,
    "zero_optimization.load_from_fp32_weights": _EXPORT,
    "zero_optimization.elastic_checkpoint": _EXPORT,
    "zero_optimization.pipeline_loading_checkpoint": _EXPORT,
    "zero_optimization.ignore_unused_parameters": _AUTOMATIC.format("a parameter without a gradient is always allowed"),
    "zero_optimization.legacy_stage1": _AUTOMATIC.format("all stages are one engine"),
    "zero_optimization.override_module_apply": _AUTOMATIC.format("Module.apply works on units"),
    "zero_optimization.memory_efficient_linear": _AUTOMATIC.format("autograd saves references for every module"),
    "zero_optimization.leaf_module": _AUTOMATIC.format("units on data-dependent paths are fetched on demand"),
    "zero_optimization.log_trace_cache_warnings": _AUTOMATIC.format(
        "the trace is only a hint for prefetching, and deviations need no warning"
    ),
    "zero_optimization.enable_sanity_checks": _AUTOMATIC.format("every state transition of a unit is checked"),
    "zero_optimization.zenflow": _NOT_YET.format(""),
    "zero_optimization.zero_hpz_partition_size": _ONE_GROUP,
    "zero_optimization.mics_shard_size": _ONE_GROUP,
    "zero_optimization.mics_hierarchical_params_gather": _ONE_GROUP,
    "zero_optimization.zero_quantized_weights": _COMPRESSED,
    "zero_optimization.zero_quantized_nontrainable_weights": _COMPRESSED,
    "zero_optimization.zero_quantized_gradients": _COMPRESSED,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_params": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.offload_param.buffer_count": _BUFFERS,
    "zero_optimization.offload_param.buffer_size": _BUFFERS,
    "zero_optimization.offload_param.max_in_cpu": _NOT_YET.format(": host memory holds no copies besides the tier"),
    "zero_optimization.offload_optimizer.buffer_count": _BUFFERS,
    "zero_optimization.offload_optimizer.pipeline": _OVERLAP,
    "zero_optimization.offload_optimizer.pipeline_read": _OVERLAP,
    "zero_optimization.offload_optimizer.pipeline_write": _OVERLAP,
    "zero_optimization.offload_optimizer.fast_init": _AUTOMATIC.format("states are laid out unit by unit at start"),
    "zero_optimization.offload_optimizer.ratio": _NOT_YET.format(": all optimizer states live on one tier"),
    "zero_optimization.offload_optimizer.super_offload": _NOT_YET.format(""),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "not a key here: set infinity.adam_threads",
    # aio.
    "aio.use_gds": _NOT_YET.format(": files are read into host memory"),
}
"""Full dotted name of a key → its error text."""

VALUES: dict[str, str] = {
    "optimizer.type": "other optimizers are not supported yet",
    "scheduler.type": "for any other schedule, pass the optimizer that initialize() returns to a scheduler of torch",
}
"""Full dotted name of a key → text appended to the error about an unsupported value."""
