"""Translates DeepSpeed's optimizer, learning-rate schedule and loss scale into those of an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity.deepspeed.importer.states import StoredCheckpoint
from infinity.errors import CheckpointError, ConfigError, UsageError
from infinity.rules import RULES, Hyper, Rule, in_words, rule_of_type

_CHOOSE = f"pass the optimizer of the run: --optimizer with {in_words(RULES.values())}"
_WEIGHTS = "read its weights alone with infinity.integrations.zero_to_fp32"

Number = Callable[[Any], Any]
"""Function of a param_group's value that returns it with numbers in place of tensors."""


def optimizer_of(stored: StoredCheckpoint, chosen: str | None) -> Rule:
    """Return the rule of the checkpoint's optimizer. AdamW decouples the weight decay, Adam adds it to the gradient.

    DeepSpeed saves no name. The keys of param_groups and the config show the rule; otherwise `chosen`, a type of the
    config, sets it. Raises CheckpointError if the rule is unknown, or differs from `chosen`, and UsageError for another
    `chosen`.
    """
    groups = stored.param_groups
    found = {_by_keys(group) for group in groups} or {None}
    if len(found) > 1:
        raise CheckpointError(f"{stored.folder}: the param_groups belong to several optimizers: {_WEIGHTS}")
    own = found.pop() or _by_config(stored.progress.get("ds_config"))
    wanted = own if chosen is None else rule_of_type(chosen)
    if wanted is None:
        if chosen is not None:
            raise UsageError(f"optimizer is {chosen!r}: {_CHOOSE}")
        raise CheckpointError(f"{stored.folder} does not record the optimizer: {_CHOOSE}")
    if own is not None and own is not wanted:
        decays = any(group.get("weight_decay", 0) for group in groups)
        if decays or not (own.is_adam and wanted.is_adam):
            raise CheckpointError(
                f"{stored.folder} was saved with {own.type}, not with {wanted.type}: leave --optimizer out"
            )
    _check_moments(stored, wanted)
    return wanted


def _by_keys(group: Mapping[str, Any]) -> Rule | None:
    """Return the only rule with the keys of this param_group; None if several have them."""
    if group.get("use_muon"):
        return None
    decoupled = group.get("decoupled_weight_decay") if "amsgrad" in group else None  # torch from 2.8
    for rule in RULES.values():
        if group.keys() & set(rule.marks) or (rule.is_adam and decoupled is not None and decoupled == rule.decouples):
            return rule
    return None


def _by_config(config: Any) -> Rule | None:
    """Return the rule of DeepSpeed's config; None without one. Its Adam decouples the weight decay by default."""
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return None
    kind, params = str(section.get("type", "")).lower(), section.get("params")
    if kind == "adam" and (params.get("adam_w_mode", True) if isinstance(params, Mapping) else True):
        kind = "adamw"
    rule = rule_of_type(kind.removeprefix("torch"))  # DeepSpeed's name of torch's Adam is TorchAdam
    if kind and rule is None:
        raise CheckpointError(f"DeepSpeed's optimizer {section['type']!r} has no counterpart in Infinity: {_WEIGHTS}")
    return rule


def _check_moments(stored: StoredCheckpoint, rule: Rule) -> None:
    """Raise CheckpointError if a trained parameter has other moments than the rule's."""
    expected = set(rule.moments)
    for name, parameter in stored.parameters.items():
        moments = parameter.states.keys() - {"master"}
        if parameter.trained and moments and moments != expected:
            raise CheckpointError(
                f"{stored.folder}: {name} has {', '.join(sorted(moments))}, and {rule.type} has "
                f"{', '.join(sorted(expected))}: {_CHOOSE}, or train with an optimizer that Infinity has"
            )


def groups_of(stored: StoredCheckpoint, rule: Rule, number: Number) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group. Raises CheckpointError for modes that Infinity does not have."""
    groups = []
    for place, group in enumerate(stored.param_groups):
        where = f"{stored.folder}: param_group {place}"
        for mode, value in {"amsgrad": False, "maximize": False, "bias_correction": True, "use_muon": False}.items():
            if bool(number(group.get(mode, value))) != value:
                raise CheckpointError(
                    f"{where} has {mode}={group[mode]!r}, which Infinity's {rule.type} lacks: {_WEIGHTS}"
                )
        if "max_coeff" in group:
            raise CheckpointError(f"{where} is LAMB's (max_coeff), which has no counterpart in Infinity: {_WEIGHTS}")
        missing = [key for key in rule.keys if key not in group]
        if missing:
            raise CheckpointError(f"{where} lacks {', '.join(missing)}, which {rule.type} has: {_CHOOSE}")
        values: dict[str, Any] = {key: number(group[key]) for key in rule.keys}
        try:
            values |= {"betas": tuple(values["betas"])} if "betas" in values else {}
            hyper = Hyper(rule.name, **values)
        except (ConfigError, TypeError) as error:
            raise CheckpointError(f"{where} cannot be used: {error}") from None
        groups.append(hyper.by_key())
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
