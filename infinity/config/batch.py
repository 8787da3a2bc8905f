"""The three batch sizes of a job, and their derivation from two or one of them."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """Sizes in samples: train = micro × accumulation × ranks."""

    train: int
    """Samples of one optimizer step, over all ranks."""
    micro: int
    """Samples of one forward pass of one rank."""
    accumulation: int
    """Forward passes of one optimizer step."""


def resolve_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> Batch:
    """Derive the sizes that are None. With only one of train and micro, accumulation is 1.

    Raises ConfigError if train and micro are both None, or if no whole numbers satisfy the product.
    """
    if train is None and micro is None:
        raise ConfigError(
            "no batch size: set train_micro_batch_size_per_gpu (samples of one forward pass of one rank) "
            'or train_batch_size (samples of one step, over all ranks). If they are "auto", pass '
            "Config.load(…, fill=Fill(train_micro_batch_size_per_gpu=…))"
        )
    if accumulation is None:
        accumulation = 1 if train is None or micro is None else max(1, train // (micro * world_size))
    if micro is None:
        assert train is not None
        micro = max(1, train // (accumulation * world_size))
    product = micro * accumulation * world_size
    if train is None:
        train = product
    if train != product:
        raise ConfigError(
            "the batch sizes do not multiply: train_batch_size must be train_micro_batch_size_per_gpu × "
            f"gradient_accumulation_steps × ranks, but {micro} × {accumulation} × {world_size} = {product}, and "
            f"train_batch_size is {train}; change one of them, or omit one to derive it"
        )
    return Batch(train, micro, accumulation)
