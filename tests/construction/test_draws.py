"""Random numbers drawn on several threads have the same values for any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity.construction.initialize import PIECE, ParallelDraws
from support.configs import engine_config
from support.loops import open_engine

N = 2 * PIECE + 12_343  # a multiple of 5


def drawn(fill: Callable[[torch.Tensor], object], threads: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(5)
    tensor = make()
    with ThreadPoolExecutor(threads) as pool, torch.no_grad(), ParallelDraws(pool):
        fill(tensor)
    return tensor


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.normal_(0.5, 0.02),
        lambda x: x.data.uniform_(-1, 1),
        lambda x: nn.init.trunc_normal_(x, std=0.02),
        lambda x: nn.init.kaiming_uniform_(x.view(-1, 5)),
        lambda x: (x.normal_(), x.mul_(2), x.uniform_()),
    ],
    ids=["normal", "uniform", "trunc_normal", "kaiming", "twice"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_do_not_depend_on_threads(fill: Callable[[torch.Tensor], object], dtype: torch.dtype) -> None:
    one, two, four = (drawn(fill, threads, lambda: torch.zeros(N, dtype=dtype)) for threads in (1, 2, 4))
    assert torch.equal(one, two)
    assert torch.equal(one, four)


def test_normal_has_the_moments_and_no_repeated_piece() -> None:
    values = drawn(lambda x: x.normal_(0.5, 0.02), 2, lambda: torch.zeros(N))
    assert values.mean().item() == pytest.approx(0.5, abs=1e-4)
    assert values.std().item() == pytest.approx(0.02, rel=1e-2)
    first, second, _ = values.split(PIECE)
    correlation = torch.corrcoef(torch.stack((first, second)))[0, 1].item()
    assert abs(correlation) < 5 / PIECE**0.5


def test_two_fills_differ() -> None:
    values = drawn(lambda x: (x[0].normal_(), x[1].normal_()), 2, lambda: torch.zeros(2, N))
    assert not (values[0] == values[1]).any()


def test_a_fill_counts_as_one_edit() -> None:
    """`_version` is compared to find edits of a model's own code."""
    parameter = drawn(lambda x: x.normal_(), 2, lambda: nn.Parameter(torch.zeros(N)))
    plain = nn.Parameter(torch.zeros(N))
    with torch.no_grad():
        plain.normal_()
    assert parameter._version == plain._version


@pytest.mark.parametrize("kind", ["small", "strided", "generator"])
def test_other_fills_are_left_to_torch(kind: str) -> None:
    def fill(tensor: torch.Tensor) -> None:
        given = torch.Generator().manual_seed(3) if kind == "generator" else None
        (tensor.view(-1, 5).t() if kind == "strided" else tensor).normal_(generator=given)

    n = {"small": PIECE, "strided": 5 * PIECE, "generator": N}[kind]
    expected = torch.zeros(n)
    torch.manual_seed(5)
    fill(expected)
    assert torch.equal(drawn(fill, 2, lambda: torch.zeros(n)), expected)


def test_an_error_of_a_fill_is_raised() -> None:
    with pytest.raises(RuntimeError, match="std"):
        drawn(lambda x: x.normal_(0, -1), 2, lambda: torch.zeros(N))


class Wide(nn.Module):
    """Has a layer of more than one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1100, 1024)
        self.layers = nn.Sequential(nn.Linear(1024, 1040), nn.Linear(1040, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.table(x))
        return out


@pytest.mark.parametrize("place", ["nvme", "none"])
def test_a_model_on_meta_has_the_same_values_with_any_threads_and_placement(place: str, tmp_path: Path) -> None:
    found = []
    for threads, where in ((1, "cpu"), (2, place), (4, place)):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Wide()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with open_engine(model, engine_config(where, folder=tmp_path)) as engine:
                found.append(engine.state_dict())
        finally:
            torch.set_num_threads(before)
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(value, other[name]), name
