"""Verdicts on DeepSpeed's keys outside `zero_optimization`, as of version 0.19.8, and on older keys in use.

A key of the schema needs no entry: it is honoured. Names, sections and neutral values are DeepSpeed's.
"""

from __future__ import annotations

from infinity.config.deepspeed.verdicts import Entry, mapped, no_effect, refused
from infinity.config.deepspeed.zero_keys import ZERO_KEYS

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
    "optimizer.params.amsgrad": refused("AMSGrad has no counterpart: remove it"),
    "optimizer.params.maximize": refused("negate the loss instead"),
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
    "optimizer.type": "OneBitAdam, ZeroOneAdam, Lamb, Muon and others are not supported; AdamW is the nearest",
    "scheduler.type": "for any other schedule, pass the optimizer that initialize() returns to a scheduler of torch",
}
"""Full dotted name of a key → text appended to the error about an unsupported value."""
