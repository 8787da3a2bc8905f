"""Ranks take the smallest budget, and none waits for a rank that has another config or has failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multirank import budget_cases
from support.ranks import Group

FREE = (64 << 20, 16 << 20)


def budgets(pair: Group, folders: tuple[Path, Path], *memory: dict[str, Any]) -> list[Any]:
    return pair.run(budget_cases.budget_of, memory=memory, folders=[str(each) for each in folders], free=FREE)


def test_ranks_take_the_smallest_free_memory(pair: Group, tmp_path: Path) -> None:
    first, second = budgets(pair, (tmp_path, tmp_path), {"host": "auto"}, {"host": "auto"})
    assert first == second and first.host == FREE[1] // 2 // 2, "half of it, for two ranks of a node"
    assert first.nvme is None


def test_ranks_with_different_budgets_are_refused(pair: Group, tmp_path: Path) -> None:
    for first, second in (("auto", "1MiB"), ("1MiB", "auto"), ("1MiB", "2MiB")):
        found = budgets(pair, (tmp_path, tmp_path), {"host": first}, {"host": second})
        assert all("the ranks have different configs" in text and "infinity.memory.host" in text for text in found)


def test_a_rank_without_its_folder_fails_on_all_ranks(pair: Group, tmp_path: Path) -> None:
    found = budgets(pair, (tmp_path, tmp_path / "none"), {"nvme": "auto"}, {"nvme": "auto"})
    assert all("none does not exist" in text for text in found) and "rank 1 failed" in found[0]
