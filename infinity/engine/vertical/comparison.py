"""`infinity.debug`: the first step with `blocks` is run in both orders, and compared bit by bit before its update.

The loop's gradients are those of the ordinary accumulation, without an update. Then they are dropped, and buffers and
generators of random numbers are restored. The vertical step is the first of its cycle in the trace, so that its
backward updates nothing either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import nn

from infinity.comm.communicator import Communicator
from infinity.engine.parts import EngineParts
from infinity.errors import ModelError


@dataclass(frozen=True)
class Outcome:
    """Digests of what the forwards and backwards of a step have left, by name: losses, gradients, then buffers."""

    digests: Mapping[str, bytes]

    @classmethod
    def of(cls, model: nn.Module, parts: EngineParts, losses: Sequence[torch.Tensor]) -> Outcome:
        """Collective, since gradients are read whole."""
        found = {f"the loss of micro-batch {number}": _digest(loss) for number, loss in enumerate(losses)}
        assert parts.training is not None
        parts.training.runner.send_all()
        gradients = parts.training.gradients
        for unit in (parts.units[index] for index in sorted(gradients.units)):
            flat = gradients.read(unit)
            for slot in sorted(gradients.slots[unit.index]):
                place = unit.layout.slots[slot]
                found[f"the gradient of {place.name}"] = _digest(flat[place.offset : place.stop])
        return cls(found | {f"buffer {name}": _digest(buffer) for name, buffer in model.named_buffers()})

    def check(self, expected: Outcome, ranks: Communicator) -> None:
        """Raise ModelError on all ranks if this, of a vertical step, differs from that of a loop on one. Collective."""
        names = (*expected.digests, *self.digests)
        differs = next((n for n in names if self.digests.get(n) != expected.digests.get(n)), "")
        for rank, name in enumerate(ranks.gather(differs)):
            if name:
                where = "" if ranks.is_single else f" on rank {rank}"
                raise ModelError(
                    f"engine.train_batch(blocks=...): {name} differs from that of a loop over the micro-batches{where} "
                    "(infinity.debug compares the first step). Nothing was updated. The forward changes something that "
                    "another micro-batch reads: remove that, or leave blocks out."
                )


class Buffers:
    """The present buffers of a model, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [(module, name, buffer, buffer.clone()) for module, name, buffer in _buffers(model.modules())]

    def restore(self) -> None:
        for module, name, buffer, values in self._saved:
            with torch.no_grad():
                module._buffers[name] = buffer.copy_(values)


def _buffers(modules: Iterable[nn.Module]) -> Iterable[tuple[nn.Module, str, torch.Tensor]]:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def _digest(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + bytes(values.view(torch.uint8).numpy())).digest()
