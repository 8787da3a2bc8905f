"""`infinity timeline`: its table, JSON and picture, and files that are no traces."""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.observe.timeline import LANES, Sample, Span, StepSpan, chrome_trace
from support.commands import refused, run

WORK = [
    Span("compute", "forward a", 0, "model", 0.0, 1.0),
    Span("compute", "backward a", 0, "model", 1.5, 4.0),
    Span("nvme_read", "parameters", 2_000_000_000, "model", 0.5, 1.5),
    Span("nvme_read", "states", 1_000_000_000, "infinity-update", 1.0, 2.0),
    Span("update", "a", 0, "infinity-update", 2.0, 3.0),
]
STEPS = [StepSpan(0.0, 2.0, {"nvme_read": 0.5}), StepSpan(2.0, 4.0, {"update": 0.25, "nvme_read": 0.25})]
SAMPLES = [Sample(0.0, {"host": 1_000_000}), Sample(4.0, {"host": 2_000_000, "nvme": 5})]


@pytest.fixture
def trace() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(chrome_trace(WORK, STEPS, SAMPLES)))
    return made


@pytest.fixture
def file(tmp_path: Path, trace: dict[str, Any]) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    return path


def test_lanes_are_summed_over_rows(file: Path) -> None:
    """Overlapping reads are busy once."""
    result = run("timeline", file, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["steps"], found["seconds"], list(found["lanes"])) == (2, 4.0, list(LANES))
    assert found["lanes"]["nvme_read"] == {
        "busy_seconds": 1.5,
        "exposed_seconds": 0.75,
        "bytes": 3_000_000_000,
        "bytes_per_second": 2e9,
    }
    assert found["lanes"]["gather"]["bytes_per_second"] is None


def test_the_table_has_a_line_for_each_lane(file: Path) -> None:
    result = run("timeline", file)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "trace.json, rank 0: 2 steps, 2 s each"
    assert [line.split() for line in lines if "nvme_read" in line] == [
        ["nvme_read", "1.500", "38", "%", "0.750", "3.00", "GB", "2.00"]
    ]
    assert lines[-1] == "exposed: 1.000 s, 25 % of the steps"


def test_short_steps_are_shown_in_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    work = [Span("nvme_read", "parameters", 2_000_000, "model", 0.0005, 0.0015)]
    path.write_text(json.dumps(chrome_trace(work, [StepSpan(0.0, 0.004, {"nvme_read": 0.0005})], [])))
    lines = run("timeline", path).stdout.splitlines()
    assert "busy ms" in lines[2] and "exposed ms" in lines[2]
    assert [line.split()[:5] for line in lines if "nvme_read" in line] == [["nvme_read", "1.00", "25", "%", "0.50"]]
    assert lines[-1] == "exposed: 0.50 ms, 12 % of the steps"


def test_a_step_that_did_not_end_is_shown_as_such(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(WORK, [*STEPS[:1], StepSpan(2.0, 2.5, {}, is_complete=False)], [])))
    assert run("timeline", path).stdout.startswith("trace.json, rank 0: 1 step, 2 s each, and one that did not end")
    path.write_text(json.dumps(chrome_trace([], [StepSpan(0.0, 0.0, {}, is_complete=False)], [])))
    assert "no whole step" in run("timeline", path).stdout


