"""Progress shows the same figures on a terminal, and as lines where there is none."""

import io

from rich.console import Console

from gpt2.meter import StepRecord
from gpt2.progress import Progress


def record(step: int, seconds: float = 0.5) -> StepRecord:
    return StepRecord(step, max(6.0 - step, 1.96), seconds, 1000 / seconds, int(2e8), int(1e8), 10**9, 0)


def output(terminal: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width, color_system=None, legacy_windows=False), file


def test_lines_where_there_is_no_terminal() -> None:
    """The held-out loss is in the first line after its measurement only."""
    console, file = output(terminal=False)
    with Progress(3, console=console, seconds_between_lines=0) as progress:
        progress.update(record(1))
        progress.held_out(5.25)
        progress.update(record(2, seconds=1.5))
        progress.update(record(3))
    assert file.getvalue().splitlines() == [
        "step 1/3: loss 5.000   2,000 tokens/s   NVMe 0.40 GB/s read, 0.20 written, 0:01 left",
        "step 2/3: loss 4.000, held-out 5.250   1,000 tokens/s   NVMe 0.20 GB/s read, 0.10 written, 0:01 left",
        "step 3/3: loss 3.000   1,200 tokens/s   NVMe 0.24 GB/s read, 0.12 written",
    ]


def test_few_lines_where_steps_are_short() -> None:
    console, file = output(terminal=False)
    with Progress(100, console=console, seconds_between_lines=3600) as progress:
        for step in range(1, 101):
            progress.update(record(step))
    assert [line.split(":")[0] for line in file.getvalue().splitlines()] == ["step 1/100", "step 100/100"]


def test_two_rows_on_a_terminal_of_80_columns() -> None:
    console, file = output(terminal=True)
    progress = Progress(300, console=console)
    console.print(progress)
    assert "step 0/300" in file.getvalue() and "first step" in file.getvalue()
    for step in range(1, 41):
        progress.update(record(step))
    progress.held_out(2.345)
    file.truncate(0)
    file.seek(0)
    console.print(progress)
    first, second = file.getvalue().splitlines()
    assert first.startswith("step 40/300") and "━" in first and first.rstrip().endswith("2:10 left")
    assert second.rstrip() == "loss 1.960, held-out 2.345   2,000 tokens/s   NVMe 0.40 GB/s read, 0.20 written"
    progress.doing("measuring held-out loss")
    file.truncate(0)
    file.seek(0)
    console.print(progress)
    assert "measuring held-out loss" in file.getvalue()


def test_the_live_display_ends_with_the_last_state() -> None:
    console, file = output(terminal=True, width=100)
    with Progress(2, console=console) as progress:
        progress.update(record(1))
        progress.update(record(2))
    assert "step 2/2" in file.getvalue() and "loss 4.000" in file.getvalue()


def test_number_of_steps_may_come_later() -> None:
    console, file = output(terminal=False)
    with Progress(None, console=console, seconds_between_lines=0) as progress:
        progress.update(record(1))
        progress.set_steps(3)
        progress.say("steps: 3")
        progress.update(record(2, seconds=3.5))
    first, line, second = file.getvalue().splitlines()
    assert first.startswith("step 1: loss 5.000") and first.endswith(", measuring speed")
    assert line == "steps: 3"
    assert second.startswith("step 2/3: ") and second.endswith("0:02 left")


def test_terminal_shows_no_total_until_it_is_known() -> None:
    console, file = output(terminal=True)
    progress = Progress(None, console=console)
    progress.update(record(7))
    console.print(progress)
    first, _ = file.getvalue().splitlines()
    assert first.startswith("step 7 ") and first.rstrip().endswith("measuring speed")


def test_peak_stands_beside_the_need_of_a_plain_loop() -> None:
    console, file = output(terminal=False)
    with Progress(1, console=console, plain_bytes=2 * 10**9) as progress:
        progress.update(record(1))
    assert file.getvalue().endswith(" written; peak memory 1.00 GB, a plain loop needs 2.00 GB\n")
    console, file = output(terminal=True)
    console.print(progress)
    assert file.getvalue().splitlines()[2].rstrip() == "peak memory 1.00 GB, a plain loop needs 2.00 GB"
