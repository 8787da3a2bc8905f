"""Lightning's Trainer with the engine trains as with its own strategy, which has the whole model in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch", reason="make test-integrations installs it")

from infinity.errors import ConfigError, UsageError  # noqa: E402
from infinity.integrations.lightning import InfinityStrategy  # noqa: E402
from integrations.lightning_module import Regression, config, loader, module, trainer  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Lightning leaves the address of its process group in the environment, where child processes would find it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, {}),
        ({"accumulate_grad_batches": 5}, {"scheduler": True}),
        ({"gradient_clip_val": 0.5}, {}),
        ({}, {"manual": True}),
    ],
    ids=["plain", "accumulation and a scheduler", "clipping", "manual"],
)
def test_trains_as_with_its_own_strategy(
    options: dict[str, Any], kind: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses and parameters; 12 micro-batches an epoch are two steps of 5 and one of 2, whose losses it divides."""
    plain = module(**kind)
    trainer(tmp_path, **options).fit(plain, loader(), loader())
    ours = module(**kind)
    trainer(tmp_path, InfinityStrategy(config(tmp_path)), **options).fit(ours, loader(), loader())
    assert not [text for text in caplog.messages if "sums the gradients" in text]
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.held_out == pytest.approx(plain.held_out, rel=1e-5)
    assert ours.losses[-1] < ours.losses[0] / 2
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_resumes_and_tests_the_best(tmp_path: Path) -> None:
    """Training resumed from a checkpoint gives the losses of a run that was never interrupted."""
    whole = module()
    trainer(tmp_path, InfinityStrategy(config(tmp_path)), max_epochs=4).fit(whole, loader())
    first = module()
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "saved", monitor="held_out", filename="best")
    runner = trainer(tmp_path, InfinityStrategy(config(tmp_path)), callbacks=[saving], enable_checkpointing=True)
    runner.fit(first, loader(), loader())
    tested = runner.test(first, loader(), ckpt_path="best", verbose=False)[0]["tested"]
    assert tested == pytest.approx(float(saving.best_model_score), rel=1e-5)
    second = module()
    trainer(tmp_path, InfinityStrategy(config(tmp_path)), max_epochs=4).fit(
        second, loader(), ckpt_path=saving.best_model_path
    )
    assert first.losses + second.losses == whole.losses
    assert not [path for path in tmp_path.iterdir() if path.name != "saved"]


def test_bf16(tmp_path: Path) -> None:
    ours = module()
    trainer(tmp_path, InfinityStrategy(config(tmp_path, bf16={"enabled": True}))).fit(ours, loader(), loader())
    plain = module()
    trainer(tmp_path).fit(plain, loader(), loader())
    assert ours.losses == pytest.approx(plain.losses, rel=0.1, abs=0.02)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "bf16-mixed"}, 'precision "bf16-mixed", and the engine'),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, 'gradient_clip_algorithm="value"'),
    ],
)
def test_refusals(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, InfinityStrategy(config(tmp_path)), **options).fit(module(), loader())


class Clipping(Regression):
    """Clips by itself. manual: in training_step. every: to that norm, in steps whose number is a multiple."""

    def __init__(self, norm: float | None, every: int = 1, manual: bool = False) -> None:
        super().__init__(manual=manual)
        self.norm, self.every = norm, every

    def manual_backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        super().manual_backward(loss, *args, **options)
        self.clip_gradients(self.optimizers(), self.norm, "norm")

    def configure_gradient_clipping(self, optimizer: Any, **given: Any) -> None:
        if self.global_step % self.every == 0:
            self.clip_gradients(optimizer, self.norm or given["gradient_clip_val"], "norm")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ({"norm": 0.05, "manual": True}, {}, r"clip_gradients\(0.05.* does not clip"),
        ({"norm": 0.05}, {}, r"clip_gradients\(0.05.* does not clip"),
        ({"norm": None, "every": 2}, {"gradient_clip_val": 1.0}, "did not call clip_gradients"),
    ],
    ids=["manual", "overridden", "in some steps"],
)
def test_clipping_that_differs_from_the_engines_is_refused(
    kind: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        trainer(tmp_path, InfinityStrategy(config(tmp_path)), **options).fit(Clipping(**kind), loader())


def test_manual_clipping_to_the_engines_norm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Clipping(0.05, manual=True)
    trainer(tmp_path).fit(plain, loader())
    torch.manual_seed(0)
    ours = Clipping(0.05, manual=True)
    trainer(tmp_path, InfinityStrategy(config(tmp_path, gradient_clipping=0.05))).fit(ours, loader())
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)


class InPart(Regression):
    """Trains the blocks, and not the head."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.5)


def test_clipping_covers_the_optimizers_parameters(tmp_path: Path) -> None:
    losses = []
    for strategy in ("auto", InfinityStrategy(config(tmp_path))):
        torch.manual_seed(0)
        model = InPart()
        trainer(tmp_path, strategy, gradient_clip_val=0.1).fit(model, loader())
        losses.append(model.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_validation_before_training(tmp_path: Path) -> None:
    """A Trainer that only runs the module leaves its parameters as trainable as they were."""
    losses = []
    for ours in (False, True):
        model = module()
        model.blocks[0].requires_grad_(False)
        trainable = [p.requires_grad for p in model.parameters()]
        for run in ("validate", "fit"):
            runner = trainer(tmp_path, InfinityStrategy(config(tmp_path)) if ours else "auto")
            getattr(runner, run)(model, loader())
            assert [p.requires_grad for p in model.parameters()] == trainable
        losses.append(model.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_two_ranks(tmp_path: Path) -> None:
    """Two ranks have the losses of Lightning's DDP, each on its part of the data."""
    for strategy in ("ddp", "ours"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = Path(__file__).with_name("lightning_module.py")
        subprocess.run([*torchrun, str(script), strategy, str(tmp_path)], check=True, timeout=120)
    for rank in range(2):
        ours, theirs = (torch.load(tmp_path / f"{strategy}{rank}.pt") for strategy in ("ours", "ddp"))
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_deepspeeds_keys_are_translated_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes that are "auto" come from the Trainer, and keys without effect are logged as at every start."""
    written = config(tmp_path, gradient_accumulation_steps="auto", train_batch_size="auto", memory_breakdown=True)
    runner = trainer(tmp_path, InfinityStrategy(written), accumulate_grad_batches=2)
    with caplog.at_level("INFO", "infinity"):
        runner.fit(module(), loader())
    assert any("memory_breakdown" in record.message for record in caplog.records)
