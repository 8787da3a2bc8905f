"""Codes of frozen parameters (`infinity.frozen`): the bytes in which a tier stores them. Pure.

A shard is stored as records, which end where its extent ends:

    [padding to 4096 bytes] [codes of 2048 elements | their 32 scales] [codes | scales] ...

An extent is at most as long as the shard, so it is read into the end of the unit's buffer and decoded from the
beginning on, in place [Note: frozen parameters in a code].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

FrozenFormat = Literal["8bit", "nf4"]

GROUP = 64
"""Elements that share a scale. Every parameter begins at a group."""
RECORD = 2048
"""Elements of a record. Every shard is a whole number of them."""
_BLOCK = 4096
"""Extents are whole numbers of blocks of this many bytes, as direct I/O requires."""
_CODE_BYTES = {"8bit": RECORD, "nf4": RECORD // 2}

CODED_DTYPES: Mapping[torch.dtype, Literal["fp32", "bf16", "fp16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""Dtypes of parameters that have a code, with the names that kernels use."""


@dataclass(frozen=True)
class FrozenCode:
    """Code of a frozen unit's parameters. dtype: that of the decoded values, and of the scales."""

    format: FrozenFormat
    dtype: torch.dtype

    @property
    def record_nbytes(self) -> int:
        return _CODE_BYTES[self.format] + RECORD // GROUP * self.dtype.itemsize

    def records_nbytes(self, numel: int) -> int:
        """Return the bytes of the records of `numel` elements, a multiple of `RECORD`."""
        return numel // RECORD * self.record_nbytes

    def nbytes(self, numel: int) -> int:
        """Return the bytes of an extent for `numel` elements, a multiple of `RECORD`."""
        return -(-self.records_nbytes(numel) // _BLOCK) * _BLOCK

    def numel(self, memory: torch.Tensor) -> int:
        """Return the number of elements whose values fill `memory`, uint8 (n,)."""
        return memory.numel() // self.dtype.itemsize

    def stored_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the end of a shard's buffer, where its extent is read: uint8 (nbytes,). memory: uint8."""
        return memory[memory.numel() - self.nbytes(self.numel(memory)) :]

    def records_of(self, stored: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the records in an extent's bytes, without the padding: uint8. stored: uint8 (nbytes,)."""
        return stored[stored.numel() - self.records_nbytes(numel) :]
