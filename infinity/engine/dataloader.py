"""The dataloader of `infinity.initialize`: this rank's micro-batches of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError

Collate = Callable[[list[Any]], Any]


def make_loader(
    data: Dataset[Any], engine: TrainingEngine, collate_fn: Collate | None = None, *, drop_last: bool = True
) -> DataLoader[Any]:
    """Return a loader of this rank's micro-batches. Ranks draw equally many batches from disjoint parts of the data.

    collate_fn: list of samples → batch, as of torch's DataLoader. drop_last: skip the samples that do not fill a
    micro-batch on every rank. Otherwise the last micro-batch is smaller, and some ranks repeat samples so that all have
    equally many. Raises ConfigError for data without a length, and for too few samples.
    """
    _check_data(data, engine, drop_last=drop_last)
    ranks = engine.ranks
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks.size, ranks.rank, drop_last=drop_last)
    return DataLoader(
        data,
        batch_size=engine.batch.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=engine.device.type == "cuda",
    )


def _check_data(data: Dataset[Any], engine: TrainingEngine, *, drop_last: bool) -> None:
    if not isinstance(data, Sized):
        raise ConfigError(
            f"training_data ({type(data).__name__}) has no length: pass a Dataset with __len__ and __getitem__, or "
            "construct a DataLoader of your own"
        )
    needed = engine.batch.micro * engine.ranks.size if drop_last else 1
    if len(data) < needed:
        raise ConfigError(
            f"training_data has {len(data)} samples, too few for one micro-batch on every rank ({engine.batch.micro} × "
            f"{engine.ranks.size} ranks): lower train_micro_batch_size_per_gpu, or pass more data"
        )
