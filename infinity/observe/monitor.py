"""Writers of training events: CSV files, TensorBoard and Weights & Biases, with the tags and files of DeepSpeed 0.19.8.

An event is (tag, value, samples so far). Each library is imported by its writer only.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from infinity.errors import ConfigError
from infinity.observe.log import logger

Event: TypeAlias = tuple[str, float, int]
"""Tag, value, and the number of samples that the training has seen."""


class Writer(Protocol):
    """Writes events to one place."""

    def write(self, events: Sequence[Event]) -> None: ...
    def close(self) -> None: ...


class CSVFiles:
    """One file for each tag: `Train/Samples/lr` is in `folder/Train_Samples_lr.csv`, with columns `step` and `lr`.

    Rows are appended. A file that has rows keeps its header.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.absolute()

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, samples in events:
            path = self._folder / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(["step", tag.rpartition("/")[2]])
                rows.writerow([samples, value])

    def close(self) -> None:
        """No-op: every write closes its file."""


class TensorBoardFiles:
    """One event file of TensorBoard in `folder`, flushed after every step."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandBRun:
    """A run of Weights & Biases: the script's, if it has begun one, else one that `close` finishes."""

    def __init__(self, project: str, group: str | None, team: str | None) -> None:
        import wandb

        self._owned = wandb.run is None
        self._run: Any = wandb.init(project=project, group=group, entity=team) if self._owned else wandb.run

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, samples in events:
            self._run.log({tag: value}, step=samples)

    def close(self) -> None:
        if self._owned:
            self._run.finish()


class Monitor:
    """The enabled writers of this process; none on ranks other than 0."""

    def __init__(self, writers: Mapping[str, Writer]) -> None:
        """writers: section of the config → writer."""
        self._writers = dict(writers)

    @property
    def enabled(self) -> bool:
        """True if events are written."""
        return bool(self._writers)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write (tag, value, samples) tuples to every writer. No-op without writers.

        A writer that fails is closed and named in a warning; training and the other writers continue.
        """
        for section, writer in list(self._writers.items()):
            try:
                writer.write(event_list)
            except Exception as error:  # noqa: BLE001 - each library raises classes of its own
                del self._writers[section]
                logger.warning(
                    "%s failed and writes nothing more; training continues: %s: %s",
                    section,
                    type(error).__name__,
                    error,
                )
                _close(section, writer)

    def close(self) -> None:
        """Flush and close all writers. Idempotent."""
        while self._writers:
            _close(*self._writers.popitem())


def _close(section: str, writer: Writer) -> None:
    try:
        writer.close()
    except Exception as error:  # noqa: BLE001 - each library raises classes of its own
        logger.warning("%s was not closed: %s: %s", section, type(error).__name__, error)


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Section of the config → the package that it needs."""


def open_monitor(makers: Mapping[str, Callable[[], Writer]]) -> Monitor:
    """Construct the writers of the enabled sections. makers: section of the config → function that constructs one.

    Raises ConfigError if a package is missing, or a writer cannot be constructed.
    """
    missing = [
        f"{section}.enabled is true, but the package {PACKAGES[section]} is not installed: run pip install "
        f"{PACKAGES[section]}, or set it to false"
        for section in makers
        if section in PACKAGES and find_spec(PACKAGES[section]) is None
    ]
    if missing:
        raise ConfigError(missing)
    monitor = Monitor({})
    for section, make in makers.items():
        try:
            monitor._writers[section] = make()
        except Exception as error:
            monitor.close()
            raise ConfigError(
                f"{section}.enabled is true, but it cannot write ({type(error).__name__}: {error}): fix the cause, or "
                f"set {section}.enabled to false"
            ) from error
    return monitor
