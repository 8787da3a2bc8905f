"""Errors survive the way between processes, and say how much is missing."""

from __future__ import annotations

import pickle

import pytest

from infinity import errors


@pytest.mark.parametrize("kind", [errors.OutOfSpaceError, errors.OutOfMemoryError])
def test_too_little_says_how_much_is_missing(kind: type[errors.NotEnoughError]) -> None:
    error = kind("/local_nvme", 3_000_000, 1_000_000, "free some")
    for part in ("/local_nvme", "3,000,000", "1,000,000", "2,000,000 are missing", "free some"):
        assert part in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and again.needed == 3_000_000


@pytest.mark.parametrize(("kind", "what"), [(errors.OutOfSpaceError, "space in "), (errors.OutOfMemoryError, "")])
def test_what_the_system_refuses_is_not_missing(kind: type[errors.NotEnoughError], what: str) -> None:
    """Although it seems available, as under vm.overcommit_memory 2."""
    error = kind("/local_nvme", 1_000_000, 3_000_000, "look")
    text = f"the system refused 1,000,000 bytes of {what}/local_nvme, of which 3,000,000 are available; look"
    assert str(error) == text


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.OutOfMemoryError, MemoryError)
    assert issubclass(errors.ConfigError, ValueError) and issubclass(errors.ModelError, ValueError)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert len(kinds) > 8 and all(issubclass(kind, errors.InfinityError) and kind.__doc__ for kind in kinds)
