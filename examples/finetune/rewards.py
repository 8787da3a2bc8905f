"""Rewards for grpo.py and TRL's command line: functions that return one number per completion."""

from __future__ import annotations

from typing import Any


def lowercase(completions: list[str], **_: Any) -> list[float]:
    """The share of characters that are lower-case letters."""
    return [sum("a" <= char <= "z" for char in one) / max(1, len(one)) for one in completions]
