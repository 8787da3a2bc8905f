"""Training, saving, loading and inference take the memory of a few units, however many the model has.

With everything on nvme, four times the layers (8 to 32: 28 and 113 MB of parameters in bf16, as much of gradients, of
remainders and of moments) change the peak by less than a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memory import running
from support.memory import peak_rss

pytestmark = pytest.mark.campaign

FEW, MANY = 8, 32


def growth(work: Callable[..., None], **options: Any) -> float:
    few, many = (peak_rss(work, layers=layers, **options) for layers in (FEW, MANY))
    print(f"{work.__name__}: peak RSS with {FEW} and {MANY} layers: {few / 1e6:.0f} and {many / 1e6:.0f} MB")
    return many / few - 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=pytest.mark.slow)], ids=["clipping", "as it comes"])
def test_training_takes_no_more_memory_for_more_layers(clip: float, tmp_path: Path) -> None:
    """With clipping, gradients wait for their update."""
    assert growth(running.train, folder=str(tmp_path), clip=clip) < 0.1


@pytest.mark.timeout(300)
def test_checkpoints_and_inference_take_no_more_memory_for_more_layers(tmp_path: Path) -> None:
    for work in (running.save_and_load, running.infer):
        assert growth(work, folder=str(tmp_path)) < 0.1, work.__name__


@pytest.mark.timeout(300)
def test_a_stream_of_weights_takes_a_unit_beside_the_buffers(tmp_path: Path) -> None:
    """The caller drops each tensor. A stream took 0.7 to 0.8 of a block of 14 MB; half a block more is allowed, since
    peaks of the same process differ by 5 MB. All weights together would be 32 blocks.
    """
    options = {"layers": MANY, "folder": str(tmp_path), "width": 768}
    peak, trained = (peak_rss(running.stream, **options, streams=streams) for streams in (True, False))
    print(f"peak RSS with and without a stream: {peak / 1e6:.1f} and {trained / 1e6:.1f} MB")
    assert peak <= trained + 1.5 * running.largest_block(MANY, width=768)
    assert growth(running.stream, folder=str(tmp_path)) < 0.1


@pytest.mark.timeout(300)
def test_the_budget_of_a_second_engine_is_a_share_of_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    peak_rss(running.two_engines, layers=8)


@pytest.mark.timeout(300)
def test_a_tiled_layer_takes_no_more_memory_for_more_tiles(tmp_path: Path) -> None:
    """Training, saving and loading hold tiles of 8 MiB, of 8 and of 32."""
    for outputs in (32_768, 131_072):
        (tmp_path / str(outputs)).mkdir()
    few, many = (
        peak_rss(running.train_tiled, outputs=outputs, folder=str(tmp_path / str(outputs)))
        for outputs in (32_768, 131_072)
    )
    print(f"peak RSS with 8 and 32 tiles: {few / 1e6:.0f} and {many / 1e6:.0f} MB")
    assert many / few - 1 < 0.1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", ["nvme", pytest.param("cpu", marks=pytest.mark.slow)])
def test_the_peak_is_what_the_plan_says(device: str, tmp_path: Path) -> None:
    """Python, torch and activations, which a plain loop has too, come beside the plan, and 32 MB. An engine with
    parameters in host memory returns them to the model when it is closed.
    """
    states = running.states_of_plain(FEW)
    around = peak_rss(running.plain, layers=FEW) - states
    plan = running.planned(FEW, str(tmp_path), device=device)
    returned = states // 2 if device == "cpu" else 0
    peak = peak_rss(running.train, layers=FEW, folder=str(tmp_path), device=device)
    said = f"plan {plan / 1e6:.0f} MB, around it {around / 1e6:.0f} MB, returned {returned / 1e6:.0f} MB"
    print(f"peak RSS {peak / 1e6:.0f} MB: {said}")
    assert peak <= around + plan + returned + 32e6, said


@pytest.mark.slow
@pytest.mark.parametrize("kept", [{"device": "cpu"}, {"stage": 2, "device": "none"}], ids=str)
def test_what_stays_in_memory_shows(kept: dict[str, Any], tmp_path: Path) -> None:
    """Memory grows if states stay in memory, so the tests above can fail."""
    assert growth(running.train, folder=str(tmp_path), **kept) > 0.3


@pytest.mark.slow
def test_parameters_that_stay_in_memory_show(tmp_path: Path) -> None:
    assert growth(running.infer, folder=str(tmp_path), device="cpu", saved=False) > 0.15


@pytest.mark.timeout(500)
def test_saved_activations_on_nvme_take_no_more_memory_for_more_layers(tmp_path: Path) -> None:
    """Four times the layers save 590 MB more, which show with activations in memory."""
    few, many = (peak_rss(running.save_activations, layers=layers, folder=str(tmp_path)) for layers in (12, 48))
    plain = peak_rss(running.save_activations, layers=48, folder=str(tmp_path), device="none")
    print(f"peak RSS: 12 layers {few / 1e6:.0f}, 48 layers {many / 1e6:.0f}, in memory {plain / 1e6:.0f} MB")
    assert many / few < 1.1
    assert plain - many > 400e6


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_saved_activations_of_a_larger_batch_add_only_what_is_computed_on(tmp_path: Path) -> None:
    """A batch of 16 instead of 4 saves 580 MB more over 12 layers. The largest tensors of a block, and gradients of
    them, are in memory at once; they grow with the batch.
    """
    small, large = (
        peak_rss(running.save_activations, layers=12, batch=batch, folder=str(tmp_path)) for batch in (4, 16)
    )
    print(f"peak RSS: batch 4 {small / 1e6:.0f}, batch 16 {large / 1e6:.0f} MB")
    assert large - small < 250e6
