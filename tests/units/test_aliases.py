"""Tensors that share a parameter's memory are refused by name before anything is changed; harmless ones are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.errors import ModelError
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import plain, trained
from support.models import Stack, seeded, vector_batches


class Pair(nn.Module):
    """Two linear layers of the same shape: (batch, width) and targets of that shape → mean squared error."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.b(torch.tanh(self.a(x))), targets)


BATCHES = vector_batches(4)
SHARING: dict[str, tuple[Callable[[Any], object], str]] = {}
"""name → (function that changes a Pair and returns what the user keeps, pattern of the error)."""


def sharing(said: str) -> Callable[[Callable[[Any], object]], Callable[[Any], object]]:
    def note(change: Callable[[Any], object]) -> Callable[[Any], object]:
        SHARING[change.__name__] = change, said
        return change

    return note


@sharing(r"model\.flat shares the memory of parameter a\.weight")
def an_attribute(model: Any) -> None:
    model.flat = model.a.weight.view(-1)


@sharing(r"model\.b\.views\[1\]\['rows'\] shares the memory of parameter a\.weight")
def in_containers(model: Any) -> None:
    model.b.views = [None, {"rows": model.a.weight.data[2:4]}]


@sharing(r"model\.run\.<closure rows> shares the memory of parameter a\.weight")
def a_closure(model: Any) -> None:
    rows = model.a.weight[:3]
    model.run = lambda x: x @ rows.t()


@sharing(r"model\.a\._forward_pre_hooks\[\d+\]\.<default> shares the memory of parameter b\.bias")
def a_hook(model: Any) -> None:
    bias = model.b.bias.detach()
    model.a.register_forward_pre_hook(lambda module, args, bias=bias: (args[0] + bias,))


@sharing(r"model\.tools\.head\.w shares the memory of parameter b\.weight")
def an_object(model: Any) -> None:
    model.tools = SimpleNamespace(head=SimpleNamespace(w=model.b.weight.t()))


@sharing(r"model\.a\.weight\.flat shares the memory of parameter a\.weight")
def an_attribute_of_the_parameter(model: Any) -> None:
    model.a.weight.flat = model.a.weight.view(-1)


@sharing(r"model\.kept\[0\]\._parameters\['weight'\] shares the memory of parameter a\.weight")
def a_module_outside_of_the_tree(model: Any) -> None:
    other = nn.Linear(32, 32)
    other.weight.data = model.a.weight.data
    model.kept = [other]


@sharing(r"parameters a\.weight and b\.weight share memory .*b\.weight = a\.weight")
def data_of_another(model: Any) -> None:
    model.b.weight.data = model.a.weight.data


@sharing(r"parameters a\.weight and b\.weight share memory")
def a_parameter_made_of_another(model: Any) -> None:
    model.b.weight = nn.Parameter(model.a.weight.t())


@sharing(r"parameters a\.bias and b\.bias share memory")
def overlapping_parts(model: Any) -> None:
    whole = torch.randn(40)
    model.a.bias.data, model.b.bias.data = whole[:32], whole[8:]


@sharing(r"buffer scale shares the memory of parameter a\.bias")
def a_buffer(model: Any) -> None:
    model.register_buffer("scale", model.a.bias.detach()[4:8])


@sharing(r"buffer scale shares the memory of parameter a\.bias")
def a_parameter_as_buffer(model: Any) -> None:
    model.register_buffer("scale", model.a.bias)


@sharing(r"outside of the model \(.*kept\['a\.weight'\].*shares the memory of parameter a\.weight")
def a_state_dict(model: Any) -> object:
    return model.state_dict()


@sharing(r"outside of the model \(.*kept\[1\].*shares the memory of parameter a\.bias")
def a_list_of_data(model: Any) -> object:
    return [None, model.a.bias.data]


@sharing(r"outside of the model \(in a NumPy array.*shares the memory of parameter a\.weight")
def an_array(model: Any) -> object:
    return model.a.weight.detach().numpy()


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("start", ["initialize", "init_inference"])
def test_shared_memory_is_named(name: str, start: str, tmp_path: Path) -> None:
    """Shared memory is named, and the model stays unchanged: an engine takes it once nothing is shared."""
    change, said = SHARING[name]
    model = seeded(Pair)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kept = change(model)
    begin = getattr(infinity, start)
    if start == "init_inference" and "outside" in said:
        begin(model, engine_config(folder=tmp_path), device=CpuDevice()).close()
        return  # frozen values do not change
    with pytest.raises(ModelError, match=said) as caught:
        begin(model, engine_config(folder=tmp_path), device=CpuDevice())
    assert name == "a_state_dict" or "\n" not in str(caught.value)
    if "outside" in said:
        del kept
        assert all(torch.equal(value, before[key]) for key, value in copy.deepcopy(model).state_dict().items())
        infinity.initialize(model, engine_config(folder=tmp_path), device=CpuDevice())[0].close()


