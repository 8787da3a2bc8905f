"""Reasons why tests of DeepSpeed fail with infinity.deepspeed, by the test's name and its last error."""

from __future__ import annotations

import re

INSIDE = "inspect DeepSpeed's implementation"
ABSENT = "use names without a counterpart (docs/deepspeed.md)"
DIFFERENT = "expect behaviour that docs/deepspeed.md or docs/config.md lists as different"
MACHINE = "need an accelerator, or a package that is not installed"
ROUNDING = "compare bf16 training with DistributedDataParallel, which has no fp32 sums and masters"
OPEN = "open"

_REASONS = (
    (ABSENT, r"missing name: deepspeed\.(moe|pipe|monitor|OnDevice|runtime\.pipe|checkpoint\.|ops\.adam\.ZenFlow)"),
    (ABSENT, r"test_monitor|test_zf_torch_adam|MiCS|test_offload_activations|test_reshape_checkpoint"),
    (ABSENT, r"TiledLinearReturnBias|partition_(balanced|uniform)|PartitionedTensor|prefix_sum_inc"),
    (
        ABSENT,
        r"_create_expert_and_data_parallel|coalesce_grad_reduction|has no counterpart in Infinity|[Zz]en_?[Ff]low",
    ),
    (MACHINE, r"No module named '(datasets|comet_ml|mup|accelerate|transformers|cpuinfo)'|accelerate>="),
    (MACHINE, r"Cannot access accelerator|NVIDIA driver|not compiled with CUDA|device_ids \[0\]|unpin_memory"),
    (MACHINE, r"GPUError|TestZeroAutoCast::test\w*\[dtype1"),  # its GradScaler is disabled without a GPU
    (INSIDE, r"missing name: |_StandInType|grad_partitions_flat_buffer|TestBf16ZeRO0UnfusedOptimizer"),
    (INSIDE, r"test_training_partition_cache|external_parameter_lifecycle|TestZero3AutocastMixedDtype"),
    (INSIDE, r"all_gather_coalesced|TestStage2FlattenOnGPU|test_engine_getter_returns_config_value"),
    (INSIDE, r"has no attribute '(_|ds_|averaged_|bit16_|fp16_|fp32_|nccl_|accumulated_|is_external|param_groups_)"),
    (
        INSIDE,
        r"has no attribute '(optimizer'|loss_scale_config|tput_timer|step_ratio|single_partition|allreduce_)",
    ),
    (INSIDE, r"has no attribute '(config'|leaf_parameters|backward_(pro|epi)logue)|module .* has no attribute"),
    (INSIDE, r"ds_(id|status|tensor|shape|persist)\b|ZeROOrderedDict|pre_bwd_fn|hooks_exist|bit16_groups_flat"),
    (INSIDE, r"isinstance\(.*(DeepSpeedZeroOptimizer|BF16_Optimizer)|stage_1_and_2|Stage3|0-sized|functools\.partial"),
    (INSIDE, r"zero3_linear_wrap|isinstance\(ds_optimizer|local_l\.bias is None"),
    (INSIDE, r"test_zero_(linear_direct_init|late_module_attach|dynamic_class|hook_attribute|hook_count)"),
    (INSIDE, r"test_mixed_precision_dtype|test_gradient_clipping_default|test_dynamic_loss_scale"),
    (DIFFERENT, r"TestNoSyncCtxt|coalesce|TestZero0DirectBackward|is not supported; |no_grad_input_error|TestIncorect"),
    (DIFFERENT, r'is "fp16", in which unscaled|NotImplementedError|TestLogLevelEndToEnd|must be "AdamW"'),
    (DIFFERENT, r"ZeRORuntimeException|leaf_module_enabled_via_config|fp16_loss_scale_accepts_valid_values"),
    (DIFFERENT, r"Actual message: | Input: '|sum_gradient_allreduce_rejects|ds_optimizer == client_optimizer"),
    (DIFFERENT, r"update an engine does not have|that the engine does not use|a checkpoint holds no gradients"),
    (DIFFERENT, r"shares the memory of parameter|(step|rollback)_subgroup|a gradient is sparse|TestSparseCheckpoint"),
    (DIFFERENT, r"Loss scaling is required in fp16|which is trained only with|TestStage2IgnoreUnusedParameters"),
    (DIFFERENT, r"elastic_checkpoint_is_deprecated|AllRanksErrorOnModification|test_unmanaged_rejects_overlap_comm"),
    (ROUNDING, r"test_checkpointed_multiple_backward\["),
    (ROUNDING, r"Gradients differ for parameter (?s:.*)dtype=torch\.bfloat16|mismatch at after non-scalar backward"),
)
"""(reason, pattern): the first that matches decides."""
_SHOWN = 7
"""Last lines of a failure that a pattern is searched in: the error, and the line that raised it."""


def reason_of(test: str, text: str) -> str:
    """Return the reason why `test` failed with `text`."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines()
    told = "\n".join([test, *lines[-_SHOWN:], *(line for line in lines if line.startswith("E  "))])
    return next((reason for reason, pattern in _REASONS if re.search(pattern, told)), OPEN)
