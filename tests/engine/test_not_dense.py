"""Parameters that are not dense tensors in memory of their own are refused by name at start: quantised, sparse, nested
and fake ones. Subclasses with memory of their own train.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import infinity
from infinity.errors import CheckpointError, ModelError
from infinity.tiers.device import CpuDevice
from support.configs import engine_config, raw
from support.lifetime import assert_trains_like_plain
from support.loops import open_engine, train
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(4)


class Quantised(torch.Tensor):
    """An int8 tensor and its scale behind one fp32 tensor, as in quantised models. It has no memory of its own."""

    _values: torch.Tensor
    _scale: float

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: float) -> Quantised:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made._values, made._scale = values, scale
        return made  # type: ignore[no-any-return]

    def dequantize(self) -> torch.Tensor:
        return self._values.float() * self._scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._values, args[0]._scale)
        args, kwargs = tree_map_only(Quantised, Quantised.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


class Flattened(Quantised):
    """The same, traceable by torch.compile."""

    def __tensor_flatten__(self) -> Any:
        return ["_values"], self._scale


class Logged(torch.Tensor):
    """A subclass with memory of its own and operations of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            result = func(*args, **(kwargs or {}))
        return logged(result) if func is torch.ops.aten.detach.default else result


def logged(values: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_subclass(Logged, values)  # type: ignore[attr-defined]
    return made


def quantised(kind: type[Quantised]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: kind((weight * 100).to(torch.int8), 0.01)


def fake(weight: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(weight.shape)


def nested(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: torch.nested.nested_tensor([weight[:2], weight[:3]], layout=layout)


KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "wrapper": (
        quantised(Quantised),
        r"a \S*\.Quantised, a tensor subclass .*by nn\.Parameter\({}\.dequantize\(\), req",
    ),
    "traceable wrapper": (quantised(Flattened), r"a \S*\.Flattened, .*{}\.dequantize\(\)"),
    "masked": (
        lambda w: torch.masked.masked_tensor(w, w > 0),
        r"a torch\.masked\.\S*MaskedTensor, .*of a plain tensor",
    ),
    "fake": (fake, r"a torch\._subclasses\.fake_tensor\.FakeTensor, "),
    "sparse": (torch.Tensor.to_sparse, r"a tensor of layout torch\.sparse_coo, .*by nn\.Parameter\({}\.to_dense\(\)\)"),
    "compressed": (torch.Tensor.to_sparse_csr, r"a tensor of layout torch\.sparse_csr, "),
    "oneDNN": (torch.Tensor.to_mkldnn, r"a tensor of layout torch\._mkldnn, "),
    "int8": (
        lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
        r"a quantised tensor \(torch\.qint8\), .*{}\.dequantize\(\)",
    ),
    "nested": (nested(torch.strided), "a tensor without memory of its own"),
    "jagged": (nested(torch.jagged), r"a tensor of layout torch\.jagged, "),
}


def with_weights(convert: Callable[[torch.Tensor], torch.Tensor]) -> Linears:
    """Return a model in which every other weight is frozen and converted."""
    model = seeded(Linears)
    for layer in list(model.layers)[1::2]:
        layer.weight = nn.Parameter(convert(layer.weight.detach()), requires_grad=False)
    return model


@pytest.mark.parametrize("begin", [infinity.initialize, infinity.init_inference])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_parameter_that_is_not_dense_is_refused_by_name(kind: str, begin: Any, tmp_path: Path) -> None:
    convert, said = KINDS[kind]
    model = with_weights(convert)
    before = list(model.parameters())
    said = said.format(r"layers\.1\.weight")
    with pytest.raises(ModelError, match=rf"parameter layers\.1\.weight is {said}") as caught:
        begin(model, raw(tmp_path), device=CpuDevice())
    assert "\n" not in str(caught.value)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", [Quantised, Flattened])
def test_the_errors_conversion_trains(kind: type[Quantised]) -> None:
    def make() -> nn.Module:
        model = with_weights(quantised(kind))
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, Quantised):
                    setattr(module, name, nn.Parameter(parameter.dequantize(), requires_grad=False))
        return model

    assert_trains_like_plain(make, BATCHES, units=8)


def test_a_subclass_with_memory_of_its_own_trains() -> None:
    assert_trains_like_plain(lambda: with_weights(logged), BATCHES, units=8)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"nested"}))  # torch cannot copy a module with that
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_refuses_a_buffer_that_is_not_dense_by_name(kind: str, tmp_path: Path) -> None:
    """Nothing is written, training goes on, and a buffer that is not persistent is not saved."""
    model = seeded(Linears)
    model.register_buffer("adjacency", KINDS[kind][0](torch.eye(8)))
    with open_engine(model, engine_config(unit_size=2000)) as engine:
        train(engine, BATCHES[:1])
        with pytest.raises(CheckpointError, match=r"buffer adjacency is a .*persistent=False"):
            engine.save_checkpoint(tmp_path / "saved")
        assert not list(tmp_path.glob("saved/*"))
        train(engine, BATCHES[1:])
        model._non_persistent_buffers_set.add("adjacency")
        engine.save_checkpoint(tmp_path / "saved")
