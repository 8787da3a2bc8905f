"""The loss curve is drawn, and its running mean neither lags nor cuts."""

import math
from pathlib import Path

import pytest

from gpt2.plots import plot_loss, running_mean


def test_running_mean() -> None:
    line = [10.0 - 0.1 * step for step in range(60)]
    means = running_mean(line)
    assert means[:53] == pytest.approx(line[:53])  # a mean around each step: a straight fall stays where it is
    assert means[-1] == pytest.approx(sum(line[-8:]) / 8)
    assert running_mean([3.0]) == [3.0] and running_mean([]) == []


def test_draws_a_png_with_both_curves(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    train = [(step, 2 + 3 * math.exp(-step / 20)) for step in range(1, 101)]
    held_out = [(step, 2.1 + 3 * math.exp(-step / 20)) for step in range(10, 101, 10)]
    path = tmp_path / "new" / "loss.png"
    plot_loss(path, train, held_out, title="GPT-2", chance=math.log(256))
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] >= 1200
    for color in ((0x2F, 0x6F, 0xDE), (0xE4, 0x57, 0x2E)):
        assert (pixels == color).all(-1).sum() > 500


@pytest.mark.parametrize("train", [[], [(1, 5.0)], [(1, 5.0), (2, float("nan"))]])
def test_runs_of_hardly_any_step_are_drawn_too(tmp_path: Path, train: list[tuple[int, float]]) -> None:
    pytest.importorskip("matplotlib")
    plot_loss(tmp_path / "loss.png", train, [], title="GPT-2")
    assert (tmp_path / "loss.png").stat().st_size > 1000
