"""Errors where DeepSpeed has an `assert` or raises a ValueError, for scripts that catch these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.errors import ConfigError, ModelError, RanksError, UsageError


class FailedConfigCheck(ConfigError, AssertionError):
    """A ConfigError, and an AssertionError as in DeepSpeed."""


class FailedModelCheck(ModelError, AssertionError):
    """A ModelError, and an AssertionError as in DeepSpeed."""


class FailedRanksCheck(RanksError, AssertionError):
    """A RanksError, and an AssertionError as in DeepSpeed."""


class FailedUsageCheck(UsageError, AssertionError):
    """A UsageError, and an AssertionError as in DeepSpeed."""


class WrongValue(UsageError, ValueError):
    """A UsageError, and a ValueError as in DeepSpeed."""


@contextmanager
def usage_checks() -> Iterator[None]:
    """Raise a UsageError of the block as FailedUsageCheck."""
    try:
        yield
    except UsageError as error:
        raise FailedUsageCheck(str(error)) from error


@contextmanager
def config_checks() -> Iterator[None]:
    """Raise a ConfigError of the block as FailedConfigCheck."""
    problems: tuple[str, ...] = ()
    try:
        yield
    except ConfigError as error:
        problems = error.problems
    if problems:
        raise FailedConfigCheck(problems)
