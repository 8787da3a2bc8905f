"""The manifest of a rank's durable states: their layout, and the command that committed it last."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.checkpoint.format import crc32_of
from infinity.durable.command import command_line, start_folder
from infinity.errors import CheckpointError
from infinity.inputs import parse_json, read_input
from infinity.plan.formats import StateFormat, StateKind
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan

if TYPE_CHECKING:
    from infinity.config import Config

_VERSION = 1
_OF_WEIGHTS = 2
"""Version of a manifest whose stripe has weights, which an older Infinity would read as round robin."""
_OF_RECORDS = 3
"""Version of a manifest with states of rules in Python."""


@dataclass(frozen=True)
class Manifest:
    """layout: units, slots of states, formats and ranks, as JSON. Equal layouts mean equal formats of files."""

    layout: dict[str, Any]
    command: tuple[str, ...]
    """The command line that started the ranks: torchrun's, or that of `infinity run`, if there is one."""
    folder: str
    """The working directory in which the command started."""
    runs: tuple[str, ...] = ()
    """The run's folder in each folder of nvme_path."""
    has_commit: bool = False
    """True once all ranks have a commit, so that missing records are lost ones."""

    @property
    def ranks(self) -> int:
        return int(self.layout["ranks"])

    def to_json(self) -> str:
        content: dict[str, Any] = {"layout": self.layout, "command": list(self.command), "folder": self.folder}
        content |= {"runs": self.runs, "has_commit": self.has_commit}
        version = _OF_WEIGHTS if "weights" in self.layout else _VERSION
        if "has_records" in self.layout:
            version = _OF_RECORDS
        return json.dumps({"version": version, "crc32": crc32_of(content), **content}, indent=1)


def manifest_of(plan: Plan, config: Config, ranks: int) -> Manifest:
    """Return the manifest of the states of a plan. ranks: all of them, data and model parallel."""
    assert plan.io is not None and plan.io.durable is not None
    layout = {
        "ranks": ranks,
        "model_parallel": plan.ranks.model_parallel,
        "shards": plan.ranks.shards,
        "optimizer": config.optimizer.type,
        "rule": config.optimizer.rule,
        "moments": config.infinity.moments,
        "units": [
            {
                "name": unit.name,
                "dtype": str(unit.dtype).removeprefix("torch."),
                "trainable": unit.trainable,
                "numel": unit.numel,
                "first": unit.first,
                "tile": plan.placement.tile_sizes.get(unit.index, 0),
                "states": [  # in their order in a tile
                    [kind.name, str(kind.dtype).removeprefix("torch."), kind.per] for kind in _states(plan, unit)
                ],
                "slots": [[slot.name, list(slot.shape), slot.offset, slot.group] for slot in unit.slots],
                **_records(unit),
            }
            for unit in plan.units
        ],
        "extents": [
            [each.unit, each.state.value, each.first.offset, each.second.offset, each.first.nbytes]
            for each in plan.io.durable.extents
        ],
        "folders": len(plan.io.folders),
        "chunk": plan.io.stripe.chunk,
        "checksum_block": plan.io.checksum_block,
        "nbytes": plan.io.nbytes,
    }
    if any(unit.windows for unit in plan.units):
        layout["has_records"] = True
    if any(weight != 1 for weight in plan.io.stripe.weights):
        layout["weights"] = plan.io.stripe.weights
    runs = tuple(os.path.abspath(folder / plan.io.durable.run) for folder in plan.io.folders)
    return Manifest(json.loads(json.dumps(layout)), command_line(), start_folder(), runs)


def _states(plan: Plan, unit: UnitLayout) -> tuple[StateKind, ...]:
    """Return the states of a unit of a native rule, in their order in a tile."""
    form = plan.policy.states(unit) if unit.trainable else None
    return form.states if isinstance(form, StateFormat) else ()


def _records(unit: UnitLayout) -> dict[str, Any]:
    """Return the windows of a unit of rules in Python, and the record of each slot: the states, and those after each
    update by their number; empty for other units.
    """
    if not unit.windows:
        return {}
    records = []
    for slot in unit.slots:
        assert slot.record is not None
        fields = list(dict.fromkeys(each for states in slot.record.after for each in states.fields))
        shown = [
            [each.name, str(each.dtype).removeprefix("torch."), list(each.shape), each.first, each.is_number]
            for each in fields
        ]
        after = [[fields.index(each) for each in states.fields] for states in slot.record.after]
        records.append([slot.record.master is not None, shown, after])
    return {"windows": [list(window) for window in unit.windows], "records": records}


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a file; None if there is none or it was cut short. Raises CheckpointError if it is newer
    than this version of Infinity.
    """
    if path.is_symlink():
        return None
    try:
        content = parse_json(read_input(path))
        version, crc32 = content.pop("version"), content.pop("crc32")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    if version not in (_VERSION, _OF_WEIGHTS, _OF_RECORDS):
        raise CheckpointError(f"{path} has format version {version}: use a newer Infinity")
    if crc32 != crc32_of(content) or not isinstance(content.get("layout"), dict):
        return None
    command, runs = (tuple(map(str, content.get(key, ()))) for key in ("command", "runs"))
    return Manifest(content["layout"], command, str(content.get("folder")), runs, content.get("has_commit") is True)
