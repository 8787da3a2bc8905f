"""DeepSpeed's handle for asynchronous file I/O, over the engine's: `AsyncIOBuilder().load().aio_handle(...)`."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infinity.errors import StorageError, UsageError
from infinity.native import _aio
from infinity.tiers.files import alignment, whole
from infinity.tiers.io import UserFile, open_engine, register
from infinity.tiers.memory import before_unmapping, host_tensor

_SMALLEST_BLOCK = 4096
_SECTOR = 512

_log = logging.getLogger("infinity")

_locked: set[int] = set()
"""Addresses of the memory from `new_cpu_locked_tensor`, of all handles."""


class AioHandle:
    """Reads files into tensors and writes tensors to files, with DeepSpeed's methods and arguments.

    Any offset, size and alignment is supported. Tensors are contiguous and on the CPU or a CUDA device. A tensor in
    pinned memory is transferred in place, and must stay unchanged until `wait`. Others are copied: a write takes their
    values at the call, and a read sets them in `wait`. Operations whose bytes overlap, in a file or in memory, run in
    the order of their calls. Errors are raised, where DeepSpeed returns -1 or aborts: OSError by the system, with path,
    offset and size, StorageError for a file that is too short, UsageError for a tensor that cannot be used.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        """block_size: bytes of one request to the kernel; rounded up to a multiple of 4096. queue_depth: requests in
        flight per thread. intra_op_parallelism: threads. single_submit, overlap_events: without effect, since the
        engine always submits in batches and overlaps.
        """
        if block_size <= 0:
            raise UsageError(f"block_size is {block_size}: pass a positive number of bytes")
        self._settings = block_size, queue_depth, bool(single_submit), bool(overlap_events), intra_op_parallelism
        self._pending: list[_Operation] = []
        self._lock = threading.RLock()
        block = min(whole(block_size, _SMALLEST_BLOCK), _aio.LARGEST_BLOCK)
        self._engine = open_engine(block_size=block, queue_depth=queue_depth, threads=intra_op_parallelism)

    def get_block_size(self) -> int:
        return self._settings[0]

    def get_queue_depth(self) -> int:
        return self._settings[1]

    def get_single_submit(self) -> bool:
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        return self._settings[4]

    def get_alignment(self) -> int:
        """Return the multiple of bytes that DeepSpeed needs in files and tensors; not needed here."""
        return self._settings[4] * _SECTOR

    def read(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Fill `buffer` from the file and return 0. validate: read the file again and compare."""
        return self._run(buffer, filename, file_offset, read=True, validate=validate)

    def write(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Write `buffer` to the file, which is created if needed, and return 0. validate: read it and compare."""
        return self._run(buffer, filename, file_offset, read=False, validate=validate)

    def pread(self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Start to fill `buffer`, and return 0; or, if not async_, the result of `wait`."""
        return self._add(buffer, filename, file_offset, read=True, validate=validate, wait=not async_)

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Start to write `buffer`, and return 0; or, if not async_, the result of `wait`."""
        return self._add(buffer, filename, file_offset, read=False, validate=validate, wait=not async_)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer`, and return the result of `wait`: 1, or more if operations were pending."""
        return self._add(buffer, filename, file_offset, read=True, wait=True)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write `buffer`, and return the result of `wait`: 1, or more if operations were pending."""
        return self._add(buffer, filename, file_offset, read=False, wait=True)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Start to fill `buffer`, which holds the bytes after `wait`. Returns 0."""
        return self._add(buffer, filename, file_offset, read=True)

    def async_pwrite(
        self, buffer: Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Start to write `buffer`. Returns 0.

        filename: a path, or the descriptor of a file that is open for writing; so is fd. The caller closes it, after
        `wait`. Raises UsageError for a descriptor with O_APPEND.
        """
        where = fd if filename is None else filename
        if where is None or (filename is not None and fd is not None):
            raise UsageError("async_pwrite needs one of filename and fd: pass one")
        return self._add(buffer, where, file_offset, read=False)

    def wait(self) -> int:
        """Complete all pending operations, and return their number; 0 if there are none.

        Raises the first error of an operation, after all have ended. None of them is pending then.
        """
        with self._lock:
            for operation in self._pending:  # pending until all have ended, if Ctrl-C ends the wait
                operation.settle()
            ended, self._pending = self._pending, []
        errors = [operation.error for operation in ended if operation.error is not None]
        for error in errors[1:]:
            _log.error("aio_handle: %s", error)
        if errors:
            raise errors[0]
        return len(ended)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return zeros (num_elem,) of the example's dtype, aligned to pages and pinned, if there is a CUDA device.

        The memory is released with the last tensor that uses it.
        """
        if num_elem == 0:
            return torch.empty(0, dtype=example_tensor.dtype)
        memory = host_tensor(num_elem * example_tensor.element_size(), pin=torch.cuda.is_available())
        address = memory.data_ptr()
        _locked.add(address)
        before_unmapping(memory, partial(_locked.discard, address))
        register(self._engine, memory)
        return memory.view(example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Return False if the tensor is not from `new_cpu_locked_tensor`. Its memory lives as long as the tensor."""
        address = tensor.data_ptr()
        found = address in _locked
        _locked.discard(address)
        return found

    def is_pinned(self, buffer: Tensor) -> bool:
        """Return True if `buffer` is transferred in place, without a copy."""
        return not buffer.is_cuda and (buffer.untyped_storage().data_ptr() in _locked or buffer.is_pinned())

    def _run(self, buffer: Tensor, filename: str, offset: int, *, read: bool, validate: bool) -> int:
        with self._lock:
            operation = self._start(buffer, filename, offset, read=read, validate=validate)
            self._pending.append(operation)  # keeps its memory if Ctrl-C ends the wait
            operation.settle()
            self._pending.remove(operation)
        if operation.error is not None:
            raise operation.error
        return 0

    def _add(
        self,
        buffer: Tensor,
        where: str | int,
        offset: int,
        *,
        read: bool,
        validate: bool = False,
        wait: bool = False,
    ) -> int:
        with self._lock:
            self._pending.append(self._start(buffer, where, offset, read=read, validate=validate))
            return self.wait() if wait else 0

    def _start(self, buffer: Tensor, where: str | int, offset: int, *, read: bool, validate: bool) -> _Operation:
        _check(buffer, offset)
        file = UserFile(where, write=not read)
        try:
            if read:
                file.check_range(offset, buffer.nbytes)
            operation = _Operation(buffer, file, offset, read=read, validate=validate, in_place=self.is_pinned(buffer))
            for earlier in self._pending:
                if operation.conflicts(earlier):
                    earlier.settle()
                    if earlier.error is not None:
                        raise earlier.error
            operation.start(self._engine)
            return operation
        except BaseException:
            file.close()
            raise

    def __del__(self) -> None:
        engine = self.__dict__.get("_engine")
        if engine is None:  # the constructor failed
            return
        engine.close()  # completes all requests, whose memory and files are in use until then
        for operation in self._pending:
            operation.file.close()
        if self._pending:
            _log.warning(
                "aio_handle was deleted with %d operations that nobody waited for: call wait()", len(self._pending)
            )


class _Operation:
    """One transfer between the bytes of `buffer` and those of `file` from `offset` on.

    error: raised by the transfer, known after `settle`.
    """

    def __init__(
        self, buffer: Tensor, file: UserFile, offset: int, *, read: bool, validate: bool, in_place: bool
    ) -> None:
        self.file = file
        self.error: Exception | None = None
        self._buffer = buffer
        self._bytes = buffer.detach().reshape(-1).view(torch.uint8)
        self._offset = offset
        self._read = read
        self._validate = validate
        self._in_place = in_place
        self._settled = False

    def start(self, engine: _aio.Engine) -> None:
        """Start the transfer. A buffer that is not pinned is copied to aligned memory, which direct I/O needs."""
        self._memory = self._bytes if self._in_place else host_tensor(self._bytes.numel(), pin=self._bytes.is_cuda)
        if not self._read and not self._in_place:
            self._memory.copy_(self._bytes)
        begin = engine.read if self._read else engine.write
        self._request = begin(self.file.file, self._offset, self._memory.data_ptr(), self._memory.numel())

    def conflicts(self, earlier: _Operation) -> bool:
        """Return True if this operation must not start before `earlier` has ended."""
        block = alignment()
        same_bytes = self.file.key == earlier.file.key and _overlap(
            (self._offset // block * block, whole(self._offset + self._bytes.numel(), block)),
            (earlier._offset // block * block, whole(earlier._offset + earlier._bytes.numel(), block)),
        )
        same_memory = self._bytes.device == earlier._bytes.device and _overlap(
            _addresses(self._bytes), _addresses(earlier._bytes)
        )
        return (same_bytes and not (self._read and earlier._read)) or (same_memory and (self._read or earlier._read))

    def settle(self) -> None:
        """End the transfer: bytes read are in the buffer, or `error` is set. Idempotent."""
        if self._settled:
            return
        try:
            self._request.wait()
            if self._validate:
                self._compare()
            if self._read:
                self._hand_over()
        except (OSError, StorageError) as error:
            self.error = error
        self._settled = True
        self.file.close()

    def _hand_over(self) -> None:
        if not self._in_place:
            with torch.inference_mode(self._buffer.is_inference()):
                self._bytes.copy_(self._memory)
        elif not self._buffer.is_inference():
            torch.autograd.graph.increment_version(self._buffer)  # written by address, unseen by autograd

    def _compare(self) -> None:
        """Read the bytes again, through the page cache. Raises StorageError if they differ."""
        again = host_tensor(self._memory.numel())
        with open(self.file.path, "rb") as file:
            file.seek(self._offset)
            target: Any = again.numpy().data
            file.readinto(target)
        if not torch.equal(again, self._memory):
            raise StorageError(
                f"{self.file.path} does not hold the {again.numel():,} bytes at offset {self._offset:,} that were "
                "transferred: the drive is failing, or another process writes to the file"
            )


def _check(buffer: Tensor, offset: int) -> None:
    """Raise UsageError unless the bytes of `buffer` are consecutive and can be copied to and from host memory."""
    if not isinstance(buffer, Tensor):
        raise UsageError(f"buffer is a {type(buffer).__name__}: pass a tensor")
    if buffer.device.type not in ("cpu", "cuda"):
        raise UsageError(f"buffer is on {buffer.device}: pass a tensor on the CPU or a CUDA device")
    if buffer.layout != torch.strided or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
        raise UsageError(
            f"buffer has shape {tuple(buffer.shape)}, and its elements are not consecutive in memory: pass "
            "buffer.contiguous() to write, and a contiguous tensor to read"
        )
    if offset < 0:
        raise UsageError(f"file_offset is {offset}: pass the number of bytes before the first one, from 0")


def _addresses(memory: Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.data_ptr() + memory.numel()


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return max(first[0], second[0]) < min(first[1], second[1])


aio_handle = AioHandle


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill `buffer` from the start of a file with a handle of its own; see `AioHandle.read`."""
    return AioHandle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write `buffer` to the start of a file with a handle of its own; see `AioHandle.write`."""
    return AioHandle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy `src` to `dest` and return 0. Raises UsageError unless both have the same shape and dtype."""
    if dest.shape != src.shape or dest.dtype != src.dtype:
        raise UsageError(
            f"dest has shape {tuple(dest.shape)} and {dest.dtype}, and src {tuple(src.shape)} and {src.dtype}: pass "
            "tensors of one shape and dtype"
        )
    with torch.no_grad():
        dest.copy_(src)
    return 0


__all__ = ["AioHandle", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]
