"""Folders and files that the demo's job leaves: the loss curve and the sample."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpt2.duration import show_seconds
from gpt2.plots import plot_loss
from gpt2.pretraining import Pretraining
from infinity.config import Config
from infinity.errors import StorageError
from infinity.sizes import show_count

Output = tuple[str, str]
"""A file's content, such as "loss curve", and its path."""


def refuse_unwritable(path: Path) -> None:
    """Raise StorageError before training if nothing can be written to `path`, which need not exist yet."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise StorageError(f"{path} cannot be a folder, since {existing} is a file. Name another one.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(f"{path} cannot be made, since {existing} is not writable. Name another folder.")


@contextmanager
def working_folder(path: Path) -> Iterator[None]:
    """Make `path`; in the end, remove the folders that were made, if they are empty."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"The folder {path} cannot be made: {error.strerror}. Name another one.") from error
    try:
        yield
    finally:
        for made in missing:
            try:
                made.rmdir()
            except OSError:
                break


def joined(texts: Sequence[str]) -> str:
    """Return the texts of a sample as one, an empty line between two."""
    return "\n\n".join(text.strip("\n") for text in texts) + "\n"


def write_outputs(training: Pretraining, folder: Path, texts: Sequence[str]) -> list[Output]:
    """Write the loss curve and, if there are texts, the sample."""
    folder.mkdir(parents=True, exist_ok=True)
    sample = [_write_sample(folder / "sample.txt", texts)] if texts else []
    curve = [_draw_curve(training, folder / "loss.png")] if training.losses else []
    return [*curve, *sample]


def _write_sample(path: Path, texts: Sequence[str]) -> Output:
    path.write_text(joined(texts), encoding="utf-8")
    return "sample", str(path)


def _draw_curve(training: Pretraining, path: Path) -> Output:
    config, totals = training.engine.config, training.meter.totals
    dtype = "bf16" if config.bf16.enabled else "fp32"
    try:
        plot_loss(
            path,
            training.losses,
            training.held_out_losses,
            title=f"GPT-2, {show_count(training.shape.num_parameters)} parameters, {_show_places(config)}",
            subtitle=f"{totals.steps:,} steps of {training.meter.tokens_per_step:,} bytes of {training.corpus.source}; "
            f"{dtype}, {show_seconds(totals.seconds)}",
            chance=math.log(training.shape.vocab_size),
        )
    except ImportError:
        return "loss curve", "not drawn: matplotlib is not installed"
    return "loss curve", str(path)


def _show_places(config: Config) -> str:
    zero = config.zero_optimization
    all_on_nvme = zero.offload_param.device == zero.offload_optimizer.device == "nvme"
    return "every state on NVMe" if all_on_nvme else "Infinity"
