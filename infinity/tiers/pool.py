"""Pools of buffers of fixed sizes. A lease is a buffer borrowed from a pool and returned exactly once.

A buffer is a tensor that owns its storage, so the storage's use count shows other references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from infinity import concurrency
from infinity.errors import InfinityError, LifetimeError, UsageError
from infinity.tiers.memory import storage_users


class Lease:
    """A buffer borrowed from a pool: `tensor` is uint8 (nbytes,), with the requested size.

    The end of a `with` block releases it, also after an error, unless the block has called `detach`.
    """

    def __init__(self, pool: Pool, buffer: torch.Tensor, nbytes: int) -> None:
        self._pool = pool
        self._buffer: torch.Tensor | None = buffer
        self._substitute: torch.Tensor | None = None
        self._views: dict[object, torch.Tensor] = {}
        """Cache of views, since a lookup is faster: of all `nbytes` by dtype, of parts by place."""
        self._block_releases = False
        self.nbytes = nbytes

    def __enter__(self) -> Lease:
        self._held()
        self._block_releases = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._block_releases:
            self.release()

    def detach(self) -> Lease:
        """Return the lease to a new owner: the end of the `with` block does not release it.

        A new owner's own `with` block must start after the end of this one.
        """
        self._held()
        self._block_releases = False
        return self

    @property
    def tensor(self) -> torch.Tensor:
        return self._view(torch.uint8)

    def flat(self, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        """Return the first `numel` elements (default: all) of the buffer as a 1-D tensor of `dtype`."""
        if numel is None or numel * dtype.itemsize == self.nbytes:
            view = self._views.get(dtype)
            return self._view(dtype) if view is None else view
        return self._held()[: numel * dtype.itemsize].view(dtype)

    def part(self, dtype: torch.dtype, place: tuple[Sequence[int], Sequence[int], int]) -> torch.Tensor:
        """Return the view of `flat(dtype)` with (shape, strides, offset). All parts of a lease have one dtype."""
        view = self._views.get(place)
        if view is None:
            view = self._views[place] = self.flat(dtype).as_strided(*place)
        return view

    def _view(self, dtype: torch.dtype) -> torch.Tensor:
        view = self._views.get(dtype)
        if view is None:
            if torch.is_inference_mode_enabled():  # the context takes longer than the view
                with torch.inference_mode(False):
                    return self._view(dtype)
            held = self._held()
            # A slice takes twice as long as a view of the whole buffer. `view` of the same dtype may return the tensor.
            view = held if held.numel() == self.nbytes and dtype != torch.uint8 else held[: self.nbytes]
            if dtype != torch.uint8:
                view = view.view(dtype)
            self._views[dtype] = view
        return view

    @property
    def storage(self) -> int:
        """Identity of the buffer's storage, which all its views share."""
        return int(self._held().untyped_storage()._cdata)

    def is_referenced(self, beyond: int = 0) -> bool:
        """Return whether tensors refer to the buffer besides the pool's own and `beyond` others."""
        return self._pool.is_referenced(self._held(), beyond + len(self._views))

    @property
    def is_substituted(self) -> bool:
        return self._substitute is not None

    def substitute(self, buffer: torch.Tensor) -> None:
        """Use a quarantined buffer in place of the pool's buffer. The lease keeps both."""
        # Cached views are of the pool's buffer; the next lookup must see the substitute.
        self._held()
        self._views.clear()
        self._substitute = buffer

    def release(self) -> None:
        self._held()
        # Cleared before the buffer is given back, so that a second release raises instead of returning it twice.
        buffer, self._buffer, self._substitute = self._buffer, None, None
        assert buffer is not None
        # The pool counts references to the buffer: views of a lease that has ended must not be among them.
        self._views.clear()
        self._pool._give_back(buffer)

    def quarantine(self) -> torch.Tensor:
        """Release the lease and return the buffer in use, which has views elsewhere. The pool keeps its size."""
        held, buffer = self._held(), self._buffer
        self._buffer = self._substitute = None
        assert buffer is not None
        self._views.clear()
        # A substitute never belonged to the pool, so the pool's own buffer is intact and goes back as it is.
        if held is buffer:
            self._pool._replace(buffer)
        else:
            self._pool._give_back(buffer)
        return held

    def _held(self) -> torch.Tensor:
        if self._buffer is None:
            raise LifetimeError("internal error: a lease was used or released after its release")
        return self._buffer if self._substitute is None else self._substitute