def test_lanes_are_drawn(file: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    picture = tmp_path / "lanes.png"
    result = run("timeline", file, "--png", picture)
    assert result.exit_code == 0, result.output
    height, width, _ = image.imread(picture).shape
    assert width > height > 500


def test_an_empty_trace_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "trace.json", tmp_path / "lanes.png"
    path.write_text(json.dumps(chrome_trace([], [StepSpan(0.0, 0.0, {}, is_complete=False)], [])))
    assert run("timeline", path, "--png", picture).exit_code == 0
    assert picture.stat().st_size > 0


LINKS = Path(__file__).resolve().parents[2] / "docs" / "links.json"


def test_a_simulated_trace_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    shape = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "256")
    links = tmp_path / "links.json"
    links.write_text(json.dumps(json.loads(LINKS.read_text()) | {"flops": {"bfloat16": 1e12}}))
    machine = ("--host-memory", "8GiB", "--nvme", "8GiB", "--bandwidths", links)
    planned = run("plan", *shape, "--seq-length", "32", *machine, "--trace", path)
    assert planned.exit_code == 0, planned.output
    result = run("timeline", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("trace.json, simulated rank 0: 1 step")


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_pictures_need_matplotlib_and_a_known_suffix(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(2, "--png", "timeline", file, "--png", tmp_path / "missing" / "lanes.png")
    if "matplotlib" in sys.modules:
        refused(2, "has no suffix of a picture", "timeline", file, "--png", tmp_path / "lanes.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    refused(2, "pip install matplotlib", "timeline", file, "--png", tmp_path / "lanes.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json"]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    refused(1, "No such file", "timeline", tmp_path / "missing.json")
    refused(1, "is no file", "timeline", tmp_path)
    refused(1, "is no file", "timeline", "/dev/zero")


NOT_TRACES = [
    *("", "{", "[]", "7", "null", '"text"', "{}", "[" * 100_000, "9" * 5000, "\ud800", "\0"),
    *('{"traceEvents": 3}', '{"traceEvents": [3]}', '{"traceEvents": [{"ph": ["X"]}]}', '{"traceEvents": []}'),
    *('{"traceEvents": [], "otherData": {"steps": []}}', '{"traceEvents": [], "otherData": {"steps": [[]]}}'),
]


@pytest.mark.parametrize("text", NOT_TRACES, ids=range(len(NOT_TRACES)))
def test_texts_that_are_no_traces_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(1, "is no trace of engine.profile() or infinity plan --trace", "timeline", path)


@pytest.mark.parametrize("key", ["ts", "dur", "tid", "pid", "args", "name"])
@pytest.mark.parametrize("value", [None, -1, True, "text", float("nan"), float("inf"), 10**400, 1e300, [], {}])
def test_values_of_the_wrong_kind_are_refused(tmp_path: Path, trace: dict[str, Any], key: str, value: Any) -> None:
    if (key, value) == ("name", "text"):
        return
    next(event for event in trace["traceEvents"] if event["ph"] == "X")[key] = value
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    refused(1, "event ", "timeline", path)


def test_traces_of_several_ranks_are_refused(tmp_path: Path, trace: dict[str, Any]) -> None:
    trace["traceEvents"] += [{**event, "pid": 1} for event in trace["traceEvents"]]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    refused(1, "several processes", "timeline", path)


def test_steps_out_of_order_are_refused(tmp_path: Path, trace: dict[str, Any]) -> None:
    """Their end would not be that of the last one, to which bars are drawn."""
    steps = trace["otherData"]["steps"]
    trace["otherData"]["steps"] = [{**steps[0], "start": 5.0}, *steps]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    refused(1, "step 1 starts before the end of the one before it", "timeline", path)


def test_a_name_that_no_font_has_is_drawn(tmp_path: Path, trace: dict[str, Any]) -> None:
    next(event for event in trace["traceEvents"] if event["name"] == "process_name")["args"]["name"] = "\ud800\n\0"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    assert run("timeline", path, "--png", tmp_path / "lanes.png").exit_code == 0
    assert (tmp_path / "lanes.png").exists()


def test_no_damage_ends_in_a_traceback(tmp_path: Path, trace: dict[str, Any]) -> None:
    """A value anywhere in the file is replaced or removed."""
    choose = random.Random(0)
    path = tmp_path / "trace.json"
    for _ in range(80):
        damaged = copy.deepcopy(trace)
        place: Any = damaged
        while True:
            key = choose.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or choose.random() < 0.1:
                break
            place = place[key]
        if choose.random() < 0.3:
            del place[key]
        else:
            place[key] = choose.choice([None, -1, 1e308, 2**70, "", "compute", [], {}, [[]], True, float("nan")])
        path.write_text(json.dumps(damaged))
        result = run("timeline", path)
        assert result.exit_code in (0, 1), damaged
        assert result.exit_code == 0 or len(result.stderr.splitlines()) == 1
