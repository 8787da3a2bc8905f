"""Verdicts on DeepSpeed's keys, as of version 0.19.8, and on older keys in use.

A key is honoured, mapped to a key of ours, without effect here, or refused. A key of the schema needs no entry: it is
honoured. Names, sections and neutral values are DeepSpeed's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Verdict(str, Enum):
    """Effect of a DeepSpeed key here."""

    MAPPED = "mapped"
    """The key sets another key of the schema, which a line of the log names."""
    NO_EFFECT = "no effect"
    """The results are the same without it. A line of the log names it, and `infinity.strict` makes it an error."""
    REFUSED = "refused"
    """An error: without it the result or the memory would differ."""


class Entry(NamedTuple):
    """The verdict on one key, or on a section with all of its keys."""

    verdict: Verdict
    text: str
    """Target of a mapped key; reason and fix of any other."""
    neutral: tuple[object, ...] = ()
    """Values accepted without a note: DeepSpeed's defaults. Values that switch a feature off are neutral, too."""
    false_is_off: bool = True
    """False: `false` asks for something."""
    whole: bool = False
    """The entry covers all keys of the section."""
    presence_is_on: bool = False
    """The section asks for something even if it is empty."""

    def is_neutral(self, value: object) -> bool:
        """Return whether `value` asks for nothing."""
        if self.presence_is_on:
            return value is None or value is False or (isinstance(value, Mapping) and value.get("enabled") is False)
        return value in self.neutral or (is_off(value) and (self.false_is_off or value is not False))


def is_off(value: object) -> bool:
    """Return whether `value` switches off: null, false, an empty section, or one that is not enabled.

    A section that "auto" enables is off: nobody asked for it.
    """
    if value is None or value is False:
        return True
    if isinstance(value, Mapping):
        enabled = value.get("enabled")
        return is_off(enabled) or enabled == "auto" if "enabled" in value else all(map(is_off, value.values()))
    return value == []


def mapped(target: str, *neutral: object) -> Entry:
    return Entry(Verdict.MAPPED, target, neutral)


def no_effect(why: str, *neutral: object, whole: bool = False) -> Entry:
    return Entry(Verdict.NO_EFFECT, why, neutral, whole=whole)


def refused(
    why: str, *neutral: object, false_is_off: bool = True, whole: bool = False, presence_is_on: bool = False
) -> Entry:
    return Entry(Verdict.REFUSED, why, neutral, false_is_off, whole, presence_is_on)


_BUCKETS = "a unit is one all-gather and one reduce-scatter; infinity.unit_size sets its size"
_OVERLAP = "transfers and collectives always overlap the computation"
_SMALL = "small parameters are gathered with their unit"
_TRACE = "units are cached and evicted by the recorded trace"
_BUFFERS = "buffers follow from the model and infinity.tile_size"
_EXPORT = "checkpoints and exports hold every parameter unsharded"
_ONE_GROUP = "a unit is sharded over all ranks, which takes less memory"
_EXACT = "collectives transfer exact values: remove it"
_CHECKED = "every state transition of a unit is checked"


def _both(name: str, entry: Entry) -> dict[str, Entry]:
    """Return the rows of a key of stage 3, which has two names."""
    return {name: entry, f"stage3_{name}": entry}


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
    **_both("prefetch_bucket_size", mapped("infinity.prefetch_bytes")),
    **_both("max_live_parameters", mapped("infinity.cache_bytes")),
    **_both("max_reuse_distance", no_effect(_TRACE, 1e9)),
    **_both("param_persistence_threshold", no_effect(_SMALL, 1e5)),
    **_both("model_persistence_threshold", no_effect(_SMALL, sys.maxsize)),
    **_both("gather_16bit_weights_on_model_save", no_effect(_EXPORT, True)),
    "stage3_gather_fp16_weights_on_model_save": no_effect(_EXPORT, True),
    **_both("module_granularity_threshold", no_effect(_BUCKETS, 0)),
    **_both("use_all_reduce_for_fetch_params", no_effect(_BUCKETS)),
    **_both("allgather_sequential", no_effect(_BUCKETS)),
    "ignore_unused_parameters": no_effect("a parameter without a gradient is always allowed", True),
    "find_unused_parameters": no_effect("a parameter without a gradient is always allowed"),
    "legacy_stage1": no_effect("one implementation serves all stages"),
    "round_robin_gradients": no_effect("every rank offloads its own shards"),
    "parameter_alignment": no_effect("parameters are always aligned in their unit"),
    "zero_hpz_partition_size": no_effect(_ONE_GROUP, 0, 1),
    "mics_shard_size": no_effect(_ONE_GROUP, -1),
    "mics_hierarchical_params_gather": no_effect(_ONE_GROUP),
    "zero_quantized_weights": refused(_EXACT),
    "zero_quantized_nontrainable_weights": mapped('infinity.frozen "8bit"'),
    "zero_quantized_gradients": refused(_EXACT),
    "zeropp_loco_param": refused(_EXACT, whole=True),
    "memory_efficient_linear": no_effect("autograd saves references for every module", True),
    "pipeline_loading_checkpoint": no_effect(_EXPORT),
    "override_module_apply": no_effect("Module.apply works on units", True),
    "log_trace_cache_warnings": no_effect("the trace is a hint, and deviations need no warning"),
    "enable_sanity_checks": no_effect(_CHECKED),
    "save_muon_momentum_buffer_in_memory": no_effect("states live where offload_optimizer.device says"),
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


