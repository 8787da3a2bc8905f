"""torch.func through an engine whose parameters are whole on every rank, as in stages 0 to 2.

A derivative may outlive the next update, which writes the parameters' own memory: the model runs on copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.units.modes import in_derivative, outside_modes

__all__ = ["in_derivative", "on_copies"]


def on_copies(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the output of `model` with copies in place of its parameters, which get no gradients."""
    with outside_modes(), torch.no_grad():
        copies = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, copies, tuple(args), dict(kwargs))
