"""Compares config, model and param_groups of all ranks before an engine allocates anything.

Ranks exchange digests, whose size does not depend on the model. If digests differ, ranks exchange the compared lines to
name the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.comm.groups import gather_objects
from infinity.plan.layout import UnitLayout
from infinity.rules import RULES

if TYPE_CHECKING:
    from infinity.config import Config

MAY_DIFFER = (
    "steps_per_print",
    "wall_clock_breakdown",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "flops_profiler",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_optimizer.pin_memory",
    "aio",
    "infinity.adam_threads",
    "infinity.activations",
)
"""Keys and sections that depend on a rank's machine or only affect output. They change neither results nor collectives.
"""

_OF_KIND = {
    "parameter ": ("models", "Build the same model on every rank, with the same parameters trained"),
    "buffer ": ("models", "Build the same model on every rank"),
    "param_group ": ("param_groups", "Give every rank the same model_parameters"),
    "": ("configs", f"Start all ranks with the same config; only {', '.join(MAY_DIFFER)} may differ"),
}
"""Prefix of a line → (what differs, fix), for the error."""

_WORDS = 4
"""Number of 8-byte words in a digest."""


def config_in_common(config: Config) -> list[str]:
    """Return the lines of `in_common` that state the config, which come first."""
    return [f"{key} = {value}" for key, value in _flat(config.model_dump(mode="json"))]


def in_common(config: Config, layouts: Sequence[UnitLayout], model: nn.Module) -> list[str]:
    """Return one line for each property that must be equal on all ranks, in the order of comparison."""
    lines = config_in_common(config)
    for layout in layouts:
        for slot in layout.slots:
            trained = f"trained in param_group {slot.group}" if layout.trainable and slot.group >= 0 else "not trained"
            lines.append(
                f"parameter {slot.name} {list(slot.shape)} {_name(layout.dtype)}, {trained}, in unit {layout.name}"
            )
    for name, buffer in model.named_buffers():
        lines.append(f"buffer {name} {list(buffer.shape)} {_name(buffer.dtype)}")
    return lines


def groups_in_common(
    config: Config, groups: Sequence[Mapping[str, Any]], names: Mapping[int, Sequence[str]]
) -> list[str]:
    """Return one line for each hyper-parameter of param_groups, for the same comparison as `in_common`.

    names: the keys of groups of rules in Python, by number. The others have those of the config's rule.
    """
    everywhere = config.optimizer.params.model_dump()
    return [
        f"param_group {number} has {name} = {_plain(group.get(name, everywhere.get(name)))}"
        for number, group in enumerate(groups)
        for name in names.get(number, RULES[config.optimizer.rule].keys)
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in section.items():
        key = prefix + name
        # A section or a key: all keys below a section are left out with it.
        if key in MAY_DIFFER:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _plain(value: Any) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def disagreement(lines: Sequence[str], failure: str, group: dist.ProcessGroup) -> str:
    """Return why the ranks of `group` cannot train together, the same text on all; empty if they can.

    lines: `in_common` of this rank. failure: this rank's error, if it failed. A collective on gloo.
    """
    size = dist.get_world_size(group)
    # A digest first: lines of a large model are megabytes, and equal in almost every start.
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    numbers = [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 8 * _WORDS, 8)]
    # Fixed length, so that a rank that failed takes part in the same exchange without lines.
    mine = torch.tensor([bool(failure), *numbers])
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=group)
    said = torch.stack(found)
    # Before the digests, which a rank that failed has of nothing.
    if said[:, 0].any():
        return failures(failure, group)
    return "" if (said == said[0]).all() else _first_difference(lines, group)


def failures(failure: str, group: dist.ProcessGroup) -> str:
    """Return which ranks failed and why; empty if none did. A collective on gloo."""
    said = gather_objects(failure, group)
    by_text = by_value([text or None for text in said])
    text = "; ".join(f"{who} failed: {why}" for why, who in by_text.items() if why)
    return text and f"{text}. Fix the error and restart all ranks."


def failed_collective(error: Exception, cause: str, function: str = "") -> str:
    """Return the text for a collective that raised `error`. cause: which rank left and why, if that is known.

    function: the script's call that waits in the collective, which the other rank may not have made; empty if none.
    """
    if cause and function:
        return (
            f"{cause}, while this rank waits in {function}. Call {function} on all ranks; if that rank failed, fix its "
            "error. Restart all ranks."
        )
    if cause:
        return f"{cause}. Fix the error and restart all ranks."
    return (
        f"a collective failed ({error}). Another rank probably ended, closed its engine, or did not answer within the "
        "process group's timeout: see the last messages of the other ranks."
    )


def _first_difference(lines: Sequence[str], group: dist.ProcessGroup) -> str:
    theirs = [list(lines)]
    dist.broadcast_object_list(theirs, group_src=0, group=group)
    pairs = enumerate(zip_longest(lines, theirs[0]))
    differs = next((number for number, (one, other) in pairs if one != other), None)
    # The least over ranks, so that all name the same line; rank 0 differs from itself nowhere.
    first = min(number for number in gather_objects(differs, group) if number is not None)
    # A model with fewer parameters has no such line.
    said = gather_objects(lines[first] if first < len(lines) else "nothing more", group)
    what, hint = next(_OF_KIND[kind] for kind in _OF_KIND if any(line.startswith(kind) for line in said))
    found = "; ".join(f"{who}: {line}" for line, who in by_value(said).items())
    return f"the ranks have different {what}. {found}. {hint}"


def by_value(values: Sequence[Any]) -> dict[Any, str]:
    """Return value → text that lists its ranks, such as "ranks 0, 2". values: by rank."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return {
        value: f"rank {who[0]}" if len(who) == 1 else f"ranks {', '.join(map(str, who))}"
        for value, who in ranks.items()
    }
