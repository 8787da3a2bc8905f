"""The heat map is drawn for any measured part of the sweep."""

import sys
from pathlib import Path

import pytest

from infinity.cli.console import picture_formats
from infinity.cli.drive.heatmap import plot_sweep
from infinity.cli.drive.search import Setting

MIB = 1 << 20


@pytest.mark.parametrize("engines", [["libaio"], ["libaio", "io_uring"]])
def test_draws_a_png_with_the_best_marked(tmp_path: Path, engines: list[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    figures = {
        Setting(threads, depth, block, engine): 1.0 + threads + depth / 16
        for engine in engines
        for threads in (1, 2)
        for depth in (4, 8, 16)
        for block in (MIB // 4, MIB, 4 * MIB)
        if threads * depth * block <= 32 * MIB
    }
    path = tmp_path / "new" / "sweep.png"
    plot_sweep(path, figures, best=Setting(1, 8, MIB, "libaio"), title="Mixed", subtitle="/mnt")
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] >= 1000 and pixels.shape[0] >= 400
    assert (pixels == (0xE4, 0x57, 0x2E)).all(-1).sum() > 300  # the frame of the best
    assert (pixels == (0x12, 0x3A, 0x86)).all(-1).sum() > 1000  # the fastest


def test_titles_are_text_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    only = Setting(1, 32, MIB, "io_uring")
    plot_sweep(tmp_path / "sweep.svg", {only: 1.0}, best=only, title="$x_{$", subtitle="$\\frac{$ 漢字")
    assert (tmp_path / "sweep.svg").stat().st_size > 5000


def test_the_formats_are_those_of_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert {"png", "svg", "pdf"} < set(picture_formats())
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert picture_formats() == []


def test_a_single_figure_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    only = Setting(1, 32, 123 * 4096, "io_uring")
    plot_sweep(tmp_path / "sweep.png", {only: 12.34}, best=only, title="Mixed")
    assert (tmp_path / "sweep.png").stat().st_size > 5000
