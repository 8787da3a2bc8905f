"""Rules that map keys of DeepSpeed to keys of the schema. Each rule edits a draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from infinity.config.draft import ABSENT, Draft, look, put
from infinity.config.fields import ALIGNMENT
from infinity.inputs import show
from infinity.sizes import format_size

Rule = Callable[[Draft], None]

_ZERO = "zero_optimization"
_LARGEST_TILE = 1 << 20
"""Elements of the default tile on nvme, which no sub-group exceeds: larger tiles take memory and give no speed."""


def _old_bf16(draft: Draft) -> None:
    section = draft.take("bfloat16")
    if section is ABSENT or section is None or section is False:
        return
    if draft.has("bf16"):
        draft.ignore("bfloat16", "bf16 is set and decides")
        return
    draft.content["bf16"] = section
    draft.mapped.append("bfloat16 → bf16")


def _old_zero(draft: Draft) -> None:
    value = look(draft.content, _ZERO)
    if isinstance(value, bool):
        draft.content[_ZERO] = {"stage": int(value)}
        draft.mapped.append(f"{_ZERO} {show(value)} → {_ZERO}.stage {int(value)}")


def _misplaced_aio(draft: Draft) -> None:
    """Move the section to the top level: published configs have it in `zero_optimization`."""
    source = f"{_ZERO}.aio"
    section = draft.take(source)
    if isinstance(section, Mapping) and not draft.has("aio"):
        draft.content["aio"] = section
        draft.mapped.append(f"{source} → aio")
    elif section is not ABSENT and section:
        draft.ignore(source, "its place is the top level")


def _is_on(draft: Draft, source: str) -> bool:
    """Remove a switch, and return whether it is true. False is neutral, and was removed before."""
    value = draft.take(source)
    if value is not True and value is not ABSENT:
        draft.problems.append(f"{source}: must be true or false, not {show(value)}")
    return value is True


def _offload(source: str, target: str, draft: Draft) -> None:
    device = f"{_ZERO}.{target}.device"
    if not _is_on(draft, f"{_ZERO}.{source}"):
        return
    if look(draft.content, device) not in (ABSENT, "cpu"):
        draft.problems.append(f"{_ZERO}.{source}: is true, but {device} is set, too: remove {source}")
    else:
        draft.map(f"{_ZERO}.{source}", True, device, "cpu")


def _elements(draft: Draft, *names: str) -> tuple[str, float] | None:
    """Remove the keys `names` of `zero_optimization`, and return the first with its value; None without one."""
    found: tuple[str, float] | None = None
    for dotted in (f"{_ZERO}.{name}" for name in names):
        value = draft.take(dotted)
        if value is ABSENT:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            draft.problems.append(f"{dotted}: must be a number of elements, at least 0, not {show(value)}")
        elif found:
            draft.ignore(dotted, f"{found[0]} is set and decides")
        else:
            found = dotted, value
    return found


def _prefetch_and_cache(draft: Draft) -> None:
    """Map numbers of parameters that are fetched ahead or resident to bytes."""
    width = 2 if draft.is_true("bf16.enabled") or draft.is_true("fp16.enabled") else 4
    prefetch = _elements(draft, "stage3_prefetch_bucket_size", "prefetch_bucket_size")
    live = _elements(draft, "stage3_max_live_parameters", "max_live_parameters")
    ahead = int(prefetch[1]) * width if prefetch else 0
    if prefetch:
        draft.map(*prefetch, "infinity.prefetch_bytes", format_size(ahead))
    if live:
        draft.map(*live, "infinity.cache_bytes", format_size(max(0, int(live[1]) * width - ahead)))


def _tile(draft: Draft) -> None:
    group = _elements(draft, "sub_group_size")
    if group and group[1]:
        whole = int(group[1]) // ALIGNMENT * ALIGNMENT
        draft.map(*group, "infinity.tile_size", "auto" if whole >= _LARGEST_TILE else max(ALIGNMENT, whole))


def _parameters_in_host_memory(draft: Draft) -> None:
    kept = _elements(draft, "offload_param.max_in_cpu")
    if kept:
        draft.map(*kept, "infinity.memory.host_params", int(kept[1]), places=True)


def _states_on_device(draft: Draft) -> None:
    """Map the share of the optimizer's states that the CPU updates to the share that stays on the device."""
    source = f"{_ZERO}.offload_optimizer.ratio"
    ratio = draft.take(source)
    if ratio is ABSENT:
        return
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        draft.problems.append(f"{source}: must be a number from 0 to 1, not {show(ratio)}")
    else:
        draft.map(source, ratio, "infinity.memory.device_optimizer", round(1 - ratio, 9), places=True)


def _activations(draft: Draft) -> None:
    section = "activation_checkpointing"
    if _is_on(draft, f"{section}.cpu_checkpointing"):
        draft.map(f"{section}.cpu_checkpointing", True, "infinity.activations.device", "cpu", places=True)
    if look(draft.content, section) == {}:
        draft.take(section)


def _overflow_check(draft: Draft) -> None:
    for name in ("bf16.check_grad_overflow", "bf16.check_overflow"):
        value = draft.take(name)
        if value is not ABSENT:
            draft.map(name, value, "infinity.check_nan", value)


_STATES_OF_16_BITS = {
    "bf16.bf16_master_weights_and_grads": (("infinity.master", "remainder"), ("data_types.grad_accum_dtype", "bf16")),
    "bf16.bf16_optimizer_states": (("infinity.moments", "bf16"),),
}


def _bf16_states(draft: Draft) -> None:
    """Map DeepSpeed's states of 16 bits. The master is the parameter with a remainder of 16 bits, which is exact."""
    for source, targets in _STATES_OF_16_BITS.items():
        if not _is_on(draft, source):
            continue
        if not draft.is_true("bf16.enabled"):
            draft.ignore(source, "bf16 is not enabled")
            continue
        for target, result in targets:
            draft.map(source, True, target, result)


