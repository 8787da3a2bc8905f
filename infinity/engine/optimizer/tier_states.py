"""Reads and replaces the optimizer's states in their tiers, unit by unit, in torch's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.engine.optimizer.state_dict import SavedGroup, SavedState, check_state_dict, digest
from infinity.engine.parts import EngineParts
from infinity.errors import RanksError
from infinity.optim.moments import convert_moment, fp32_moment, rounding_key
from infinity.optim.parameter_rule import ParameterRule
from infinity.plan.windows import RecordsFormat
from infinity.rules import RULES
from infinity.tiers.freed import return_freed_memory
from infinity.units.states import RECORDS, Flats, flat_tensor, view
from infinity.units.stored import inner
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.config import Config

_HALF = 1 << 16


class TierStates:
    """Moments and step counts of one engine. Methods are collective, and called when all states are in their tiers."""

    def __init__(self, parts: EngineParts, config: Config, rules: Sequence[ParameterRule | None] = ()) -> None:
        """rules: the rule in Python of each param_group; None: the config's."""
        self._parts = parts
        self._rules = rules
        self._rule = RULES[config.optimizer.rule]
        self._seed = config.infinity.seed

    def read(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Return parameter → `step` and moments, fp32 in host memory, unsharded on every rank. Parameters without
        states are left out.
        """
        by_parameter: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for unit in self._trained():
            by_parameter.update(self._read(unit))
            return_freed_memory()
        return by_parameter

    def load(
        self,
        groups: Sequence[Mapping[str, Any]],
        state_dict: Mapping[str, Any],
        changing: AbstractContextManager[None],
    ) -> list[SavedGroup]:
        """Validate a state dict for an optimizer with `groups`, load its states into the engine, and return its groups.

        changing: context that stops the engine if a transfer in it fails, since only some states are replaced then.
        Raises errors on all ranks, before any change.
        """
        states, saved_groups = self._checked(groups, state_dict)
        with changing:
            for unit in self._trained():
                self._write(unit, states)
                return_freed_memory()
            self._parts.ranks.barrier()
        return saved_groups

    def _trained(self) -> list[Unit]:
        return [unit for unit in self._parts.units if unit.layout.trainable]

    def _read(self, unit: Unit) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        states, model = self._parts.states, self._parts.ranks.model
        flats = states.read_shards(unit.layout)
        flats.pop("master", None)  # part of the parameter, not in torch's state dicts
        states.complete(flats)
        by_parameter: dict[nn.Parameter, dict[str, Any]] = {}
        for number, (slot, parameter) in enumerate(zip(unit.layout.slots, unit.parameters, strict=True)):
            if slot.record is not None:
                rule, updates = self._rules[slot.group], unit.steps[number]
                assert rule is not None
                if updates:
                    memory = RecordsFormat(unit.layout).of(flats[RECORDS], number)
                    by_parameter[parameter] = rule.in_torch(slot.record, updates, memory)
                continue
            stored = {kind.name: view(kind, slot, flats[kind.name]) for kind in states.kinds(unit.layout)[1:]}
            moments = {
                name: model.whole(parameter, fp32_moment(self._rule.name, name, stored)) for name in self._rule.moments
            }
            if unit.steps[number] or self._rule.has_states_at_first or any(moment.any() for moment in moments.values()):
                by_parameter[parameter] = {"step": torch.tensor(float(unit.steps[number])), **moments}
        return by_parameter

    def _write(self, unit: Unit, saved_states: Mapping[nn.Parameter, SavedState]) -> None:
        states, layout = self._parts.states, unit.layout
        if layout.windows:
            self._write_whole(unit, saved_states)
            return
        kinds = states.kinds(layout)[1:]
        flats: Flats = {kind.name: flat_tensor(kind.length(layout.numel), kind.dtype) for kind in kinds}
        steps = [0] * len(unit.parameters)
        for number, (slot, parameter) in enumerate(zip(layout.slots, unit.parameters, strict=True)):
            saved = saved_states.get(parameter)
            if saved is None:
                continue
            steps[number] = saved.step
            target = {kind.name: view(kind, slot, flats[kind.name]) for kind in kinds}
            key, first = rounding_key(self._seed, saved.step), layout.first + slot.offset
            for name, value in saved.moments.items():
                part = self._parts.ranks.model.part(parameter, value.detach()).cpu().float()
                convert_moment(self._rule.name, name, {name: part}, target, key=key, first=first)
        flats["master"] = states.read_shards(layout)["master"]
        unit.snapshot_read.wait()  # a background save may still read the present states
        states.write(layout, flats)
        unit.restore_steps(steps)

    def _write_whole(self, unit: Unit, saved_states: Mapping[nn.Parameter, SavedState]) -> None:
        states, layout = self._parts.states, unit.layout
        flats = states.read(layout)
        steps = [0] * len(unit.parameters)
        for number, (slot, parameter) in enumerate(zip(layout.slots, unit.parameters, strict=True)):
            saved, rule = saved_states.get(parameter), self._rules[slot.group]
            if saved is not None and saved.own is not None:
                assert rule is not None and slot.record is not None
                memory = RecordsFormat(layout).of(flats[RECORDS], number)
                steps[number] = rule.from_torch(saved.own, slot.record, memory, saved.step)
        unit.snapshot_read.wait()  # a background save may still read the present states
        states.write(layout, flats)
        unit.restore_steps(steps)

    def _check_own(self, states: Mapping[nn.Parameter, SavedState]) -> None:
        """Raise ModelError for a state that is none of its parameter's rule in Python."""
        for unit in self._trained():
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                saved = states.get(parameter)
                if slot.record is not None and saved is not None and saved.own is not None:
                    rule = self._rules[slot.group]
                    assert rule is not None
                    rule.check_torch(saved.own, slot.record, slot.name)

    def _checked(
        self, groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
    ) -> tuple[dict[nn.Parameter, SavedState], list[SavedGroup]]:
        """Return `check_state_dict`. Raises RanksError if ranks load different dicts, or another rank raises."""
        pairs = [pair for unit in self._parts.units for pair in zip(unit.parameters, unit.layout.slots, strict=True)]
        names = {id(parameter): slot.name for parameter, slot in pairs}
        # A group may list a wrapper, whose name is that of an inner tensor without its path.
        for wrapper in (each for unit in self._parts.units for each in unit.wrappers):
            path, tensor = next(inner(wrapper))
            names[id(wrapper)] = names[id(tensor)].removesuffix(f".{path}")
        trained = {id(parameter) for unit in self._trained() for parameter in unit.parameters}
        ranks = self._parts.ranks
        error: Exception | None = None
        states: dict[nn.Parameter, SavedState] = {}
        saved_groups: list[SavedGroup] = []
        try:
            native = self._rule.name
            states, saved_groups = check_state_dict(native, groups, names, trained, state_dict, self._rules)
            self._check_own(states)
        except Exception as caught:  # noqa: BLE001 - raised below, after the exchange with all ranks
            error = caught
        size = ranks.size * ranks.model.size
        if size > 1:
            checksum = 0 if error is not None else digest(states.values(), saved_groups)
            halves = float(checksum % _HALF), float(checksum // _HALF)
            failed, *sums = ranks.totals(float(error is not None), *halves, *(half**2 for half in halves))
            if failed and error is None:
                raise RanksError("another rank rejected the optimizer's state dict: see that rank's error")
            # Cauchy-Schwarz: (Σx)² = n Σx² only if all ranks have the same x.
            if error is None and any(sums[k] ** 2 != size * sums[2 + k] for k in range(2)):
                raise RanksError("ranks load different optimizer state dicts: pass the same one on every rank")
        if error is not None:
            raise error
        return states, saved_groups
