"""Translates DeepSpeed's optimizer, learning-rate schedule and loss scale into those of an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from infinity.errors import CheckpointError, ConfigError
from infinity.integrations.deepspeed_states import StoredCheckpoint
from infinity.rules import HYPER_KEYS, MOMENT_NAMES, Hyper, Rule

OPTIMIZERS = ("AdamW", "Adam", "Adagrad", "Lion", "SGD")
_CHOOSE = f"pass the optimizer of the run: --optimizer with one of {', '.join(OPTIMIZERS)}"
_WEIGHTS = "read its weights alone with infinity.integrations.zero_to_fp32"
_CONFIGURED = {
    "adamw": "AdamW",
    "torchadam": "Adam",
    "adagrad": "Adagrad",
    "lion": "Lion",
    "sgd": "SGD",
}

Number = Callable[[Any], Any]
"""Function of a param_group's value that returns it with numbers in place of tensors."""


def optimizer_of(stored: StoredCheckpoint, chosen: str | None) -> str:
    """Return the optimizer's type as in a config: AdamW decouples the weight decay, Adam adds it to the gradient.

    DeepSpeed saves no name. The keys of param_groups and the config show the type; otherwise `chosen` sets it. Raises
    CheckpointError if the type is unknown, or differs from `chosen`.
    """
    groups = stored.param_groups
    found = {_by_keys(group) for group in groups} or {None}
    if len(found) > 1:
        raise CheckpointError(f"{stored.folder}: the param_groups belong to several optimizers: {_WEIGHTS}")
    own = found.pop() or _by_config(stored.progress.get("ds_config"))
    same = chosen in ("Adam", "AdamW") and own in ("Adam", "AdamW", None) and not any(_decay(group) for group in groups)
    if chosen is not None and own not in (None, chosen) and not same:
        raise CheckpointError(f"{stored.folder} was saved with {own}, not with {chosen}: leave --optimizer out")
    kind = chosen or own
    if kind is None:
        raise CheckpointError(f"{stored.folder} does not record the optimizer: {_CHOOSE}")
    _check_moments(stored, kind)
    return kind


def _by_keys(group: Mapping[str, Any]) -> str | None:
    """Return the only optimizer with the keys of this param_group; None if several have them."""
    if "nesterov" in group and "dampening" in group and not group.get("use_muon"):
        return "SGD"
    if "initial_accumulator_value" in group:
        return "Adagrad"
    if {"amsgrad", "decoupled_weight_decay"} <= group.keys():  # torch from 2.8
        return "AdamW" if group["decoupled_weight_decay"] else "Adam"
    return None


def _by_config(config: Any) -> str | None:
    """Return the optimizer of DeepSpeed's config; None without one. Its Adam decouples the weight decay by default."""
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return None
    kind, params = str(section.get("type", "")).lower(), section.get("params")
    if kind == "adam":
        mode = params.get("adam_w_mode", True) if isinstance(params, Mapping) else True
        return "AdamW" if mode else "Adam"
    if kind and kind not in _CONFIGURED:
        raise CheckpointError(f"DeepSpeed's optimizer {section['type']!r} has no counterpart in Infinity: {_WEIGHTS}")
    return _CONFIGURED.get(kind)


def _decay(group: Mapping[str, Any]) -> bool:
    return bool(group.get("weight_decay", 0))


def _check_moments(stored: StoredCheckpoint, kind: str) -> None:
    """Raise CheckpointError if a trained parameter has other moments than the optimizer's."""
    expected = set(MOMENT_NAMES[cast(Rule, kind.lower())])
    for name, parameter in stored.parameters.items():
        moments = parameter.states.keys() - {"master"}
        if parameter.trained and moments and moments != expected:
            raise CheckpointError(
                f"{stored.folder}: {name} has {', '.join(sorted(moments))}, and {kind} has "
                f"{', '.join(sorted(expected))}: {_CHOOSE}, or train with an optimizer that Infinity has"
            )


def groups_of(stored: StoredCheckpoint, kind: str, number: Number) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group. Raises CheckpointError for modes that Infinity does not have."""
    rule = cast(Rule, kind.lower())
    groups = []
    for place, group in enumerate(stored.param_groups):
        where = f"{stored.folder}: param_group {place}"
        for mode, value in {"amsgrad": False, "maximize": False, "bias_correction": True, "use_muon": False}.items():
            if bool(number(group.get(mode, value))) != value:
                raise CheckpointError(f"{where} has {mode}={group[mode]!r}, which Infinity's {kind} lacks: {_WEIGHTS}")
        if "max_coeff" in group:
            raise CheckpointError(f"{where} is LAMB's (max_coeff), which has no counterpart in Infinity: {_WEIGHTS}")
        missing = [key for key in HYPER_KEYS[rule] if key not in group]
        if missing:
            raise CheckpointError(f"{where} lacks {', '.join(missing)}, which {kind} has: {_CHOOSE}")
        values: dict[str, Any] = {key: number(group[key]) for key in HYPER_KEYS[rule]}
        try:
            values |= {"betas": tuple(values["betas"])} if "betas" in values else {}
            hyper = Hyper(rule, **values)
        except (ConfigError, TypeError) as error:
            raise CheckpointError(f"{where} cannot be used: {error}") from None
        groups.append({key: getattr(hyper, key) for key in HYPER_KEYS[rule]})
    if not groups:
        raise CheckpointError(
            f"{stored.folder} holds no param_groups, as with zero_optimization.elastic_checkpoint: set that to "
            "false and save again"
        )
    return groups


def scheduler_of(stored: StoredCheckpoint, groups: Sequence[Mapping[str, Any]], plain: Number) -> dict[str, Any] | None:
    """Return the state of the scheduler, which both DeepSpeed's and torch's schedulers load; None without one.

    The next rate is DeepSpeed's next one. Its schedulers count from -1, and lag one step behind.
    """
    saved = stored.progress.get("lr_scheduler")
    if not isinstance(saved, Mapping):
        return None
    state = {key: plain(value) for key, value in saved.items() if key != "lr_lambdas"}
    if isinstance(state.get("last_batch_iteration"), int):
        last = max(state["last_batch_iteration"], 0)
        state |= {"last_epoch": last, "_step_count": last + 1, "_last_lr": [group["lr"] for group in groups]}
    return state


def loss_scale_of(stored: StoredCheckpoint) -> dict[str, Any] | None:
    """Return the state of the fp16 loss scale; None if no parameter computes in fp16.

    In DeepSpeed the first increase takes one step more than its window. The imported state preserves this.
    """
    if not any(parameter.dtype == torch.float16 and parameter.trained for parameter in stored.parameters.values()):
        return None
    saved = stored.loss_scale
    numbers = {key: value for key, value in saved.items() if isinstance(value, (int, float))}
    if numbers.get("cur_scale", 0) <= 0:
        raise CheckpointError(
            f"{stored.folder} has parameters in fp16, and no loss scale: the checkpoint is damaged, use another one"
        )
    window, good = int(numbers.get("scale_window", 0)), 0
    if window > 0:
        since = int(numbers.get("cur_iter", 0)) - int(numbers.get("last_overflow_iter", -1)) - 1
        left = window + 1 if since <= 0 else -since % window + 1
        good = window - left
    return {
        "value": float(numbers["cur_scale"]),
        "tolerance": int(numbers.get("cur_hysteresis", 1)),
        "good": good,
        "skipped_in_a_row": 0,
    }
