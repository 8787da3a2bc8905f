"""Transfers: asynchronous copies between tiers. Each carries its own error; any thread may wait for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from infinity import concurrency


class Transfer(Protocol):
    """One asynchronous copy. `wait` returns when the bytes have arrived, or raises the error.

    A background thread may hand the rest of a transfer to a stream of the device: see `issued`.
    """

    def wait(self) -> None: ...

    def done(self) -> bool: ...


class Done:
    """A transfer that is complete from the start."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


DONE = Done()


class Fingerprinted(Done):
    """A copy within host memory, which took the fingerprint of its bytes (`Device.fingerprint`)."""

    def __init__(self, fingerprint: int) -> None:
        self.fingerprint = fingerprint


class Failed:
    """A transfer that failed to start; `wait` raises its error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def done(self) -> bool:
        return True


class Together:
    """Several transfers as one. `wait` waits for all of them, and raises the first error."""

    def __init__(self, *transfers: Transfer) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        failed: BaseException | None = None
        # All of them, also after an error: the kernel may use their buffers until each has ended.
        for transfer in self._transfers:
            try:
                transfer.wait()
            except Exception as error:  # noqa: BLE001 - raised below, after the other waits
                failed = failed or error
        if failed is not None:
            raise failed

    def done(self) -> bool:
        return all(transfer.done() for transfer in self._transfers)


def also(before: Transfer, more: Transfer) -> Transfer:
    """Return a transfer that completes with both, and raises an error of either. Omits `before` if it has succeeded."""
    if before.done():
        try:
            before.wait()
        except Exception:  # noqa: BLE001 - raised by every wait for the result
            return Together(before, more)
        return more
    return Together(before, more)


class Promised:
    """A transfer that a background thread executes. Its work returns the transfer that continues it on a stream, or
    None.
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self.issued().wait()

    def done(self) -> bool:
        return self._future.done() and (self._future.exception() is not None or self.issued().done())

    def issued(self) -> Transfer:
        rest: Transfer | None = self._future.result()
        return DONE if rest is None else rest


class Promise:
    """A transfer that its owner completes once, by `keep` or `fail`. Ten times cheaper than a Future."""

    __slots__ = ("_done", "_error", "_lock", "_rest")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._rest: Transfer = DONE
        self._done = False
        self._lock = concurrency.lock()  # released when kept
        self._lock.acquire()

    def wait(self) -> None:
        self.issued().wait()

    def done(self) -> bool:
        return (self._done or not self._lock.locked()) and self._rest.done()

    def issued(self) -> Transfer:
        if not self._done:
            with self._lock:
                pass
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # breaks the cycle error -> frame -> self, which would keep objects of other frames alive
        return self._rest

    def keep(self, rest: Transfer = DONE) -> None:
        """Complete the transfer; `rest` continues it on a stream of the device."""
        # In this order: `issued` reads `_rest` without the lock once `_done` is set.
        self._rest = rest
        self._done = True
        self._lock.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.keep()


_PROMISES = (Promise, Promised)


def issued(transfer: Transfer) -> Transfer:
    """Wait until background threads have done their part of `transfer`. Returns the part that streams execute."""
    while isinstance(transfer, _PROMISES):
        transfer = transfer.issued()
    return transfer


def run_on(executor: Executor, work: Callable[..., Any], *arguments: Any) -> Promised:
    """Run `work(*arguments)` on the executor's threads. References to the arguments end before the transfer is done.

    An executor keeps them slightly longer, so that a returned buffer would seem to be in use.
    """
    kept = list(arguments)

    def run() -> Any:
        handed = tuple(kept)
        kept.clear()
        return work(*handed)

    return Promised(executor.submit(run))
