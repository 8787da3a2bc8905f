"""The golden set: its runs repeat, and their bits depend on what is trained and not on where states live."""

import pytest

import golden


def digest(**changes: object) -> str:
    case = golden.Case("bf16", "none", "none", 2, 1.0, "AdamW", "fp32")
    return golden.run(case._replace(**changes))


def test_digests_are_the_same_on_every_tier() -> None:
    first = digest()
    assert first == digest() == digest(param="nvme", optim="nvme")


@pytest.mark.parametrize("change", [{"clipping": 0.0}, {"moments": "8bit"}, {"dtype": "fp32"}], ids=str)
def test_digests_differ_between_runs_that_compute_something_else(change: dict[str, object]) -> None:
    assert digest() != digest(**change)


def test_cases_are_distinct() -> None:
    cases = list(golden.cases())
    assert len(set(cases)) == len(cases) > 100