class Pool:
    """Fixed buffers in a few size classes. Thread-safe.

    make: allocates a uint8 buffer of a given size. sizes: buffer bytes → count. poison: fills released buffers with
    NaN; None: they keep their bytes. fifo: reuse the buffer that has been free longest; default: the last released one.
    """

    def __init__(
        self,
        make: Callable[[int], torch.Tensor],
        sizes: Mapping[int, int],
        *,
        name: str,
        poison: Callable[[torch.Tensor], object] | None = None,
        fifo: bool = False,
    ) -> None:
        self.name = name
        self._make = make
        self._poison = poison
        self._fifo = fifo
        self._access = concurrency.lock()
        self._given_back = concurrency.condition(self._access)
        self._waiting = 0
        """Number of threads that wait for a buffer; if 0, `notify` is skipped."""
        self._free: dict[int, list[torch.Tensor]] = {n: [make(n) for _ in range(count)] for n, count in sizes.items()}
        self._counts = dict(sizes)
        self._extra = dict.fromkeys(sizes, 0)
        """Size → buffers made beyond the pool's own; as many of those that are released next are freed."""
        self._classes: dict[int, int] = {}
        """Cache of `size_class`: requested bytes → its result."""
        self._is_dismissed = False
        self._unused = 0
        if self._free:
            # Measured on a buffer that is free, since the pool's own references count, too.
            example = next(iter(self._free.values()))[0]
            self._unused = storage_users(example)

    @property
    def nbytes(self) -> int:
        return sum(size * (count + self._extra[size]) for size, count in self._counts.items())

    @property
    def leased(self) -> int:
        """Number of buffers that are leased."""
        with self._access:
            if self._is_dismissed:
                return 0
            return sum(self._counts.values()) + sum(self._extra.values()) - sum(map(len, self._free.values()))

    def dismiss(self) -> None:
        """Free the memory of all buffers until `recall`; a lease raises UsageError meanwhile. None may be leased."""
        with self._access:
            for buffers in self._free.values():
                buffers.clear()
            self._is_dismissed = True

    def recall(self) -> None:
        """Allocate the buffers again. Idempotent."""
        if self._is_dismissed:
            # Allocated outside the lock: it may take seconds, and a failure leaves the pool dismissed.
            buffers = {size: [self._make(size) for _ in range(count)] for size, count in self._counts.items()}
            with self._access:
                self._free.update(buffers)
                self._is_dismissed = False

    def size_class(self, nbytes: int) -> int:
        """Return the smallest buffer size that holds `nbytes`. Raises InfinityError if none does."""
        known = self._classes.get(nbytes)
        if known is None:
            known = min((size for size in self._counts if size >= nbytes), default=None)
            if known is None:
                raise InfinityError(f"internal error: pool {self.name} has no buffer of {nbytes} bytes")
            self._classes[nbytes] = known
        return known

    def count(self, nbytes: int) -> int:
        """Return the number of buffers, leased or free, in the size class of `nbytes`."""
        return self._counts[self.size_class(nbytes)]

    def has_free(self, nbytes: int) -> bool:
        """Return whether a buffer in the size class of `nbytes` is free. False while the pool is dismissed."""
        return bool(self._free[self.size_class(nbytes)])

    def try_lease(self, nbytes: int) -> Lease | None:
        size = self.size_class(nbytes)
        with self._access:
            return self._take(size, nbytes)

    def lease(self, nbytes: int, timeout: float | None = None) -> Lease:
        """Wait for a buffer of `nbytes` and lease it. Raises InfinityError after `timeout` seconds, if set."""
        size = self.size_class(nbytes)
        with self._access:
            lease = self._take(size, nbytes)
            if lease is None:
                self._wait(size, nbytes, timeout)
                lease = self._take(size, nbytes)
            assert lease is not None
            return lease

    def extra(self, nbytes: int) -> int:
        """Return the number of extra buffers in the size class of `nbytes`."""
        return self._extra[self.size_class(nbytes)]

    @property
    def extra_nbytes(self) -> int:
        """Bytes of all extra buffers."""
        return sum(size * count for size, count in self._extra.items())

    def lease_extra(self, nbytes: int, most: int) -> Lease | None:
        """Lease a buffer that is made now, an extra one. The next release of a buffer of its size frees one.

        Returns None if `most` extra buffers of this size exist. Raises OutOfMemoryError.
        """
        size = self.size_class(nbytes)
        with self._access:
            # `_take` raises the error of a dismissed pool.
            if self._is_dismissed or self._extra[size] >= most:
                return self._take(size, nbytes)
            # Counted before the allocation, outside of which other threads may ask for the same extra buffer.
            self._extra[size] += 1
        try:
            return Lease(self, self._make(size), nbytes)
        except BaseException:
            with self._access:
                self._extra[size] -= 1
            raise

    def _wait(self, size: int, nbytes: int, timeout: float | None) -> None:
        self._waiting += 1
        try:
            free = self._given_back.wait_for(lambda: bool(self._free[size]), timeout)
        finally:
            self._waiting -= 1
        if not free:
            raise InfinityError(f"pool {self.name}: no buffer of {nbytes} bytes was released within {timeout} s")

    def _take(self, size: int, nbytes: int) -> Lease | None:
        free = self._free[size]
        if not free:
            if self._is_dismissed:
                raise UsageError(
                    "parameters were used after engine.offload_states(): call engine.reload_states() before the model, "
                    "its parameters or their states are used again"
                )
            return None
        return Lease(self, free.pop(0 if self._fifo else -1), nbytes)

    def is_referenced(self, buffer: torch.Tensor, beyond: int = 0) -> bool:
        return storage_users(buffer) > self._unused + beyond

    def _give_back(self, buffer: torch.Tensor) -> None:
        # Before the buffer is free: its next owner may write to it at once.
        if self._poison is not None:
            self._poison(buffer)
        size = buffer.numel()
        with self._access:
            if self._freed(size):
                return
            self._free[size].append(buffer)
            if self._waiting:
                self._given_back.notify_all()

    def _replace(self, buffer: torch.Tensor) -> None:
        with self._access:
            if self._freed(buffer.numel()):
                return
        self._give_back(self._make(buffer.numel()))

    def _freed(self, size: int) -> bool:
        """Count one extra buffer less, if there is one. Under the lock."""
        exceeds = self._extra[size] > 0
        self._extra[size] -= exceeds
        return exceeds
