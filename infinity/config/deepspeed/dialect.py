"""Defaults of DeepSpeed 0.19.8 for absent keys, where they differ from those of the schema."""

from __future__ import annotations

from collections.abc import Mapping

from infinity.config.draft import Draft
from infinity.config.tree import ABSENT, look
from infinity.rules import RULES

DEFAULTS: Mapping[str, object] = {
    "zero_optimization.stage": 0,
    "gradient_clipping": 1.0,
    "steps_per_print": 0,
    "dataloader_drop_last": False,
}
"""Full dotted name of a key → DeepSpeed's default."""

OF_OPTIMIZER: Mapping[str, Mapping[str, object]] = {
    rule.name: {constant.name: constant.deepspeed for constant in rule.constants if constant.deepspeed is not None}
    for rule in RULES.values()
}
"""Name of an optimizer → parameter → DeepSpeed's default."""

_IN_16_BITS = ("bf16.enabled", "fp16.enabled")

OF_SCHEDULER: Mapping[str, Mapping[str, object]] = {"WarmupDecayLR": {"warmup_max_lr": 1e-3}}
"""Name of a schedule → parameter → DeepSpeed's default."""


def add_defaults(draft: Draft) -> None:
    """Set every absent key whose default differs in DeepSpeed."""
    for dotted, value in DEFAULTS.items():
        draft.default(dotted, value)
    if look(draft.content, "zero_optimization.stage") != 0 or any(map(draft.is_true, _IN_16_BITS)):
        draft.default("infinity.norm_of", "optimizer")
    for section, defaults in (("optimizer", OF_OPTIMIZER), ("scheduler", OF_SCHEDULER)):
        kind = look(draft.content, f"{section}.type")
        if kind is ABSENT and section == "optimizer" and draft.has(section):
            kind = "adamw"  # the schema's default type
        if isinstance(kind, str):
            for name, value in defaults.get(kind, defaults.get(kind.lower(), {})).items():
                draft.default(f"{section}.params.{name}", value)
