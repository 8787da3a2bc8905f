"""Selects the rule that initialises a module on the meta device: its model's, or its own `reset_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Rule = Callable[[nn.Module], None]


class Rules:
    """Maps each module of `model` to its rule.

    `initialize_module(module)` of the outermost module that defines it applies to all modules below. Otherwise
    `_init_weights` of the nearest enclosing module applies, as in transformers for nested models; otherwise the
    module's own `reset_parameters()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rules: dict[nn.Module, Rule] = {}
        self._visit(model, reset, final=False)

    def _visit(self, module: nn.Module, rule: Rule, *, final: bool) -> None:
        if module in self._rules:
            return
        if not final:
            declared = _method(module, "initialize_module")
            rule, final = declared or _method(module, "_init_weights") or rule, declared is not None
        self._rules[module] = rule
        for child in module.children():
            self._visit(child, rule, final=final)

    def of(self, module: nn.Module) -> Rule:
        return self._rules[module]


def reset(module: nn.Module) -> None:
    """Call `reset_parameters()` of `module`, if it has one."""
    own = _method(module, "reset_parameters")
    if own is not None:
        own()


def resets(module: nn.Module) -> bool:
    """True if `module` has a `reset_parameters()`."""
    return _method(module, "reset_parameters") is not None


def _method(module: nn.Module, name: str) -> Any:
    found = getattr(module, name, None)
    return found if callable(found) else None
