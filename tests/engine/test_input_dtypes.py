"""Float inputs of a 16-bit model: PyTorch's error about two dtypes names the input and the setting that casts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import UsageError
from support.models import seeded

X = torch.ones(4, 8)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "linear without bias": lambda: nn.Linear(8, 8, bias=False),
    "convolution": lambda: nn.Conv1d(4, 4, 3),
    "norm": lambda: nn.LayerNorm(8),
    "recurrent": lambda: nn.LSTM(8, 8),
    "attention": lambda: nn.MultiheadAttention(8, 2),
}


class Model(nn.Module):
    """Runs its layer on the first tensor that it finds, cast to `cast`."""

    def __init__(self, layer: Callable[[], nn.Module] = LAYERS["linear"], cast: torch.dtype | None = None) -> None:
        super().__init__()
        self.layer, self.cast = layer(), cast

    def forward(self, x: Any = None, *, shape: tuple[int, ...] | None = None, **named: Any) -> Any:
        x = next(iter(named.values())) if x is None else x
        while not isinstance(x, torch.Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        x = x if self.cast is None else x.to(self.cast)
        x = x if shape is None else x.view(shape)
        return self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)


def opened(section: str = "bf16", model: Callable[[], nn.Module] = Model, **values: Any) -> Any:
    config = {"train_batch_size": 1, section: {"enabled": True, **values}}
    return infinity.initialize(seeded(model), config)[0]


def refused(engine: Any, *args: Any, **named: Any) -> tuple[str, str]:
    """Return the texts of a forward's error and of its cause. Keeps neither, whose frames have views of parameters."""
    try:
        engine(*args, **named)
    except UsageError as error:
        return str(error), str(error.__cause__)
    pytest.fail("the forward raised nothing")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("section", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_errors_of_layers_name_the_input(layer: str, section: str, dtype: str) -> None:
    """The text begins with the input and the fix, and PyTorch's own error is its end and its cause."""
    with opened(section, lambda: Model(LAYERS[layer])) as engine:
        text, of_torch = refused(engine, X)
        fix = f"Pass it in that dtype, or set {section}.auto_cast to true."
        assert text == f"input 0 is float32, and the model computes in {dtype}. {fix} PyTorch's error: {of_torch}"
        engine(X.to(getattr(torch, dtype)))  # the engine goes on


@pytest.mark.parametrize(
    ("auto_cast", "args", "named", "expected"),
    [
        (False, ({"a": [X]},), {}, "input 0['a'][0] is float32"),
        (False, (), {"x": X}, "input 'x' is float32, and the model computes in bfloat16. Pass it in that dtype, "),
        (True, (), {"x": {"a": X}}, "input 'x'['a'] is float32, and the model computes in bfloat16. Pass it in that "),
        (False, (X,), {"mask": X.double()}, "input 0 is float32, and the model computes in "),
        (False, (X,), {"mask": X}, "Pass them in that dtype, or set bf16.auto_cast to true, which casts positional "),
        (False, ([X] * 5,), {}, "input 0[2] is float32, 2 more differ, and the model"),
        (False, (X, ), {"ids": torch.arange(3)}, "input 0 is float32, and the model"),
    ],
)  # fmt: skip
def test_inputs_are_named_by_their_place(auto_cast: bool, args: Any, named: Any, expected: str) -> None:
    """Positions, keywords and containers; a keyword's fix does not advise a cast that would leave it as it is."""
    with opened(auto_cast=auto_cast) as engine:
        text, _ = refused(engine, *args, **named)
    assert expected in text
    if not args:
        assert "bf16.auto_cast casts positional arguments only" in text


def test_a_model_that_casts_its_inputs_runs() -> None:
    with opened(model=lambda: Model(cast=torch.bfloat16)) as engine:
        assert torch.equal(engine(X), engine(X.bfloat16()))


def test_other_errors_stay_as_they_are() -> None:
    """Errors that are not about dtypes, and errors about them with inputs of the right dtype, pass unchanged."""
    with opened() as engine, pytest.raises(RuntimeError, match="invalid for input of size 32") as caught:
        engine(X, shape=(3, 3))
    assert not isinstance(caught.value, UsageError)
    with (
        opened(model=lambda: Model(cast=torch.float64)) as engine,
        pytest.raises(RuntimeError, match="dtype") as caught,
    ):
        engine(X.bfloat16())
    assert not isinstance(caught.value, UsageError)


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}])
def test_inference_names_the_input(config: dict[str, Any]) -> None:
    """`dtype=` without a section of the config advises both of the section's settings."""
    dtype = None if config else torch.bfloat16
    setting = "bf16.auto_cast" if config else "bf16.enabled and bf16.auto_cast"
    expected = pytest.raises(UsageError, match=f"input 0 is float32.* or set {setting} to true")
    with infinity.init_inference(seeded(Model), config, dtype=dtype) as engine, expected:
        engine(X)
    advised = {"bf16": {"enabled": True, "auto_cast": True}}
    with infinity.init_inference(seeded(Model), advised, dtype=dtype) as engine:
        assert engine(X).dtype == torch.bfloat16


def test_an_error_of_the_model_about_something_else_passes_unchanged() -> None:
    """Its own ValueError, and an operation on a dtype that no input has."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
            if kind == "own":
                raise ValueError("this dtype is not supported here")
            h: torch.Tensor = self.layer(x.to(self.layer.weight.dtype))
            return h @ torch.ones(4, 4, dtype=torch.float64)

    with opened(model=Own) as engine:
        with pytest.raises(ValueError, match="this dtype is not supported here"):
            engine(torch.ones(2, 4), "own")
        with pytest.raises(RuntimeError, match=r"[dD]ouble") as caught:
            engine(torch.ones(2, 4), "product")
        assert type(caught.value) is RuntimeError