@pytest.mark.parametrize("strides", [(1, 1), (0, 1), (1, 0), (2, 31)], ids=str)
def test_elements_in_one_place(strides: tuple[int, int], tmp_path: Path) -> None:
    """torch.optim adds to such memory once for each element; frozen values do not change."""
    model = seeded(Pair)
    model.a.weight = nn.Parameter(torch.randn(2000).as_strided((32, 32), strides))
    with pytest.raises(ModelError, match=r"elements of parameter a\.weight share memory") as caught:
        infinity.initialize(model, engine_config(folder=tmp_path), device=CpuDevice())
    assert "a.weight.data = a.weight.data.contiguous()" in str(caught.value)
    frozen = copy.deepcopy(model)
    frozen.a.weight.requires_grad_(False)
    infinity.initialize(frozen, engine_config(folder=tmp_path), device=CpuDevice())[0].close()
    model.a.weight.data = model.a.weight.data.contiguous()
    infinity.initialize(model, engine_config(folder=tmp_path), device=CpuDevice())[0].close()


@pytest.mark.parametrize("strides", [(1, 32), (2, 64), (100, 3), (2, 33)], ids=str)
def test_elements_in_places_of_their_own(strides: tuple[int, int], tmp_path: Path) -> None:
    """Transposed and spread memory; strides of 2 and 33 interleave rows."""
    config, model = engine_config(folder=tmp_path), seeded(Pair)
    model.a.weight.data = torch.randn(4000).as_strided((32, 32), strides)
    expected = copy.deepcopy(model)
    ours, theirs = trained(model, BATCHES, config), plain(expected, BATCHES, config)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)


def test_many_are_counted(tmp_path: Path) -> None:
    model = seeded(Stack)
    kept = [parameter.data for parameter in model.parameters()]
    with pytest.raises(ModelError, match=f"and {len(kept) - 3} more"):
        infinity.initialize(model, engine_config(folder=tmp_path), device=CpuDevice())


def test_two_parameters_over_one_storage_on_the_meta_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Pair()
    model.b.weight.data = model.a.weight.data
    with pytest.raises(ModelError, match=r"parameters a\.weight and b\.weight share memory"):
        infinity.initialize(model, engine_config(folder=tmp_path), device=CpuDevice())


# -- harmless ----------------------------------------------------------------------------------------------------------


def tied(model: Any) -> None:
    model.b.weight = model.a.weight


def flattened(model: Any) -> None:
    """Put all parameters into one storage, as `vector_to_parameters` does."""
    parameters = list(model.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach(), parameters)


def columns(model: Any) -> None:
    """Make parameters of columns of a matrix, whose spans overlap but whose elements do not."""
    whole = torch.randn(32, 64)
    model.a.weight, model.b.weight = (nn.Parameter(part) for part in whole.chunk(2, dim=1))


def a_copy(model: Any) -> object:
    return copy.copy(model), copy.copy(model.a)


def frozen(model: Any) -> object:
    """Share memory by `nn.Embedding.from_pretrained` with a table that the user keeps."""
    model.a.weight.requires_grad_(False)
    return model.a.weight.data


def a_graph(model: Any) -> object:
    return model(*BATCHES[0])


def clones(model: Any) -> object:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def an_optimizer(model: Any) -> object:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def garbage(model: Any) -> None:
    cycle: list[Any] = [model.a.weight.data]
    cycle.append(cycle)


def loaded(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def from_numpy(model: Any) -> object:
    values = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    model.a.weight.data = torch.from_numpy(values).clone()
    return values


def spectral_norm(model: Any) -> None:
    """Add a spectral norm, whose attribute views the parameter until the first forward replaces it."""
    nn.utils.spectral_norm(model.a)


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.a)


@pytest.mark.parametrize(
    "change",
    [tied, flattened, columns, a_copy, frozen, a_graph, clones, an_optimizer, garbage, loaded, from_numpy,
     spectral_norm, parametrized],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_innocent_use_trains(change: Callable[[Any], object], tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, unit_size=2048)
    expected_model, model = seeded(Pair), seeded(Pair)
    torch.manual_seed(1)
    change(expected_model)
    torch.manual_seed(1)
    kept = change(model)
    ours, expected = trained(model, BATCHES, config), plain(expected_model, BATCHES, config)
    assert ours.losses == pytest.approx(expected.losses, rel=1e-6)
    del kept
