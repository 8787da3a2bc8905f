"""Names of the config's sections and keys that scripts import from `deepspeed.runtime.constants`."""

from __future__ import annotations

from infinity.deepspeed.engine import ROUTE_TRAIN as ROUTE_TRAIN

ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"
ROUTE_ENCODE = "encode"

TRAIN_BATCH_SIZE = "train_batch_size"
TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
GRADIENT_CLIPPING = "gradient_clipping"
GRADIENT_CLIPPING_DEFAULT = 1.0
GRADIENT_ALLREDUCE_OP = "gradient_allreduce_op"
COMMUNICATION_DATA_TYPE = "communication_data_type"
STEPS_PER_PRINT = "steps_per_print"
LOG_LEVEL = "log_level"
LOG_LEVEL_DEFAULT = None
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
BFLOAT16 = "bf16"
FP16 = "fp16"
ZERO_ALLOW_UNTESTED_OPTIMIZER = "zero_allow_untested_optimizer"
ZERO_FORCE_DS_CPU_OPTIMIZER = "zero_force_ds_cpu_optimizer"
