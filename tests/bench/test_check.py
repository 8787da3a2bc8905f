"""Limits of figures: how they are compared, and that each is about a figure that exists."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import check
from harness import write_json
from report import page

FIGURES = {"1e6: a": 1.0, "1e8: a": 2.0, "b": 0.5}
LIMITS = json.loads(check.LIMITS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("limit", "met"),
    [
        ({"figure": "b", "at_least": 0.5}, [True]),
        ({"figure": "b", "at_least": 0.6}, [False]),
        ({"figure": "b", "at_most": 0.4}, [False]),
        ({"figure": "*: a", "at_most": 1.5}, [True, False]),
        ({"figure": "unmeasured", "at_most": 1.5}, []),
        ({"any": [{"figure": "b", "at_most": 0.4}, {"figure": "1e6: a", "at_most": 1}]}, [True]),
        ({"any": [{"figure": "b", "at_most": 0.4}, {"figure": "1e8: a", "at_most": 1}]}, [False]),
        ({"any": [{"figure": "unmeasured", "at_most": 1}]}, []),
    ],
)
def test_a_figure_is_compared_with_its_limit(limit: check.Limit, met: list[bool]) -> None:
    assert [verdict.met for verdict in check.compare(limit, FIGURES)] == met


def test_each_figure_is_printed_beside_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [{"op": "read", "who": who, "gb_per_s": 1.0} for who in ("one", "the other", "both")]
    write_json(tmp_path / "trial.json", {"bench": "stripe", "samples": samples})
    limit = {"figure": "read: both ÷ their sum", "at_least": 0.9}
    assert not check.check([tmp_path / "trial.json"], {"stripe": [limit]})
    assert capsys.readouterr().out == "MISSED  trial  read: both ÷ their sum: 0.50 (at least 0.9)\n"
    assert check.check([tmp_path / "trial.json"], {"stripe": [limit | {"at_least": 0.4}]})
    assert check.check([tmp_path / "trial.json"], {})


def flat(limits: list[check.Limit]) -> list[check.Limit]:
    return [one for limit in limits for one in limit.get("any", [limit])]


def test_every_limit_is_about_a_figure_of_a_committed_result() -> None:
    figures: dict[str, set[str]] = {}
    for path in page.results():
        result = page.load(path)
        figures.setdefault(result["bench"], set()).update(page.report_of(result).figures(result))
    for bench, limits in LIMITS.items():
        for limit in flat(limits):
            assert ("at_least" in limit) != ("at_most" in limit)
            known = figures.get(bench)
            assert known is None or any(fnmatchcase(name, limit["figure"]) for name in known), limit
    assert set(LIMITS) - set(figures) == {"adam_cuda", "device_step", "links", "gpt2_10b"}  # no result of a GPU is kept
