"""Translates a configuration with DeepSpeed's keys into one of the schema, with notes and DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from infinity.config.deepspeed.keys import TABLE, Verdict
from infinity.config.deepspeed.mapped import MAPPINGS, RENAMES
from infinity.config.draft import ABSENT, Dialect, Draft, Fill, Notes, copied, drop, leaves, look, resolve_auto
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


_KEEPS_AUTO = ("aio.engine", "aio.shares", "data_types.keep_in_fp32_modules")
"""Keys, besides those of section `infinity`, of which "auto" is a value."""


class Translation(NamedTuple):
    """A configuration with the schema's keys, and everything that was said about the others."""

    content: dict[Any, Any]
    notes: Notes
    problems: list[str]
    """One line for each key that is refused."""


def translate(
    content: Mapping[Any, Any], known: Collection[str], dialect: Dialect = "infinity", fill: Fill | None = None
) -> Translation:
    """Return `content` with the keys of the schema only. Unknown keys stay, for validation to refuse.

    known: full dotted names of the schema's keys. Pure: `content` is not changed.
    """
    draft = Draft(copied(content), dialect)
    _drop_dotted(draft, known)
    for rename in RENAMES:
        rename(draft)

    def keeps_auto(dotted: str) -> bool:
        foreign = dotted not in known and dotted not in TABLE
        return dotted.startswith("infinity.") or dotted in _KEEPS_AUTO or foreign

    resolve_auto(draft, fill or Fill(), keeps_auto, known.__contains__)
    for dotted in [name for name, value in leaves(draft.content) if value is None and name in known]:
        drop(draft.content, dotted)
    _judge(draft)
    for rule in MAPPINGS:
        rule(draft)
    if dialect == "deepspeed":
        add_defaults(draft)
    notes = Notes(
        tuple(draft.mapped), tuple(draft.ignored), tuple(draft.defaults), tuple(draft.dotted), tuple(draft.filled)
    )
    return Translation(draft.content, notes, draft.problems)


def _drop_dotted(draft: Draft, known: Collection[str]) -> None:
    """Remove keys of the top level that are full dotted names, which DeepSpeed ignores.

    TRL 0.24 to 1.16 adds three of section `zero_optimization` for a reference model. Full names are refused without
    the dialect "deepspeed", and in section `infinity`, which front ends do not write. Unknown names stay, for
    validation to refuse.
    """
    for dotted in [key for key in draft.content if isinstance(key, str) and "." in key]:
        if not any(name == dotted or name.startswith(f"{dotted}.") for name in (*known, *TABLE)):
            continue
        del draft.content[dotted]
        section, _, name = dotted.rpartition(".")
        if draft.dialect == "deepspeed" and not dotted.startswith("infinity."):
            draft.dotted.append(dotted)
        else:
            draft.problems.append(f"{dotted}: is a full name at the top level: move {name} into the section {section}")


def _judge(draft: Draft) -> None:
    """Remove keys without effect and refused ones. Mapped keys stay, for their rules."""
    for dotted, value in list(leaves(draft.content)):
        entry = TABLE.get(dotted)
        if entry is None:
            continue
        neutral = entry.is_neutral(value)
        if entry.verdict is Verdict.MAPPED and not neutral:
            continue
        drop(draft.content, dotted)
        if neutral:
            continue
        if entry.verdict is Verdict.REFUSED:
            draft.refuse(dotted, value, entry.text)
        else:
            draft.ignore(dotted, entry.text)
