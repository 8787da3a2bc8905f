"""Attributes that may be used only with their object's lock held: a missing lock fails without a second thread."""

from __future__ import annotations

from typing import Any, TypeVar

Kind = TypeVar("Kind")


def locked(kind: type[Kind], *names: str, reads: bool = True) -> type[Kind]:
    """Return a subclass of `kind` that asserts in each use of an attribute in `names` that `_access` is held.

    The constructor may use them. reads: False if only assignments need the lock. For tests of one thread.
    """

    def check(own: object, name: str) -> None:
        state = object.__getattribute__(own, "__dict__")
        if name in names and "_constructed" in state:
            assert state["_access"].locked(), f"{kind.__name__}.{name} is used without the lock"

    class Locked(kind):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._constructed = True

        def __getattribute__(self, name: str) -> Any:
            if reads:
                check(self, name)
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            check(self, name)
            super().__setattr__(name, value)

    return Locked
