"""Writes tests/config/deepspeed/keys.txt from the sources of DeepSpeed, without importing them.

`python tests/config/list_deepspeed_keys.py DeepSpeed-0.19.8/deepspeed > tests/config/deepspeed/keys.txt`. Fields and
aliases of pydantic models become keys; so do the names that constants hold and that code passes to dict.get.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODELS = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    "zero_optimization.leaf_module": ("runtime/zero/leaf_module_config.py", "DeepSpeedZeroLeafModuleConfig"),
    "zero_optimization.zenflow": ("runtime/zenflow/zenflow_config.py", "ZenFlowConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "timers.throughput": ("utils/config.py", "DeepSpeedThroughputTimerConfig"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
    "tensor_parallel": ("runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    "expert_parallel": ("module_inject/auto_ep_presets/base.py", "AutoEPConfig"),
    "weight_quantization": ("inference/config.py", "WeightQuantConfig"),
}
"""Section → file and class of its model."""

DICTIONARIES = {
    "flops_profiler": ("profiling/constants.py", "FLOPS_PROFILER_"),
    "activation_checkpointing": ("runtime/activation_checkpointing/config.py", "ACT_CHKPT_"),
    "aio": ("runtime/swap_tensor/constants.py", "AIO_"),
    "torch_autocast": ("runtime/constants.py", "TORCH_AUTOCAST_"),
}
"""Section → file of constants and the prefix of those that hold its keys."""

NAMES = {
    "optimizer": ("TYPE", "OPTIMIZER_PARAMS", "LEGACY_FUSION"),
    "scheduler": ("TYPE", "SCHEDULER_PARAMS"),
    "data_types": ("GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE", "KEEP_IN_FP32_MODULES"),
    "checkpoint": ("LOAD_UNIVERSAL_CHECKPOINT", "USE_NODE_LOCAL_STORAGE_CHECKPOINT", "CHECKPOINT_PARALLEL_WRITE"),
}
"""Section → constants of runtime/constants.py that hold its keys."""

SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
OPTIMIZERS = (
    ("ops/adam/fused_adam.py", "FusedAdam"),
    ("ops/adam/cpu_adam.py", "DeepSpeedCPUAdam"),
    ("ops/lion/cpu_lion.py", "DeepSpeedCPULion"),
    ("ops/adagrad/cpu_adagrad.py", "DeepSpeedCPUAdagrad"),
)
NOT_KEYS = ("_DEFAULT", "_FORMAT")
_NOT_IN_JSON = ("self", "optimizer", "params", "model_params", "adamw_mode")
OTHERS = (
    *("sequence_parallel_size", "data_parallel_size", "allgather_size", "datastates_ckpt", "vocabulary_size"),
    *("communication_data_type", "data_efficiency", "autotuning"),
    *("checkpoint.tag_validation", "checkpoint.checkpoint_serialization", "checkpoint.writer"),
)
"""Keys that code reads through other files, variables or functions."""


def tree(root: Path, file: str) -> ast.Module:
    return ast.parse((root / file).read_text(encoding="utf-8"))


def find_class(root: Path, file: str, name: str) -> ast.ClassDef:
    return next(node for node in ast.walk(tree(root, file)) if isinstance(node, ast.ClassDef) and node.name == name)


def fields(model: ast.ClassDef) -> Iterator[str]:
    """Yield the names and aliases of a model's fields."""
    for node in model.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            yield node.target.id
            keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
            yield from (k.value.value for k in keywords if k.arg == "alias" and isinstance(k.value, ast.Constant))


def constants(root: Path, file: str) -> dict[str, str]:
    """Return the names of constants of a file that hold the name of a key."""
    found = {}
    for node in tree(root, file).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            target = node.targets[0]
            if isinstance(target, ast.Name) and not target.id.endswith(NOT_KEYS):
                found[target.id] = node.value.value
    return {name: value for name, value in found.items() if value.isidentifier() and value == value.lower()}


def arguments(model: ast.ClassDef) -> Iterator[str]:
    """Yield the parameters of a class's constructor."""
    init = next(node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    yield from (a.arg for a in init.args.args if a.arg not in _NOT_IN_JSON)


def top_level(root: Path) -> Iterator[str]:
    """Yield the keys that runtime/config.py reads from the configuration itself, and those that it refuses."""
    names = constants(root, "runtime/constants.py")
    module = tree(root, "runtime/config.py")
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and node.args and getattr(node.args[0], "id", "") == "param_dict":
                yield from (names[a.id] for a in node.args[1:2] if isinstance(a, ast.Name) and a.id in names)
            owner = getattr(getattr(node, "func", None), "value", None)
            if isinstance(node, ast.Call) and getattr(owner, "id", "") == "param_dict":
                for argument in node.args[:1]:
                    yield argument.value if isinstance(argument, ast.Constant) else names[argument.id]  # type: ignore
    for node in module.body:
        target = getattr(node, "targets", [None])[0]
        if getattr(target, "id", "") == "_REMOVED_TOP_LEVEL_CONFIG_KEYS":
            yield from (key.value for key in node.value.keys)  # type: ignore[attr-defined]
        if getattr(target, "id", "") == "_REMOVED_ZERO_CONFIG_KEYS":
            yield from (f"zero_optimization.{key.value}" for key in node.value.keys)  # type: ignore[attr-defined]


def keys(root: Path) -> Iterator[str]:
    """Yield the full dotted name of every key."""
    yield from top_level(root)
    yield from OTHERS
    for section, (file, name) in MODELS.items():
        yield section.split(".")[0]
        yield from (f"{section}.{field}" for field in fields(find_class(root, file, name)))
    for section, (file, prefix) in DICTIONARIES.items():
        yield section
        held = constants(root, file)
        yield from (f"{section}.{value}" for name, value in held.items() if name.startswith(prefix))
    held = constants(root, "runtime/constants.py")
    for section, names in NAMES.items():
        yield section
        yield from (f"{section}.{held[name]}" for name in names)
    for name in SCHEDULES:
        schedule = find_class(root, "runtime/lr_schedules.py", name)
        yield from (f"scheduler.params.{argument}" for argument in arguments(schedule))
    for file, name in OPTIMIZERS:
        yield from (f"optimizer.params.{argument}" for argument in arguments(find_class(root, file, name)))
    yield from (f"optimizer.params.{name}" for name in ("torch_adam", "adam_w_mode", "max_grad_norm"))


if __name__ == "__main__":
    print("\n".join(sorted(set(keys(Path(sys.argv[1]))))))
