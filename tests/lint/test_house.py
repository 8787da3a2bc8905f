"""lint/house.py: each count of a small tree, and the limits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("lint_house", ROOT / "lint" / "house.py")
assert spec is not None and spec.loader is not None
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)

ENGINE = """\
class Engine:
    def __init__(self, ask: Callable[[], int], *, tell: "Callable[[int], None]", unit: Unit) -> None:
        self.own, unit.first = 1, 2
        self.store.second += 3
        self.below: int = 4
        unit.third: int = 5
        *rest, unit.items[0], unit.fourth = unit
        del unit.fifth
        local = unit.read
        job.gate = job.after = local
        self.job.gate = local
        jobs.gate = local

    def run(self, call: Callable[[], None]) -> None: ...
"""
UPDATE = '''\
# A reason that stands
    # beside its line.
x = 1  # not alone
text = """
# not a comment
"""
y = 2
z = 3
a = 4
b = 5
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "infinity/engine/deep/engine.py": ENGINE,
        "infinity/update/job.py": UPDATE,
        "infinity/model/hooks.py": "# why\nunit.sixth = 1\n",
        "infinity/plan/long.py": "pass\n" * house.SHORT + "other.attribute = 1\n",
        "docs/design.md": "# Two words\n\nand three-and four\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_counts_of_a_small_tree(tree: Path) -> None:
    """Targets in tuples, annotations and deletions are assigned; elements of lists and names are not."""
    lines = [len(text.splitlines()) for text in (ENGINE, UPDATE)]
    assert house.count(tree) == {
        house.ASSIGNED: 10,  # first to sixth, two on job, one on self.job, one on jobs
        house.CALLABLES: 2,
        house.JOB_FIELDS: 2,  # gate and after
        house.LINES: sum(lines) + 2 + house.SHORT + 1,
        house.FILES: 4,
        house.SHORT_FILES: 3,
        house.WORDS: 6,
        house.COMMENTS: 250,
    }


def test_limits_fail_in_their_direction(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = house.count(tree)
    monkeypatch.setattr(house, "LIMITS", dict(counts))
    assert not house.main([str(tree)]) and "beyond" not in capsys.readouterr().out
    for name, value in counts.items():
        worse, better = (value + 1, value - 1) if name in house.LEAST else (value - 1, value + 1)
        monkeypatch.setattr(house, "LIMITS", {**counts, name: better})
        assert not house.main([str(tree)])
        monkeypatch.setattr(house, "LIMITS", {**counts, name: worse})
        assert house.main([str(tree)])
        assert f"{name}  beyond the limit, {worse:,}" in capsys.readouterr().out


def test_every_count_of_this_checkout_has_a_limit() -> None:
    assert house.count(ROOT).keys() == house.LIMITS.keys() >= house.LEAST
