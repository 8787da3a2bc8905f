"""Names that DeepSpeed adds to the parameters of a stage 3 engine, which libraries read."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from infinity.deepspeed.runtime.zero import ZeroParamStatus
from torch import nn

import infinity.deepspeed as deepspeed
from support.models import Stack, seeded

Opens = Callable[..., Any]
NAMES = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_tensor",
    "ds_process_group",
    "ds_persist",
    "ds_active_sub_modules",
    "partition_numel",
)


class Reading(nn.Linear):
    """Checks that its weight is available in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.ds_status == ZeroParamStatus.AVAILABLE
        return super().forward(x)


@pytest.mark.parametrize("given", [{}, {"optimizer": None}], ids=["trained", "only run"])
def test_parameters_have_shapes_sizes_and_numbers(opens: Opens, given: dict[str, Any]) -> None:
    """Every engine's parameters have numbers of their own."""
    engines = [opens(3, bf16={"enabled": True}, **given) for _ in range(2)]
    for engine in engines:
        for parameter, plain in zip(engine.module.parameters(), seeded(Stack).parameters(), strict=True):
            assert parameter.ds_shape == plain.shape and parameter.ds_numel == plain.numel()
            assert parameter.partition_numel() == plain.numel() and not parameter.ds_persist
            assert parameter.ds_tensor.dtype == torch.bfloat16
            assert parameter.ds_tensor.ds_numel == parameter.ds_tensor.numel() == plain.numel()
    numbers = [parameter.ds_id for engine in engines for parameter in engine.module.parameters()]
    assert len(set(numbers)) == len(numbers)
    assert numbers == [parameter.ds_id for engine in engines for parameter in engine.module.parameters()]


def test_other_parameters_lack_the_names(opens: Opens) -> None:
    """Parameters in stage 2, of a plain model and of a closed engine have a status only, AVAILABLE."""
    engine, parameters = opens(3), [nn.Parameter(torch.ones(2)), *opens(2).module.parameters()]
    assert all(hasattr(parameter, name) for name in NAMES for parameter in engine.module.parameters())
    engine.destroy()
    parameters += engine.module.parameters()
    assert not [(name, parameter) for name in NAMES for parameter in parameters if hasattr(parameter, name)]
    with pytest.raises(AttributeError, match="'Parameter' object has no attribute 'ds_id'"):
        parameters[0].ds_id  # noqa: B018
    assert all(tensor.ds_status == ZeroParamStatus.AVAILABLE for tensor in (torch.ones(2), *parameters))


def test_the_status_follows_blocks_that_gather_and_forwards(opens: Opens) -> None:
    """A script gathers a parameter that is NOT_AVAILABLE, as LLaVA does to save it."""
    engine = opens(3)
    weight = engine.module.head.weight
    assert hasattr(weight, "ds_id") and weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters([weight]):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
        value = weight.data.detach().cpu().clone()
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert torch.equal(value, seeded(Stack).head.weight)
    opens(3, model=Reading(2, 2))(torch.ones(2, 2))


def test_parameters_carry_no_state(opens: Opens) -> None:
    """A parameter of an engine is copied and pickled as a plain one, and DeepSpeed's own attributes come first."""
    engine = opens(3)
    assert not [name for name, parameter in engine.module.named_parameters() if vars(parameter)]
    weight = engine.module.head.weight
    assert not vars(copy.deepcopy(weight)) and not hasattr(copy.deepcopy(weight), "ds_id")
    file = io.BytesIO()
    torch.save(dict(engine.module.named_parameters()), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["head.weight"], seeded(Stack).head.weight)
    other = nn.Parameter(torch.ones(2))
    other.ds_id = -1  # type: ignore[attr-defined]
    assert other.ds_id == -1  # type: ignore[attr-defined]


def test_collectives_of_a_parameter_name_the_alternative(opens: Opens) -> None:
    engine = opens(3)
    for name in ("all_gather", "partition"):
        assert not hasattr(engine.module.head.weight, name)
        with pytest.raises(AttributeError, match="GatheredParameters"):
            getattr(engine.module.head.weight, name)