def _frozen_weights(draft: Draft) -> None:
    source = f"{_ZERO}.zero_quantized_nontrainable_weights"
    if _is_on(draft, source):
        draft.map(source, True, "infinity.frozen", "8bit")


def _fp32_allreduce(draft: Draft) -> None:
    value = draft.take("fp32_allreduce")
    if value is not ABSENT:
        draft.map("fp32_allreduce", value, "communication_data_type", "fp32")


def _adam(draft: Draft) -> None:
    """Choose decoupled or L2 weight decay for Adam: by adam_w_mode, else as the dialect does."""
    mode = draft.take("optimizer.params.adam_w_mode")
    kind = look(draft.content, "optimizer.type")
    name = kind.lower() if isinstance(kind, str) else "adamw" if kind is ABSENT else ""
    if mode is not ABSENT and not isinstance(mode, bool):
        draft.problems.append(f"optimizer.params.adam_w_mode: must be true or false, not {show(mode)}")
    elif mode is not ABSENT and name not in ("adam", "adamw"):
        draft.problems.append(f"optimizer.params.adam_w_mode: belongs to Adam and AdamW, not to {show(kind)}")
    elif name == "adam" and (mode is True or (mode is ABSENT and draft.dialect == "deepspeed")):
        put(draft.content, "optimizer.type", "AdamW")
        draft.default("optimizer.params.weight_decay", 0.0)
        _say_decay(draft, "decoupled, as in DeepSpeed; adam_w_mode false makes it L2", given=mode is True)
    elif name == "adam":
        _say_decay(draft, "L2, where DeepSpeed's is decoupled; adam_w_mode decides", given=mode is False)
    elif mode is False and draft.dialect == "deepspeed":
        draft.ignore("optimizer.params.adam_w_mode", "DeepSpeed reads it for the type Adam only")
    elif mode is False:
        put(draft.content, "optimizer.type", "Adam")
        draft.mapped.append('optimizer.params.adam_w_mode false → optimizer.type "Adam"')


def _say_decay(draft: Draft, decay: str, *, given: bool) -> None:
    """Note the decay of Adam where the dialects differ: without adam_w_mode, and with a decay."""
    if not given and look(draft.content, "optimizer.params.weight_decay") not in (ABSENT, 0):
        draft.mapped.append(f"optimizer.type Adam → weight decay is {decay}")


def _torch_decay(draft: Draft) -> None:
    """Give AdamW torch's decay where DeepSpeed would construct torch's."""
    # Reads the key before it is judged and removed.
    kind = look(draft.content, "optimizer.type")
    named = isinstance(kind, str) and kind.lower() in ("adam", "adamw")
    mode = look(draft.content, "optimizer.params.adam_w_mode")
    decoupled = named and (str(kind).lower() == "adamw" or mode is not False)
    if draft.dialect == "deepspeed" and draft.is_true("optimizer.params.torch_adam") and decoupled:
        draft.default("optimizer.params.weight_decay", 0.01)


def _warmup_type(draft: Draft) -> None:
    """Replace an unknown type of warm-up by "log", as DeepSpeed does."""
    name = "scheduler.params.warmup_type"
    kind = look(draft.content, name)
    if draft.dialect == "deepspeed" and isinstance(kind, str) and kind not in ("log", "linear"):
        put(draft.content, name, "log")
        draft.mapped.append(f"{name} {kind} → {name} log")


def _any_case(draft: Draft) -> None:
    """DeepSpeed reads these values in any case."""
    for name in ("gradient_allreduce_op", "communication_data_type"):
        value = look(draft.content, name)
        if isinstance(value, str):
            put(draft.content, name, value.lower())


def _threads(draft: Draft) -> None:
    """DeepSpeed reads intra_op_parallelism only."""
    names = "aio.thread_count", "aio.intra_op_parallelism"
    count, parallelism = (look(draft.content, name) for name in names)
    if draft.dialect == "deepspeed" and ABSENT not in (count, parallelism) and count != parallelism:
        draft.take("aio.thread_count")
        draft.ignore("aio.thread_count", "DeepSpeed reads intra_op_parallelism only")


def _parameters_below_stage_3(draft: Draft) -> None:
    """DeepSpeed offloads parameters in stage 3 only, and ignores the section below it."""
    stage = look(draft.content, f"{_ZERO}.stage")
    section = look(draft.content, f"{_ZERO}.offload_param")
    if draft.dialect != "deepspeed" or stage not in (ABSENT, 0, 1, 2) or not isinstance(section, Mapping):
        return
    draft.take(f"{_ZERO}.offload_param")
    if section.get("device", "none") != "none":
        draft.ignore(f"{_ZERO}.offload_param", "parameters are offloaded in stage 3 only")


RENAMES: tuple[Rule, ...] = (_old_bf16, _old_zero, _misplaced_aio, _torch_decay)
"""Rules that run before "auto" is resolved and keys are judged."""

MAPPINGS: tuple[Rule, ...] = (
    partial(_offload, "cpu_offload", "offload_optimizer"),
    partial(_offload, "cpu_offload_param", "offload_param"),
    partial(_offload, "cpu_offload_params", "offload_param"),
    _prefetch_and_cache,
    _tile,
    _parameters_in_host_memory,
    _states_on_device,
    _activations,
    _overflow_check,
    _bf16_states,
    _frozen_weights,
    _fp32_allreduce,
    _adam,
    _warmup_type,
    _any_case,
    _threads,
    _parameters_below_stage_3,
)
"""Rules that run when only mapped keys and keys of the schema are left."""
