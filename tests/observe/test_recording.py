"""Timelines of recorded work: waits belong to the lane that works, requests are served in turn, rows do not overlap."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import pytest

from infinity.concurrency import now
from infinity.observe.recorder import Recorder
from infinity.observe.recording import Mark, Recording, Request, Stamped, Wait
from infinity.observe.timeline import (
    LANES,
    Interval,
    Sample,
    Span,
    StepSpan,
    chrome_trace,
    seconds,
    union,
    within,
    without,
)
from support.locked import locked


@dataclass
class Served:
    times: tuple[float, float | None]


def recorded(**lists: list[object]) -> Recording:
    recording = Recording(0.0, on_host=True)
    for name, values in lists.items():
        getattr(recording, name).extend(values)
    return recording


def read(start: float, end: float | None, name: str = "extent") -> Request:
    return Request("nvme_read", "nvme_read", name, 8, "model", Served((start, end)))


def test_a_wait_belongs_to_the_lane_that_works() -> None:
    """The update that is waited for itself waits for the drive for two seconds, and nothing works for one."""
    recording = recorded(
        waits=[Wait("update", 1.0, 6.0)],
        work=[
            Stamped("update", "", 0, "infinity-update", 3.0, 5.0),
            Stamped("activations", "", 0, "infinity-comm", 0, 9),
        ],
        requests=[read(0.5, 3.0)],
        boundaries=[10.0],
    )
    assert recording.timeline(10.0).steps == [StepSpan(0.0, 10.0, {"nvme_read": 2.0, "update": 2.0})]


def test_waits_and_own_work_of_the_model_are_not_compute() -> None:
    recording = recorded(
        marks=[Mark("forward", 1.0), Mark("forward a", 2.0), Mark("", 8.0)],
        waits=[Wait("gather", 3.0, 5.0)],
        work=[Stamped("reduce", "", 4, "model", 4.5, 6.0), Stamped("reduce", "", 4, "infinity-grads", 1.0, 7.0)],
        boundaries=[4.0, 10.0],
    )
    found = recording.timeline(10.0)
    compute = [(span.name, span.start, span.end) for span in found.work if span.lane == "compute"]
    assert compute == [("forward", 1.0, 2.0), ("forward a", 2.0, 3.0), ("forward a", 6.0, 8.0)]
    assert [step.exposed for step in found.steps] == [{"reduce": 1.0}, {"reduce": 2.0}]


def test_requests_of_a_queue_are_served_in_turn() -> None:
    """A request that has not ended is cut off. Bytes are kept."""
    recording = recorded(requests=[read(0.0, 2.0, "a"), read(0.0, 3.0, "b"), read(5.0, 6.0, "c"), read(5.5, None, "d")])
    work = recording.timeline(7.0).work
    assert [(span.name, span.start, span.end) for span in work] == [
        ("a", 0.0, 2.0),
        ("b", 2.0, 3.0),
        ("c", 5.0, 6.0),
        ("d", 6.0, 7.0),
    ]
    assert sum(span.nbytes for span in work) == 32


def test_a_stamp_that_a_stream_has_not_reached_is_now() -> None:
    recording = recorded(work=[Stamped("update", "", 0, "infinity-update", lambda: 1.0, lambda: None)])
    assert [(span.start, span.end) for span in recording.timeline(4.0).work] == [(1.0, 4.0)]


def test_work_in_streams_is_none_of_the_models_thread() -> None:
    recording = Recording(0.0, on_host=False)
    recording.work.append(Stamped("host_to_device", "", 8, "model", 1.0, 2.0))
    recording.boundaries.append(3.0)
    assert recording.timeline(3.0).steps[0].exposed == {}


def test_rows_of_a_lane_do_not_overlap() -> None:
    choose = random.Random(0)
    work = []
    for _ in range(300):
        start = choose.uniform(0, 10)
        work.append(Span(choose.choice(LANES), "", 1, "model", start, start + choose.uniform(0, 0.5)))
    trace = chrome_trace(work, [StepSpan(0.0, 10.0, {})], [Sample(1.0, {"host": 3})], rank=2)
    rows: dict[int, int] = {}
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    events = sorted((event for event in trace["traceEvents"] if event["ph"] == "X"), key=lambda event: event["ts"])
    assert len(events) == sum(event["args"]["bytes"] for event in events) == 300
    for event in events:
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        assert rows.get(event["tid"], 0) <= start
        rows[event["tid"]] = start + length
        assert event["pid"] == 2 and names[event["tid"]] in LANES
    assert set(names.values()) == set(LANES)


def test_a_recorder_that_is_off_records_nothing() -> None:
    recorder = Recorder()
    first = recorder.span("update")
    assert first is recorder.naming("a") is recorder.copy("", 1)  # one object for all
    with recorder.wait("gather", "parameters"):
        pass
    recorder.phase("forward")
    recorder.unit("a")
    recorder.end_step()
    recording = recorder.start()
    recorder.stop(recording)
    with recorder.span("update"):
        pass
    assert not (recording.work or recording.waits or recording.marks or recording.boundaries)
    assert not recorder.is_on


def test_recordings_of_one_recorder_are_independent() -> None:
    recorder = locked(Recorder, "_recordings", "is_on", reads=False)()
    first = recorder.start()
    with recorder.span("update", "a"):
        second = recorder.start()
    recorder.stop(first)
    recorder.stop(first)
    with recorder.naming("b", "host_to_device"), recorder.copy("", 8):
        pass
    recorder.stop(second)
    assert [(work.lane, work.name, work.nbytes) for work in first.work] == [("update", "a", 0)]
    assert [(work.lane, work.name, work.nbytes) for work in second.work] == [
        ("update", "a", 0),
        ("host_to_device", "b", 8),
    ]


def test_only_the_outermost_wait_of_the_model_counts() -> None:
    recorder = Recorder()
    recording = recorder.start()

    def helper() -> None:
        with recorder.wait("reduce", "norm"):
            pass

    with recorder.wait("gather", "parameters"), recorder.wait("update", "update"):
        assert recorder.is_waiting
        thread = threading.Thread(target=helper, name="infinity-update_0")
        thread.start()
        thread.join()
    assert [wait.lane for wait in recording.waits] == ["gather"]
    (reason, waited), *others = recorder.waits.so_far().items()
    assert (reason, waited.count, waited.slept, others) == ("parameters", 1, waited.stood_still, [])
    assert waited.slept > 0 and not recorder.is_waiting


def test_work_that_raises_is_recorded() -> None:
    recorder = Recorder()
    recording = recorder.start()
    with pytest.raises(KeyboardInterrupt), recorder.span("update"):
        raise KeyboardInterrupt
    assert len(recording.work) == 1 and recording.timeline(now()).work[0].end <= now()


def test_sets_of_seconds_equal_those_of_single_points() -> None:
    choose = random.Random(1)

    def random_set() -> list[Interval]:
        return union((low, low + choose.randrange(4)) for low in (choose.randrange(30) for _ in range(6)))

    def points(intervals: list[Interval]) -> set[float]:
        return {point for low, high in intervals for point in range(int(low), int(high))}

    for _ in range(300):
        one, other, low, high = random_set(), random_set(), choose.randrange(30), choose.randrange(30)
        assert points(without(one, other)) == points(one) - points(other)
        assert seconds(union([*one, *other])) == len(points(one) | points(other))
        if low < high:
            assert points(within(one, low, high)) == points(one) & set(range(low, high))
