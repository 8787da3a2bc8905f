"""The table of rules agrees with torch, with the native kernels and with the documentation."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path

import pytest
import torch

from infinity.config import Config
from infinity.native import _adam
from infinity.rules import RULES, Hyper, Rule, in_words, rule_of_type

ROWS = [pytest.param(rule, id=name) for name, rule in RULES.items()]
OF_TORCH = [pytest.param(rule, id=name) for name, rule in RULES.items() if rule.torch]


def test_kernels_have_the_rules_of_the_table() -> None:
    for name, moments, root, constants in _adam.RULES:
        rule = RULES[name]
        assert moments == len(rule.moments) and rule.roots == (() if root < 0 else (rule.moments[root],))
        assert constants == tuple(Hyper(name).arguments)[1:]
    assert {name for name, *_ in _adam.RULES} == RULES.keys()


@pytest.mark.parametrize("rule", ROWS)
def test_a_row_is_consistent(rule: Rule) -> None:
    """Its type is its name, its constants are attributes of `Hyper`, and its roots are moments."""
    assert rule_of_type(rule.type.upper()) is rule and RULES[rule.name] is rule
    assert set(rule.roots) <= set(rule.moments)
    hyper = Hyper(rule.name)
    assert hyper.by_key() == {constant.name: constant.default for constant in rule.constants}
    assert pickle.loads(pickle.dumps(hyper)) == hyper and [getattr(hyper, name) for name in rule.keys]


@pytest.mark.parametrize("rule", OF_TORCH)
def test_a_row_has_the_keys_states_and_defaults_of_torch(rule: Rule) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with_momentum = {"momentum": 0.9} if "momentum" in rule.keys else {}
    optimizer = getattr(torch.optim, rule.torch)([parameter], **with_momentum)
    assert bool(optimizer.state) == rule.has_states_at_first
    (group,) = optimizer.param_groups
    # Releases of torch differ in the options that they list in a group.
    assert {"params", *rule.keys} <= group.keys() <= {"params", *rule.keys, *rule.torch_keys}
    defaults = {constant.name: constant.default for constant in rule.constants} | with_momentum
    assert {name: group[name] for name in rule.keys} == defaults
    assert all(group[name] == value for name, value in rule.torch_keys.items() if name in group)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[parameter].keys() == {*rule.moments, *["step"] * rule.counts_steps}


def test_marks_tell_a_rule_from_every_other_optimizer_of_torch() -> None:
    """A key in `marks` is in param_groups of no class of torch.optim but the rule's."""
    for rule in RULES.values():
        for name in vars(torch.optim):
            kind = getattr(torch.optim, name)
            if isinstance(kind, type) and kind is not torch.optim.Optimizer and name != rule.torch:
                shape = (3, 3) if name == "Muon" else (3,)
                group = kind([torch.nn.Parameter(torch.ones(shape))]).param_groups[0]
                assert not group.keys() & set(rule.marks), name


@pytest.mark.parametrize("rule", ROWS)
def test_a_section_of_the_config_has_the_constants(rule: Rule) -> None:
    config = Config.load({"optimizer": {"type": rule.name}})
    assert config.optimizer.type == rule.type and config.optimizer.rule == rule.name
    assert config.optimizer.params.model_dump() == {constant.name: constant.default for constant in rule.constants}
    assert pickle.loads(pickle.dumps(config)) == config


def test_documentation_lists_every_rule() -> None:
    docs = Path(__file__).parents[2] / "docs"
    table = docs.joinpath("optimizer.md").read_text(encoding="utf-8")
    for rule in RULES.values():
        assert f"`{rule.type}`" in table, rule.type
        assert all(f"`{moment}`" in table for moment in chain(rule.moments)), rule.type


def test_rules_in_words() -> None:
    adamw, adam, sgd = (RULES[name] for name in ("adamw", "adam", "sgd"))
    assert in_words([adamw]) == "AdamW" and in_words([adamw, adam, sgd]) == "AdamW, Adam or SGD"
