"""The default evaluation of a job."""

from infinity.gpt2.pretraining import Evaluation


def test_evaluation_comes_every_25_steps_and_at_the_end_by_default() -> None:
    assert [step for step in range(1, 61) if Evaluation().is_due(step, last=60)] == [25, 50, 60]
