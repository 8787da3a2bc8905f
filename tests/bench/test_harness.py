"""The helpers of all benchmarks: turns, medians, child processes, the machine, results."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import harness


def test_each_kind_comes_first_once() -> None:
    orders = [harness.rotated("abc", number) for number in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert harness.rotated("abc", -1) == harness.rotated("abc", 2)


def test_every_kind_runs_once_a_round() -> None:
    turns = list(harness.interleaved("abcd", 6, warm_up=2))
    assert [number for number, _ in turns] == sorted(number for number, _ in turns)
    assert Counter(turns) == Counter((number, kind) for number in range(-2, 6) for kind in "abcd")


def test_collected_results_are_in_the_order_of_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[str] = Counter()

    def run(kind: str) -> dict[str, Any]:
        counts[kind] += 1
        return {"number": counts[kind]}

    found = harness.collect(["x", "y"], 3, run, lambda result: f"number {result['number']}")
    assert found == {kind: [{"number": 1}, {"number": 2}, {"number": 3}] for kind in "xy"}
    assert "round 3/3  x" in capsys.readouterr().err


def test_a_spread_is_median_smallest_and_largest() -> None:
    assert harness.spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        harness.spread([])


def test_a_ratio_is_the_median_within_rounds() -> None:
    """A round in which the machine was slow for both kinds counts like the others."""
    assert harness.median_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0
    with pytest.raises(ValueError):
        harness.median_ratio([1.0], [1.0, 2.0])


def test_samples_are_grouped_in_order() -> None:
    samples = [{"who": who, "seconds": seconds} for who, seconds in (("b", 1), ("a", 2), ("b", 3))]
    found = harness.grouped(samples, "who")
    assert list(found) == [("b",), ("a",)]
    assert harness.median(found["b",], "seconds") == 2


def script(path: Path, body: str) -> str:
    path.write_text(f"import json, os, sys\n{body}\n")
    return str(path)


def test_a_child_gives_the_json_of_its_last_line(tmp_path: Path) -> None:
    body = "print('ready'); print(json.dumps({'said': [*sys.argv[1:], os.environ['X']]}))"
    child = script(tmp_path / "child.py", body)
    assert harness.run_child(child, ["a b"], environment={"X": "1"}) == {"said": ["a b", "1"]}
    assert harness.run_child(child, [], before=["env", "X=2"]) == {"said": ["2"]}


def test_a_child_that_fails_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = script(tmp_path / "child.py", "sys.exit('no disk')")
    with pytest.raises(SystemExit, match=r"child.py --only nvme ended with code 1"):
        harness.run_child(child, ["--only", "nvme"])
    assert "no disk" in capfd.readouterr().err


def attempt(path: Path, body: str, limit: float = 60) -> dict[str, Any]:
    found = harness.attempt([sys.executable, script(path / "child.py", body)], environment=os.environ, limit=limit)
    assert found.pop("seconds") < 60
    return found


def test_an_attempt_gives_the_json_between_other_lines(tmp_path: Path) -> None:
    body = """print('ready'); print(json.dumps({'said': 1})); print('{closed}')"""
    assert attempt(tmp_path, body) == {"said": 1, "status": 0, "error": ""}


def test_an_attempt_that_fails_gives_its_last_error(tmp_path: Path) -> None:
    body = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('no disk') from e"
    assert attempt(tmp_path, body) == {"status": 1, "error": "OSError: no disk"}
    assert attempt(tmp_path, "os.kill(os.getpid(), 9)") == {"status": -9, "error": ""}


def test_an_attempt_that_hangs_is_killed(tmp_path: Path) -> None:
    assert attempt(tmp_path, "import time; time.sleep(100)", limit=0.5) == {"status": None, "error": ""}


def test_losses_are_compared_step_by_step() -> None:
    assert harness.apart([[4.0, 2.0], [4.0, 2.5], [4.4, 2.0]]) == pytest.approx(0.25)
    with pytest.raises(ValueError):
        harness.apart([[1.0], [1.0, 2.0]])


def test_drive_bytes_grow_by_those_of_a_file(tmp_path: Path) -> None:
    before = harness.drive_bytes()
    with open(tmp_path / "file", "wb", buffering=0) as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    read, written = (now - then for now, then in zip(harness.drive_bytes(), before, strict=True))
    on_drive = harness.file_system(tmp_path) != "tmpfs"
    assert read >= 0 and written >= on_drive << 20


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\n/dev/b {tmp_path} btrfs rw 0 0\n/dev/c {tmp_path} xfs rw 0 0\n"
    assert harness.file_system(tmp_path / "below", mounts) == "xfs"
    assert harness.file_system("/", mounts) == "ext4"
    assert harness.file_system(f"{tmp_path}2", mounts) == "ext4"


def test_the_machine_line_names_what_figures_depend_on(tmp_path: Path) -> None:
    line = harness.machine(tmp_path)
    assert f"{harness.cores()} cores" in line and "GiB" in line and "torch" in line
    assert harness.file_system(tmp_path) in line
    assert harness.peak_rss() < harness.memory_bytes()


def test_a_head_has_the_command_that_can_be_repeated() -> None:
    head = harness.head("zero", arguments=["--only", "infinity stage 3", "--redraw"], note="A note.")
    assert head["command"] == "python bench/zero.py --only 'infinity stage 3'"
    assert harness.head("zero", arguments=["-x"], script="a/b.py")["command"] == "python bench/a/b.py -x"
    assert (head["bench"], head["note"]) == ("zero", "A note.")


def test_a_result_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trial.json"
    harness.write_json(path, {"a": 1})
    harness.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(path.parent.iterdir()) == [path]
