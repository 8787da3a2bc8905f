"""The three batch sizes of a job, and their derivation from two or one of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int, *, auto: Collection[str] = ()
) -> Batch:
    """Derive the sizes that are None. With only one of train and micro, accumulation is 1.

    auto: keys that are None because they were "auto", for the error's text.

    Raises ConfigError if train and micro are both None, or if no whole numbers satisfy the product.
    """
    if train is None and micro is None:
        raise ConfigError(_no_batch_size([key for key in _EITHER if key in auto]))
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


_EITHER = ("train_micro_batch_size_per_gpu", "train_batch_size")
"""Keys of which a configuration needs one."""


def _no_batch_size(auto: Sequence[str]) -> str:
    if auto:
        verb = "is" if len(auto) == 1 else "are"
        missing = f'{" and ".join(auto)} {verb} "auto", which only a trainer such as Hugging Face\'s fills in'
    else:
        missing = f"the configuration has neither {_EITHER[0]} nor {_EITHER[1]}"
    return (
        f'no batch size: {missing}. Set "{_EITHER[0]}" to the samples of one forward pass of one rank, or '
        f'"{_EITHER[1]}" to the samples of one optimizer step over all ranks'
    )
