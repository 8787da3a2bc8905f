"""Leaf modules. Marks have no effect, since units on data-dependent paths are fetched when they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn


def z3_leaf_module(model: nn.Module) -> bool:
    """Return True if the module is marked as a leaf."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return False: parameters carry no marks."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that are marked as leaves."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module as a leaf, or remove its mark."""
    model._z3_leaf = flag  # type: ignore[assignment]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark and return the modules of given classes, or names of classes. Raises ValueError if there is none."""
    return _mark(model, _of_class(leaf_module_classes), True, leaf_module_classes, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of modules of given classes, and return the modules. Raises ValueError if there is none."""
    return _mark(model, _of_class(leaf_module_classes), False, leaf_module_classes, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with given names in `named_modules`. Return them, and the names that no module has.

    Raises ValueError if there is no module.
    """
    return _mark_named(model, str.__eq__, module_names, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, suffix_list: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end in one of `suffix_list`. Return them, and the suffixes that no name has.

    Raises ValueError if there is no module.
    """
    return _mark_named(model, str.endswith, suffix_list, raise_if_not_found)


def _mark_named(
    model: nn.Module, fits: Callable[[str, str], bool], wanted: Sequence[str], required: bool
) -> tuple[list[nn.Module], list[str]]:
    def matches(name: str, _: nn.Module) -> bool:
        return any(fits(name, each) for each in wanted)

    names = [name for name, _ in model.named_modules()]
    missing = [each for each in wanted if not any(fits(name, each) for name in names)]
    return _mark(model, matches, True, wanted, required), missing


def _of_class(classes: Sequence[type | str]) -> Callable[[str, nn.Module], bool]:
    names = {value for value in classes if isinstance(value, str)}
    types = tuple(value for value in classes if isinstance(value, type))

    def matches(_: str, module: nn.Module) -> bool:
        kind = type(module)
        return isinstance(module, types) or bool({kind.__name__, f"{kind.__module__}.{kind.__qualname__}"} & names)

    return matches


def _mark(
    model: nn.Module,
    matches: Callable[[str, nn.Module], bool],
    flag: bool,
    wanted: Sequence[type | str],
    required: bool,
) -> list[nn.Module]:
    modules = [module for name, module in model.named_modules() if matches(name, module)]
    if not modules and required:
        shown = ", ".join(value if isinstance(value, str) else value.__name__ for value in wanted)
        raise ValueError(f"{type(model).__name__} has no module {shown}: pass classes or names of its modules")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules
