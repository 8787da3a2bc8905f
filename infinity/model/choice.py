"""Modules that are called only if the data needs them, such as tiles of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.model.hooks import UnitParameters


def called(modules: Sequence[nn.Module], needed: Sequence[bool]) -> list[bool]:
    """Return which of `modules` to call, in order, where the data needs some. Their units are fetched next.

    All of them, if gradients are recorded: a parameter that is not used gets a gradient of zeros, and no gradient would
    be another one. All of them on several ranks, which fetch units together: the data of another rank may need them.
    """
    if torch.is_grad_enabled():
        return [True] * len(modules)
    managed = [parameters for each in modules if isinstance(parameters := each._parameters, UnitParameters)]
    if managed and not managed[0].is_alone:
        return [True] * len(modules)
    for parameters in managed[:1]:
        chosen = (each._parameters for each, need in zip(modules, needed, strict=True) if need)
        parameters.expect([each for each in chosen if isinstance(each, UnitParameters)])
    return list(needed)
