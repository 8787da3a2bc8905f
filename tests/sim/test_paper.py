"""The tables of the ZeRO-Infinity paper, from its equations."""

import subprocess
import sys

import pytest

from infinity.sim import paper
from infinity.sim.paper import COLUMNS, FIGURE_2A, UNEXPLAINED, Shape, figure_2a


@pytest.mark.parametrize("shape", FIGURE_2A, ids=lambda shape: f"{shape.layers} layers")
def test_equations_give_the_printed_digits_of_figure_2a(shape: Shape) -> None:
    differing = {
        (shape.layers, column): (printed, computed)
        for column, printed, computed in zip(COLUMNS, FIGURE_2A[shape], figure_2a(shape), strict=True)
        if printed != computed
    }
    assert differing.keys() == {place for place in UNEXPLAINED if place[0] == shape.layers}


def test_the_unexplained_digits_are_twenty_bytes_where_the_equation_has_sixteen() -> None:
    smallest = next(iter(FIGURE_2A))
    column = list(COLUMNS).index("model state working memory (GB/GPU)")
    assert figure_2a(smallest)[column] == "1.56" and FIGURE_2A[smallest][column] == "1.95"
    assert paper.digits(20 * smallest.hidden**2, paper.GIB) == "1.95"


def test_states_take_twenty_bytes_a_parameter() -> None:
    shape = Shape(128, 25 * paper.K, 256)
    assert shape.model_states == 240 * shape.layers * shape.hidden**2
    assert 2 + 2 + paper.STATES.bytes_per_element == paper.BYTES


def test_checkpoints_and_working_memory_trade_by_the_interval() -> None:
    shape, sparse = Shape(128, 25 * paper.K, 256), Shape(128, 25 * paper.K, 256, interval=4)
    assert sparse.checkpoints * 4 == shape.checkpoints
    assert sparse.activation_working_memory == 4 * shape.activation_working_memory
    assert sparse.activations == shape.activations == 128 * shape.activation_working_memory


def test_bandwidths_agree_with_the_sentences_but_one() -> None:
    """Equations (6) and (10) give 1.23 TB/s for "nearly 1.5 TB/s", at which the efficiency is 91.6 %."""
    differing = [claim for claim in paper.claims() if not claim.holds]
    assert [claim.says for claim in differing] == ["optimizer states, batch 2: 90 % needs nearly 1.5 TB/s"]
    assert differing[0].gives == "1.23 TB/s; 91.6% at 1.5 TB/s"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_efficiency_at_the_bandwidth_for_a_share_is_that_share(share: float) -> None:
    for intensity in (paper.intensity_of_parameters(2), paper.intensity_of_checkpoints(8192, interval=2)):
        assert paper.efficiency(intensity, paper.bandwidth_for(share, intensity)) == pytest.approx(share)


def test_intensities_are_operations_by_bytes_moved() -> None:
    """Equations (7) to (11): eight operations a token and parameter, by the bytes that an iteration moves."""
    shape = Shape(100, 4096, 32, sequence=512, batch=3, interval=2)
    operations = 2 * 4 * shape.batch * shape.sequence * shape.parameters
    moved = 2 * 4 * shape.parameters
    assert paper.intensity_of_parameters(shape.batch, shape.sequence) == operations / moved
    moved = 2 * int(paper.STATES.bytes_per_element) * shape.parameters
    assert paper.intensity_of_optimizer_states(shape.batch, shape.sequence) == operations / moved
    assert paper.intensity_of_checkpoints(shape.hidden, shape.interval) == operations / (2 * shape.checkpoints)


def test_module_prints_both_tables() -> None:
    printed = subprocess.run([sys.executable, "-m", "infinity.sim.paper"], capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines() == list(paper.tables())
    assert "|  |  |  | equations | 101.47 | 1845.70 | 88.59 | 3.08 | 400.00 | 18.00 |" in printed.stdout
