"""Initialises a module on the meta device by its model's rule, or its own `reset_parameters`, from a seed.

A trial checks that modules are initialised independently, so that each rank may initialise its own shards only.

Large tensors are filled with random numbers on several threads, with the same values for any number of threads. A fill
of more than `PIECE` elements is cut into pieces, each with a generator of its own. Their seeds derive from one draw of
torch's generator and the number of the piece, so that neither threads nor their timing matter. The code that calls for
the fill runs on one thread, in order, and needs no knowledge of this.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Rule = Callable[[nn.Module], None]


Rules = Mapping[nn.Module, Rule]


def rules_of(model: nn.Module) -> Rules:
    """Return module → its rule, for each module of `model`.

    `initialize_module(module)` of the outermost module that defines it applies to all modules below. Otherwise
    `_init_weights` of the nearest enclosing module applies, as in transformers for nested models; otherwise the
    module's own `reset_parameters()`.
    """
    rules: dict[nn.Module, Rule] = {}
    left: list[tuple[nn.Module, Rule, bool]] = [(model, reset, False)]
    while left:
        module, rule, final = left.pop()
        if module in rules:
            continue
        if not final:
            declared = _method(module, "initialize_module")
            rule, final = declared or _method(module, "_init_weights") or rule, declared is not None
        rules[module] = rule
        left += [(child, rule, final) for child in reversed([*module.children()])]
    return rules


def reset(module: nn.Module) -> None:
    """Call `reset_parameters()` of `module`, if it has one."""
    own = _method(module, "reset_parameters")
    if own is not None:
        own()


def _method(module: nn.Module, name: str) -> Any:
    found = getattr(module, name, None)
    return found if callable(found) else None


def apply_rule(rule: Rule, module: nn.Module, seed: int, others: Collection[str] = ()) -> None:
    """Apply `rule` to `module`, and then its own `reset_parameters` to the parameters that the rule does not set.

    Parameters are NaN before. others: names of parameters that need no values.
    """
    seeded(rule, module, seed)
    held = {name: p for name, p in module._parameters.items() if p is not None}
    left = {name for name, parameter in held.items() if name not in others and not is_set(parameter)}
    if left and rule is not reset:  # the rule keeps the values of the constructor
        with aside(module, held.keys() - left, set(module._buffers)):
            seeded(reset, module, seed)


def seeded(rule: Rule, module: nn.Module, seed: int) -> None:
    """Initialise `module` with the global generators of torch, numpy and Python at `seed`, and restore them."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % (1 << 32))
            random.seed(seed)
            rule(module)
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def aside(module: nn.Module, parameters: set[str], buffers: set[str]) -> Iterator[None]:
    """Replace the named parameters and buffers of a module by stand-ins in the block, which take its changes.

    Stand-ins of parameters are uninitialised; those of buffers are clones.
    """
    held = {name: p for name, p in module._parameters.items() if p is not None and name in parameters}
    kept = {name: b for name, b in module._buffers.items() if b is not None and name in buffers}
    for name, parameter in held.items():
        stand_in = torch.empty(parameter.shape, dtype=parameter.dtype)
        module._parameters[name] = nn.Parameter(stand_in, parameter.requires_grad)
    module._buffers.update({name: buffer.clone() for name, buffer in kept.items()})
    try:
        yield
    finally:
        module._parameters.update(held)
        module._buffers.update(kept)


def is_set(parameter: nn.Parameter) -> bool:
    """True if no value is NaN. The sum is only a quick test: infinities may sum to NaN as well."""
    value = parameter.data
    if not value.is_floating_point() or not value.sum(dtype=torch.float32).isnan():
        return True
    return not value.isnan().any()


def fingerprint(model: nn.Module, rules: Rules, drawn: Mapping[nn.Parameter, str]) -> bytes:
    """Return a digest of the names in `drawn`, and of values that their rules make in a trial.

    Ranks with equal digests make equal values. The trial initialises the smallest module of each class and rule twice.
    Empty if a rule reads other parameters, sets attributes, or has other values when it is repeated, such as those of a
    generator of its own: the values then depend on the modules that were made before.

    drawn: parameters on the meta device that rules will initialise → their names.
    """

    def numel(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters(recurse=False))

    smallest: dict[object, nn.Module] = {}
    for module in model.modules():
        if any(parameter in drawn for parameter in module.parameters(recurse=False)):
            rule = rules[module]
            kind = type(module), getattr(rule, "__func__", rule), id(getattr(rule, "__self__", None))
            smallest[kind] = min(smallest.get(kind, module), module, key=numel)
    digest = hashlib.blake2b("\0".join(drawn.values()).encode())
    for module in smallest.values():
        first, second = (_trial(rules, module) for _ in range(2))
        if not first or first != second:
            return b""
        digest.update(first)
    return digest.digest() if smallest else b""


def _trial(rules: Rules, module: nn.Module) -> bytes:
    """Initialise stand-ins of the parameters and buffers of a module. Return their digest; empty if the rule fails, as
    it does when it reads parameters on the meta device, or sets attributes.
    """
    digest, before = hashlib.blake2b(), dict(vars(module))
    with aside(module, set(module._parameters), set(module._buffers)):
        for parameter in module.parameters(recurse=False):
            parameter.data.fill_(math.nan if parameter.is_floating_point() else 0)
        try:
            apply_rule(rules[module], module, 0)
        except Exception:  # noqa: BLE001 - the model's code; the unit that needs it raises
            return b""
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    after = vars(module)
    unchanged = before.keys() == after.keys() and all(after[name] is value for name, value in before.items())
    return digest.digest() if unchanged else b""


PIECE = 1 << 20
"""Elements of a piece. Seeding a generator takes microseconds, a piece milliseconds."""

_FILLS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}


class ParallelDraws(TorchDispatchMode):
    """Divides `normal_` and `uniform_` of large host tensors among the threads of `pool` in its block.

    Other operators, fills with a generator of the caller's, and small or strided tensors are left to torch.
    """

    def __init__(self, pool: Executor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's own way to keep Dynamo out imports it, 60 MB and a second. Nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if operator not in _FILLS or not _divisible(args[0]) or (kwargs and kwargs.get("generator") is not None):
            return operator(*args, **(kwargs or {}))
        tensor, *bounds = args
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        pieces = tensor.detach().view(-1).split(PIECE)

        def fill(index: int) -> None:
            # torch's generator uses 32 bits of a seed: consecutive ones differ.
            operator(pieces[index], *bounds, generator=torch.Generator("cpu").manual_seed(seed + index))

        for _ in self._pool.map(fill, range(len(pieces))):
            pass
        return tensor


def _divisible(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.numel() > PIECE
        and tensor.is_contiguous()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_inference()
    )