_WATCH = "the progress lines and engine.ledger show times and bytes instead"
_MODEL = "implement {} in the model or the training loop"
_ADAM = "one implementation of each optimizer per device, chosen by the tier of its states"
_COMPRESSED = "it belongs to optimizers with compressed communication, which are not supported"
_MASTER = "the master of 16-bit parameters keeps fp32's precision; infinity.master and infinity.moments set the formats"
_MEAN = "the mean over ranks is the same with and without it"
_DIVIDED = "use torch.distributed.tensor.parallel, and pass process_group to initialize"
_RESHARD = "every checkpoint holds unsharded parameters by name and loads on any number of ranks"
_RANGE = "bfloat16 has the range of fp32 and needs no loss scale"

_TOP_LEVEL: dict[str, Entry] = {
    "amp": refused('use "bf16": {"enabled": true} instead of NVIDIA Apex', whole=True),
    "sparse_gradients": no_effect("gradients are reduced dense, with the same result"),
    "prescale_gradients": no_effect(_MEAN),
    "gradient_predivide_factor": no_effect(_MEAN, 1.0),
    "fp32_allreduce": mapped("communication_data_type"),
    "seq_parallel_communication_data_type": no_effect("there is no sequence parallelism", "fp32"),
    "sequence_parallel_size": refused(f"there is no sequence parallelism: {_DIVIDED}", 1),
    "data_parallel_size": refused(f"the data-parallel ranks are those of process_group: {_DIVIDED}", 1),
    "tensor_parallel": refused(
        f"no module is split by the engine: {_DIVIDED}", {"autotp_size": 0}, {"autotp_size": 1}, whole=True
    ),
    "expert_parallel": refused("experts belong to their block's unit, sharded over all ranks: remove it", whole=True),
    "moe": refused("experts belong to their block's unit, sharded over all ranks: remove it", whole=True),
    "use_data_before_expert_parallelism": no_effect("there is no expert parallelism"),
    "pipeline": refused(
        "there is no pipeline parallelism: use stage 3, whose units stream through one rank", whole=True
    ),
    "disable_allgather": no_effect("a unit is gathered when it is used"),
    "allgather_size": no_effect("a unit is gathered whole; infinity.unit_size sets its size", 5e8),
    "zero_allow_untested_optimizer": no_effect("every optimizer that is not refused by name is tested"),
    "zero_force_ds_cpu_optimizer": no_effect(
        "read by Accelerate and Trainer: unless it is false, they replace the script's optimizer by DeepSpeedCPUAdam "
        "if offload_optimizer is set",
        True,
    ),
    "memory_breakdown": no_effect(_WATCH),
    "dump_state": no_effect(_WATCH),
    "timers": no_effect(_WATCH, whole=True),
    "comms_logger": no_effect(_WATCH, whole=True),
    "comms_config": no_effect("DeepSpeed does not read it", whole=True),
    "flops_profiler.recompute_fwd_factor": no_effect("only the operations of the forward are counted", 0.0),
    "comet": refused("there is no comet monitor: use tensorboard, wandb or csv_monitor", whole=True),
    "monitor_config": no_effect("DeepSpeed does not read it", whole=True),
    "log_level": no_effect('use logging.getLogger("infinity").setLevel()'),
    "disable_python_gc": no_effect("Python's collector stays as the script set it"),
    "vocabulary_size": no_effect("DeepSpeed only warns about its alignment"),
    "activation_checkpointing": mapped("infinity.activations"),
    "activation_checkpointing.cpu_checkpointing": mapped("infinity.activations.device"),
    "activation_checkpointing.partition_activations": no_effect(
        "DeepSpeed partitions activations over tensor-parallel ranks, with which it is refused"
    ),
    "activation_checkpointing.contiguous_memory_optimization": no_effect("torch's allocator places saved tensors"),
    "activation_checkpointing.number_checkpoints": no_effect("it sizes the buffers of contiguous_memory_optimization"),
    "activation_checkpointing.synchronize_checkpoint_boundary": no_effect("transfers are ordered by events"),
    "activation_checkpointing.profile": no_effect(_WATCH),
    "checkpoint": no_effect(_RESHARD, whole=True),
    "load_universal_checkpoint": no_effect(_RESHARD),
    "datastates_ckpt": no_effect("checkpoints are written in the background on request", whole=True),
    "nebula": refused("checkpoints are written to folders: remove it", whole=True),
    "compile": no_effect("pass torch.compile(model) to initialize", whole=True),
    "graph_harvesting": no_effect("no CUDA graphs are captured"),
    "hybrid_engine": no_effect("engine.generate runs on the training engine", whole=True),
    "autotuning": refused("there is no tuner of batch sizes: remove it; `infinity tune` measures disks", whole=True),
    "elasticity": refused("set the batch sizes, and restart on another number of ranks from a checkpoint", whole=True),
    "curriculum_learning": refused(_MODEL.format("curriculum learning"), whole=True),
    "data_efficiency": refused(_MODEL.format("the sampling of data"), whole=True),
    "progressive_layer_drop": refused(_MODEL.format("progressive layer dropping"), whole=True),
    "sparse_attention": refused(_MODEL.format("sparse attention"), whole=True),
    "quantize_training": refused(_MODEL.format("quantised training"), whole=True),
    "compression_training": refused(_MODEL.format("compression"), whole=True),
    "eigenvalue": refused(_MODEL.format("quantised training"), whole=True),
    "weight_quantization": refused("weights are not quantised: remove it", whole=True, presence_is_on=True),
}

_PRECISION: dict[str, Entry] = {
    "fp16.fp16_master_weights_and_grads": refused(_MASTER),
    "bfloat16": mapped("bf16"),
    "bf16.immediate_grad_update": no_effect("gradients are reduced unit by unit during backward"),
    "bf16.check_grad_overflow": mapped("infinity.check_nan", True)._replace(false_is_off=False),
    "bf16.check_overflow": mapped("infinity.check_nan", True)._replace(false_is_off=False),
    "bf16.bf16_master_weights_and_grads": mapped("infinity.master and data_types.grad_accum_dtype"),
    "bf16.bf16_optimizer_states": mapped("infinity.moments"),
    "bf16.loss_scale": no_effect(_RANGE, 0),
    "bf16.initial_scale_power": no_effect(_RANGE, 16),
    "bf16.loss_scale_window": no_effect(_RANGE, 1000),
    "bf16.hysteresis": no_effect(_RANGE, 2),
    "bf16.consecutive_hysteresis": no_effect(_RANGE),
    "bf16.min_loss_scale": no_effect(_RANGE, 1),
    "torch_autocast.lower_precision_safe_modules": no_effect(
        "parameters are gathered in their own dtype, and all gradients are reduced in communication_data_type"
    ),
}

_OPTIMIZER: dict[str, Entry] = {
    "optimizer.legacy_fusion": no_effect(_ADAM),
    "optimizer.torch_adam": no_effect("DeepSpeed reads it in optimizer.params only"),
    "optimizer.params.torch_adam": no_effect(_ADAM),
    "optimizer.params.fused": no_effect(_ADAM),
    "optimizer.params.foreach": no_effect(_ADAM),
    "optimizer.params.capturable": no_effect(_ADAM),
    "optimizer.params.set_grad_none": no_effect("gradients are cleared when they are collected", True),
    "optimizer.params.adam_w_mode": mapped("optimizer.type")._replace(false_is_off=False),
    "optimizer.params.bias_correction": refused("the bias is always corrected: remove it", True, false_is_off=False),
    "optimizer.params.amsgrad": refused("pass torch.optim.AdamW(…, amsgrad=True) as optimizer=, or remove it"),
    "optimizer.params.maximize": refused("negate the loss, or pass the optimizer as optimizer="),
    "optimizer.params.initial_accumulator_value": refused("the sum of squares starts at 0: remove it", 0),
    "optimizer.params.fp32_optimizer_states": refused(
        'set infinity.moments to "bf16" instead', True, false_is_off=False
    ),
    "optimizer.params.max_grad_norm": refused("set gradient_clipping instead", 0),
    "optimizer.params.freeze_step": refused(_COMPRESSED),
    "optimizer.params.cuda_aware": refused(_COMPRESSED),
    "optimizer.params.comm_backend_name": refused(_COMPRESSED),
    "scheduler.params.last_batch_iteration": refused("a checkpoint restores the step: remove it", -1),
}

_AIO: dict[str, Entry] = {
    "aio.single_submit": no_effect("requests are always submitted in batches"),
    "aio.overlap_events": no_effect("completions always overlap submission", True),
    "aio.use_gds": no_effect("files are read into host memory"),
}

TABLE: dict[str, Entry] = {**_TOP_LEVEL, **_PRECISION, **_OPTIMIZER, **ZERO_KEYS, **_AIO}
"""Full dotted name of a key of DeepSpeed that the schema lacks → its verdict."""

VALUES: dict[str, str] = {
    "optimizer.type": "pass an optimizer of another class to initialize(); OneBitAdam, ZeroOneAdam and Lamb are not "
    "supported, and AdamW is the nearest",
    "scheduler.type": "for any other schedule, pass the optimizer that initialize() returns to a scheduler of torch",
}
"""Full dotted name of a key → text appended to the error about an unsupported value."""
