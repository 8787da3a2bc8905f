"""A function that runs in a thread of its own, but only while its caller waits for it.

A module's forward is an ordinary function, which Python cannot suspend: generators suspend their own frame only, not
those that they call. A thread keeps its stack while it waits, so a forward can pause inside of any calls.
"""

from __future__ import annotations

import contextvars
import threading
from abc import ABC, abstractmethod

from infinity import concurrency
from infinity.interrupts import uninterrupted


class Cancelled(BaseException):
    """Ends a coroutine at its pause. Not an Exception, which the model's code may catch."""


class Coroutine(ABC):
    """Runs `body`, of a subclass, in turns with the caller. It inherits the caller's context variables and primitives
    (`infinity.concurrency`), but nothing else that is thread-local.
    """

    def __init__(self) -> None:
        self._primitives = concurrency.present()
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._is_started = self._is_ended = False
        self._before, self._context = contextvars.copy_context(), contextvars.copy_context()
        # The model's code runs in it, so its name is none of the engine's own threads (`infinity.observe.recorder`).
        self._thread = threading.Thread(target=self._context.run, args=(self._run,), name="micro-batch", daemon=True)

    @abstractmethod
    def body(self) -> None:
        """Called once, in a thread of its own."""

    @property
    def has_set_context(self) -> bool:
        """Return whether the body has set context variables, which its caller does not see."""
        values = self._before
        return len(values) != len(self._context) or any(values.get(v) is not x for v, x in self._context.items())

    @property
    def has_ended(self) -> bool:
        """Return whether the body has ended. Then it cannot be resumed."""
        return self._is_ended

    @uninterrupted()  # Ctrl-C is for the caller, and the body may be moving states
    def resume(self) -> None:
        """Run the body until its next `pause` or its end. Raises its exception."""
        if self._is_started:
            self._turn.release()
        else:
            self._thread.start()
            self._is_started = True  # after it: `cancel` waits for a thread that has started
        self._back.acquire()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def pause(self) -> None:
        """Return to the caller until the next `resume`. Call it in the body's thread."""
        self._back.release()
        self._turn.acquire()
        if self._is_cancelled:
            raise Cancelled

    @uninterrupted()
    def cancel(self) -> None:
        """Raise `Cancelled` in the body, and wait for its end. Errors that it raises meanwhile are dropped."""
        self._is_cancelled = True
        while self._is_started and not self._is_ended:
            self._turn.release()
            self._back.acquire()
        self._error = None

    def _run(self) -> None:
        try:
            with concurrency.using(self._primitives):
                self.body()
        except Cancelled:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._error = error
        finally:
            self._is_ended = True
            self._back.release()
