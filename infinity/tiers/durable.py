"""The nvme tier of a durable run: named files, in which parameters and optimizer states have two slots each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.native import _aio
from infinity.plan.placement import Extent
from infinity.tiers.device import Device
from infinity.tiers.digests import Digests, digest_of, digest_of_written
from infinity.tiers.files import SwapFile
from infinity.tiers.memory import host_tensor
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.slots import Slots
from infinity.tiers.transfer import Together, Transfer

_PIECE = 8 << 20
"""Bytes that are copied at once from one slot to the other."""


@dataclass(frozen=True)
class DurableFiles:
    """Folders of the files of durable states, and `Slots.seal` of the commit that they hold; None: they hold none."""

    folders: Sequence[Path]
    committed: bytes | None
    checksums: bytes
    """Checksums of the commit, for `aio.checksum`; empty if it has none."""


class DurableTier(NvmeTier):
    """Reads the present bytes of durable extents, and writes them where no committed bytes are.

    Extents without slots, such as gradients, are read and written in place. Every write to a slot is checksummed for
    the digests of the next commit; reads are compared with checksums only with `aio.checksum`.
    """

    def __init__(
        self,
        slots: Slots,
        file: SwapFile,
        nbytes: int,
        engine: _aio.Engine,
        device: Device,
        checksum_block: int = 0,
        ahead: Mapping[int, int] | None = None,
        checksums: bytes = b"",
        digest_block: int = 4096,
    ) -> None:
        """slots: of the durable extents. checksums: of the committed bytes. digest_block: bytes of a block that is
        always written whole, for the checksums of digests. Others: as of `NvmeTier`.
        """
        super().__init__(file, nbytes, engine, device, checksum_block, ahead)
        self.slots = slots
        self._block = checksum_block or digest_block
        self._slot_file = file.file
        """Handle of the file through which slots are written."""
        # A handle of its own has checksums for digests, while reads through the other one are not verified.
        if not checksum_block:
            self._slot_file = file.native()
            self._slot_file.keep_checksums(file.nbytes, self._block)
        elif checksums:
            file.file.restore_checksums(checksums)

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        if not self.slots.holds(extent.offset):
            return super()._read(extent, memory, offset)
        # An extent that was written in part has its present bytes in both slots.
        pieces = self.slots.to_read(extent.offset, offset, memory.numel())
        if len(pieces) == 1:
            return self._read_at(pieces[0].offset, memory, extent)
        parts = ((piece, memory[piece.start : piece.start + piece.nbytes]) for piece in pieces)
        return Together(*(self._read_at(piece.offset, part, extent) for piece, part in parts))

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        if not self.slots.holds(extent.offset):
            return super()._write(extent, memory, offset)
        place = self.slots.to_write(extent.offset, offset, memory.numel())
        return self._write_at(place, memory, extent, self._slot_file)

    def begin_draft(self, extent: Extent) -> bool:
        # The slot that is not committed is the spare one.
        return self.slots.holds(extent.offset) and self.slots.begin_draft(extent.offset)

    def end_draft(self, extent: Extent, *, keep: bool) -> None:
        self.slots.end_draft(extent.offset, keep=keep)
        if keep:
            self._forget_ahead(extent)

    def seal(self) -> bytes:
        """Complete extents that were written in part, and return `Slots.seal`. No write may be under way."""
        for piece, place in self.slots.missing():
            self._copy(piece.offset, place, piece.nbytes)
        self.slots.complete()  # now, since training reads meanwhile
        return self.slots.seal()

    def adopt(self, sealed: bytes, extents: Sequence[Extent]) -> None:
        """Make the bytes of a commit the present ones. extents: all durable ones."""
        # Everything that was read ahead has bytes of the slots before.
        self.drop_windows_ahead()
        for extent in extents:
            self._forget_ahead(extent)
        self.slots.commit(sealed)

    @property
    def checksums(self) -> bytes:
        """Checksums of all blocks, for the next process with `aio.checksum`. No request may be under way."""
        return self._file.file.checksums

    def digests(self, sealed: bytes, before: bytes, known: Digests | None) -> Digests:
        """Return the digests of the slots of `seal`. before, known: slots and digests of the last commit.

        A slot that is still the committed one was not written since. Slots without a known digest are read.
        """
        sums, block = self._slot_file.checksums, self._block
        is_known = known is not None and known.block == block and len(known) == len(before) == len(sealed)
        found: list[bytes] = []
        for number, (place, nbytes) in enumerate(self.slots.places(sealed)):
            if known is not None and is_known and before[number] == sealed[number]:
                found.append(known[number])
            else:
                digest = digest_of_written(sums, place, nbytes, block)
                found.append(digest or digest_of(self._content, place, nbytes, block))
        return Digests(block, b"".join(found))

    def _content(self, place: int, nbytes: int) -> torch.Tensor:
        buffer = host_tensor(nbytes)
        self._read_at(place, buffer, Extent(self.kind, place, nbytes, "durable states")).wait()
        return buffer

    def check_named(self) -> None:
        """Raise MisplacedError if the files were removed, renamed or replaced, so that no commit can be found."""
        self._file.check_named()

    def sync(self) -> None:
        """Wait until all that was written has reached the drives. Raises OSError."""
        self._file.sync()

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        buffer = host_tensor(min(nbytes, _PIECE))
        where = Extent(self.kind, source, nbytes, "durable states")
        for start in range(0, nbytes, _PIECE):
            part = buffer[: min(nbytes - start, _PIECE)]
            self._read_at(source + start, part, where).wait()
            # Through the handle with checksums, so that the digest of the commit covers the copied part.
            self._write_at(target + start, part, where, self._slot_file).wait()
