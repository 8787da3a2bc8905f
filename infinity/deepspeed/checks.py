"""Errors where DeepSpeed has an `assert` that scripts catch."""

from infinity.errors import ConfigError, UsageError


class FailedConfigCheck(ConfigError, AssertionError):
    """A ConfigError, and an AssertionError as in DeepSpeed."""


class FailedUsageCheck(UsageError, AssertionError):
    """A UsageError, and an AssertionError as in DeepSpeed."""
