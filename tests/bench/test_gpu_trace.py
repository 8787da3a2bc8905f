"""bench/gpu_trace.py: shares, gaps and sites of traces written by hand, the sampler of frames, and a tiny run."""

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

frame_sampler = importlib.import_module("frame_sampler")
gpu_trace = importlib.import_module("gpu_trace")
kineto = importlib.import_module("kineto")
trace_gaps = importlib.import_module("trace_gaps")
trace_run = importlib.import_module("trace_run")
trace_text = importlib.import_module("trace_text")
ROOT = Path(__file__).resolve().parents[2]
Frame, Sample = frame_sampler.Frame, frame_sampler.Sample


def event(cat: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    given = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": args.pop("tid", 1), "ts": start, "dur": end - start}
    return given | ({"args": args} if args else {})


def kernel(name: str, start: float, end: float, launched: float, correlation: int, stream: int = 7) -> list[Any]:
    """A kernel and the call that launched it."""
    return [
        event("kernel", name, start, end, stream=stream, correlation=correlation),
        event("cuda_runtime", "cudaLaunchKernel", launched, launched + 4, correlation=correlation),
    ]


OFFSET = 1_000_000.0
"""µs of the host's clock at the trace's 0."""


def at(trace_us: float) -> int:
    """ns of the host's clock at a time of the trace."""
    return int((trace_us + OFFSET) * 1000)


def stack(*frames: str) -> tuple[Any, ...]:
    """Frames from texts such as `infinity/units/store.py:7 use`."""
    found = []
    for text in frames:
        place, _, function = text.partition(" ")
        file, _, line = place.partition(":")
        found.append(Frame(file, int(line), function, file.startswith(("infinity/", "bench/"))))
    return tuple(found)


MARKS = [
    kineto.Mark("begin", "gpu_trace begin 0", at(995), at(1005)),
    kineto.Mark("end", "gpu_trace end 0", at(9000), at(9010)),
]
MARKED = [
    event("user_annotation", "gpu_trace begin 0", 1000, 1001),
    event("user_annotation", "gpu_trace end 0", 9005, 9006),
]
STEPS = [event("user_annotation", f"gpu_trace step {k}", 2000 + 2000 * k, 4000 + 2000 * k) for k in range(2)]
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)"
EVENTS = [
    *MARKED,
    *STEPS,
    event("gpu_user_annotation", "gpu_trace step 0", 2500, 2600),
    *kernel(GEMM, 2100, 2600, 2050, 1),
    *kernel("void norm<float>(int)", 2400, 3000, 2060, 2, stream=20),  # overlaps on another stream
    *kernel(GEMM, 3500, 4200, 3490, 3),  # launched late, and runs into the second step
    *kernel("void norm<float>(int)", 5000, 6000, 3600, 4),  # queued: waits for a copy
    event("gpu_memset", "Memset (Device)", 3000, 3100, stream=7),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4100, 4990, stream=13, bytes=8_900_000),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2200, 2300, stream=14, bytes=100),
    event("cuda_runtime", "cudaEventSynchronize", 3150, 3450, tid=99),
    event("overhead", "Buffer Flush", 4300, 4400),
]


def samples() -> list[Any]:
    waiting = {"main": stack("autograd/graph.py:9 run", "infinity/engine/training.py:162 backward")}
    hook = stack("infinity/units/store.py:7 use", "infinity/model/hooks.py:3 before")
    helper = {"infinity-update": stack("infinity/update/pipeline.py:5 _run"), "other": stack("x/y.py:1 z")}
    return [
        Sample(at(2050), {"main": stack("infinity/sim/gpt2.py:1 forward")}),
        Sample(at(3200), waiting | {"autograd": hook} | helper),
        Sample(at(3300), waiting | {"autograd": hook} | helper),
        Sample(at(3400), waiting | helper),
        Sample(at(4600), {"main": stack("bench/trace_run.py:1 step")}),
    ]


def analysed(events: list[Any], **kwargs: Any) -> tuple[dict[str, Any], Any]:
    run = trace_run.Run(steps=[(at(2000), at(4000)), (at(4000), at(6000))], marks=MARKS, samples=samples(), **kwargs)
    run.untraced, run.traced, run.exported = [9.0, 8.0, 2.0], [2.0, 3.0], json.dumps({"traceEvents": events})
    return gpu_trace.analyse(run), run


# -- events ------------------------------------------------------------------------------------------------------------


def test_broken_events_are_left_out() -> None:
    broken = [
        None,
        7,
        {"ph": "X", "cat": "kernel", "name": "no times"},
        {"ph": "X", "cat": "kernel", "name": "text", "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "zero", "ts": 0, "dur": 0},
        {"ph": "X", "cat": "kernel", "name": "negative", "ts": 5, "dur": -1},
        {"ph": "X", "cat": "kernel", "name": None, "ts": 5, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "infinite", "ts": float("inf"), "dur": 1},
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "kernel", "name": "kept", "ts": "5", "dur": 1, "args": [1]},
        {"ph": "X", "cat": None, "name": "nothing", "ts": 5, "dur": 1},
    ]
    trace = kineto.parse(broken)
    assert [span.name for span in trace.kernels] == ["kept"]
    assert trace.kernels[0].correlation is None


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": [{"name": "a", "ts": 1}, {"name": "b "quoted"", "ts": 2}, {"name": "c", "ts": 3}]}',
        '{"head": {"x": 1}, "traceEvents": [{"name": "a", "ts": 1}, {"name": "c", "ts": 3}, {"name": "cut o',
    ],
    ids=["quotation marks", "truncated"],
)
def test_a_broken_file_gives_its_intact_events(text: str) -> None:
    assert [event["name"] for event in kineto.events_of(text)] == ["a", "c"]


def test_a_file_without_events_gives_none() -> None:
    assert kineto.events_of("") == kineto.events_of("{}") == kineto.events_of('{"traceEvents": 3}') == []


def test_kernels_before_their_launches_are_shifted_or_left_out() -> None:
    """Kernels are 30 µs early, so the clocks differ. One is 5 ms earlier still, which no clock explains."""
    events = [one for k in range(40) for one in kernel(f"k{k}", 1e5 + 100 * k - 30, 1e5 + 100 * k, 1e5 + 100 * k, k)]
    events[20]["ts"] -= 5000
    trace = kineto.checked(kineto.parse(events))
    assert len(trace.kernels) == 39 and trace.kernels[0].start == 1e5
    assert [note.split()[0] for note in trace.notes] == ["kernels", "1"]


def test_launches_without_a_kernel_are_counted() -> None:
    trace = kineto.parse(kernel("a", 100, 110, 90, 1) + kernel("b", 200, 210, 190, 2)[1:])
    assert kineto.unseen(trace, 0, 1000) == (1, 2)


def test_names_are_short() -> None:
    add = (
        "void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<T>>(int)"
    )
    assert kineto.short(add) == "vectorized_elementwise_kernel<CUDAFunctor_add>"
    assert kineto.short(GEMM) == "Kernel2<cutlass_80_tensorop_bf16_s16816gemm>"
    assert kineto.short("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT") == "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
    assert kineto.short("Memset (Device)") == "Memset"
    assert len(kineto.short("x" * 200)) == 60 and kineto.short("") == "" and kineto.short("(odd)")


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_marks_give_the_clock() -> None:
    """The closest readings of a group count; the trace's clock is 1 % fast."""
    marks = [
        kineto.Mark("begin", "b0", 0, 900_000),
        kineto.Mark("begin", "b1", 1_000_000, 1_002_000),
        kineto.Mark("end", "e0", 11_000_000, 11_002_000),
        kineto.Mark("end", "lost", 12_000_000, 12_000_001),
    ]
    names = {"b0": 99.0, "b1": 51_001.0, "e0": 61_101.0}
    clock = kineto.fit(marks, {name: kineto.Span(name, start, start + 1) for name, start in names.items()})
    assert clock is not None
    assert clock.at(1_001_000) == 51_001 and clock.at(6_001_000) == pytest.approx(56_051)
    assert (clock.drift, clock.error) == (pytest.approx(100), 1.0)
    assert kineto.fit(marks, {}) is None


# -- shares and gaps ---------------------------------------------------------------------------------------------------


def test_shares_are_those_of_unions_within_steps() -> None:
    result, _ = analysed(EVENTS)
    first, second, both = result["shares"]
    assert first["kernels"] == pytest.approx((1000 + 500) / 2000)  # 2100–3100 and 3500–4000
    assert second["kernels"] == pytest.approx((200 + 1000) / 2000)
    assert both["milliseconds"] == 4 and both["kernels"] == pytest.approx(2700 / 4000)
    assert second["to device"] == pytest.approx(890 / 2000) and first["from device"] == pytest.approx(100 / 2000)
    assert second["copies alone"] == pytest.approx(790 / 2000)
    assert second["nothing"] == pytest.approx(10 / 2000)
    assert result["copies"][0] == {"name": "Memcpy HtoD (Pinned -> Device)", "count": 1, "ms": 0.89, "bytes": 8_900_000}
    assert [(row["name"], row["count"], row["ms"]) for row in result["kernels"][:2]] == [
        ("void norm<float>(int)", 2, pytest.approx(1.6)),
        (GEMM, 2, pytest.approx(1.2)),
    ]


def test_gaps_have_kernels_reasons_copies_and_frames() -> None:
    result, _ = analysed(EVENTS)
    queued, late, first = result["gaps"]
    assert (queued["step"], queued["start_ms"], queued["ms"]) == (1, pytest.approx(0.2), pytest.approx(0.8))
    assert queued["ended"] == "queued" and queued["launched_ms_before"] == pytest.approx(1.4)
    assert queued["copies"] == {"to device": pytest.approx(0.79)}
    assert (late["step"], late["start_ms"], late["ms"]) == (0, pytest.approx(1.1), pytest.approx(0.4))
    assert (late["ended"], late["before"], late["after"]) == ("late", "Memset", kineto.short(GEMM))
    assert late["calls"]["cudaEventSynchronize [99]"] == pytest.approx(0.3)
    assert list(late["threads"]) == ["autograd", "main", "infinity-update"]
    assert late["threads"]["autograd"] == {
        "frames": ["infinity/units/store.py:7 use", "infinity/model/hooks.py:3 before"],
        "in": 2,
        "of": 3,
    }
    assert (first["before"], first["ended"], first["start_ms"]) == ("start of the trace", "late", 0)
    assert set(result["gap_reasons"]) == {"queued", "late"} and result["gap_reasons"]["late"]["count"] == 2


def test_gaps_are_summed_by_the_innermost_frame_of_the_package() -> None:
    result, _ = analysed(EVENTS)
    rows = {(row["site"], row["ended"]): row for row in result["gap_sites"]}
    assert rows["infinity/units/store.py:7 use", "late"]["seconds"] == pytest.approx(400e-6 * 2 / 3)
    assert rows["infinity/units/store.py:7 use", "late"]["callers"] == ["infinity/model/hooks.py:3 before"]
    assert rows["infinity/engine/training.py:162 backward", "late"]["median_ms"] == pytest.approx(0.4)
    assert rows["infinity/sim/gpt2.py:1 forward", "late"]["count"] == 1
    assert rows["bench/trace_run.py:1 step", "queued"]["seconds"] == pytest.approx(800e-6)
    assert sum(row["seconds"] for row in rows.values()) == pytest.approx(1300e-6)


def test_a_gap_takes_the_last_sample_before_it_and_short_gaps_are_one_line() -> None:
    spans = [kineto.Span(f"k{k}", 100.0 * k, 100.0 * k + 95) for k in range(1, 4)]
    found = trace_gaps.gaps(spans, {}, [(0.0, 1000.0)])
    assert [gap.length for gap in found] == [100, 5, 5, 605]
    assert (found[-1].ended, found[0].ended) == ("end", "")
    clock = kineto.Clock(0, 0, 1.0, 0, 0)
    meanwhile = trace_gaps.Meanwhile(kineto.Trace(), [Sample(310_000, {"main": stack("infinity/a.py:1 f")})], clock)
    rows = {row["site"]: row for row in trace_gaps.by_site(found, meanwhile)}
    assert rows["gaps below 0.01 ms"]["count"] == 2
    assert rows["infinity/a.py:1 f"]["median_ms"] == 0.605
    assert rows["no sample"]["median_ms"] == 0.1
    assert not frame_sampler.between(meanwhile.samples, [310.0], 5000, 5001, 1000)


def test_operators_stand_for_kernels_that_are_missing() -> None:
    events = [
        *MARKED,
        *STEPS,
        event("cpu_op", "aten::linear", 2000, 3000),
        event("cpu_op", "aten::addmm", 2100, 2900),  # within the one above
        event("cpu_op", "aten::copy_", 2000, 9000, tid=5),  # of another thread
        event("cpu_op", "aten::add", 5000, 6000),
    ]
    result, run = analysed(events)
    assert result["busy"] == "operators" and "no kernels" in run.notes[0]
    assert [row["kernels"] for row in result["shares"]] == [0.5, 0.5, 0.5]
    assert [row["name"] for row in result["kernels"]] == ["aten::linear", "aten::add"]
    assert {gap["ended"] for gap in result["gaps"]} == {"end", ""}


def test_a_trace_without_marks_or_steps() -> None:
    result, run = analysed([one for one in EVENTS if one not in MARKED])
    assert any("no marks" in note for note in run.notes) and result["clock"] is None
    assert {row["site"] for row in result["gap_sites"]} == {"no sample"}
    result, _ = analysed([one for one in EVENTS if one not in STEPS])  # the clock places them
    assert result["shares"][0]["kernels"] == pytest.approx(0.75)
    with pytest.raises(ValueError, match="holds 0 of 2 steps"):
        analysed([one for one in EVENTS if one not in STEPS + MARKED])


# -- the text ----------------------------------------------------------------------------------------------------------


def test_the_text_is_short_and_has_every_part() -> None:
    result, run = analysed(EVENTS, sampler={"samples": 5, "median_ms": 0.2, "p95_ms": 0.3, "longest_ms": 4.0})
    run.counters = {"wait_seconds": 0.25, "fetches": 0.0, "waits": {"unit": 0.2, "gradient": 0.05, "none": 0.0}}
    args = SimpleNamespace(device="cpu", size="tiny", kind="cpu", clip=0.0, nvme_path=ROOT)
    shown = trace_text.text(gpu_trace.first_part(args, run) | result)
    assert "2 s untraced; traced 2, 3 s (+25%)" in shown
    assert "engine: wait_seconds 0.25\nengine, waits: unit 0.2, gradient 0.05" in shown
    assert "queued (1.4)" in shown and "to device 0.79" in shown
    assert "autograd 2/3: infinity/units/store.py:7 use < infinity/model/hooks.py:3 before" in shown
    assert "the profiler itself took 0.10 ms of the steps" in shown
    assert trace_text.text({}) and len(shown.splitlines()) < 60
    assert "share of samples" in trace_text.text(gpu_trace.first_part(args, run))


def test_counters_are_subtracted_also_within_mappings() -> None:
    before = {"a": 1.0, "waits": {"unit": 1.0}}
    after = {"a": 3.0, "new": 2.0, "waits": {"unit": 1.5, "state": 0.5}, "more": {"x": 1.0}}
    found = trace_run.difference(before, after)
    assert found == {"a": 2.0, "new": 2.0, "waits": {"unit": 0.5, "state": 0.5}, "more": {"x": 1.0}}
    ledger = SimpleNamespace(snapshot=lambda: SimpleNamespace(wait=1, by={"u": 2}, name="x"), rates={"r": 1.0}, peak=5)
    loop = SimpleNamespace(engine=SimpleNamespace(ledger=ledger))
    assert trace_run.counters(loop) == {"wait": 1.0, "by": {"u": 2.0}, "rates": {"r": 1.0}}
    assert trace_run.counters(object()) == {}


# -- the sampler -------------------------------------------------------------------------------------------------------


def waits_here(started: threading.Event, end: threading.Event) -> None:
    started.set()
    end.wait()


def test_the_sampler_finds_a_thread_that_waits_in_a_function() -> None:
    started, end, before = threading.Event(), threading.Event(), sys.getswitchinterval()
    thread = threading.Thread(target=waits_here, args=(started, end), name="infinity-waiting")
    thread.start()
    started.wait()
    sampler = frame_sampler.FrameSampler([str(Path(__file__).parent)], interval=0)
    with sampler:
        while len(sampler._times) < 20 and not sampler.error:
            pass
    end.set()
    thread.join()
    found = sampler.samples()
    assert not sampler.error and sys.getswitchinterval() == before
    assert [sample.ns for sample in found] == sorted(sample.ns for sample in found)
    for sample in found:
        assert "frame-sampler" not in sample.stacks
        innermost, ours = sample.stacks["infinity-waiting"]
        assert not innermost.is_ours and innermost.file.endswith("threading.py")
        assert (ours.file, ours.function) == ("bench/test_gpu_trace.py", "waits_here")
    mine = {frame.function for sample in found for frame in sample.stacks["main"]}
    assert "test_the_sampler_finds_a_thread_that_waits_in_a_function" in mine


def test_the_sampler_ends_at_its_limit() -> None:
    sampler = frame_sampler.FrameSampler(interval=0, limit=3)
    with sampler:
        assert sampler._thread is not None
        sampler._thread.join()
    assert "ended after" in sampler.error and sampler.samples()


# -- the script --------------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_a_tiny_run_is_traced(tmp_path: Path) -> None:
    output, trace = tmp_path / "out.json", tmp_path / "trace.json.gz"
    command = ["--size", "tiny", "--warm-up", "2", "--steps", "1", "--output", str(output), "--trace", str(trace)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu_trace.py"), *command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "largest gaps" in done.stdout and "most time" in done.stdout and len(done.stdout.splitlines()) <= 65
    result = json.loads(output.read_text())
    assert result["bench"] == "gpu_trace" and result["busy"] == "operators"
    assert [row["name"] for row in result["shares"]] == ["step 0", "all"]
    assert result["counters"]["updated_elements"] > 0 and result["clock"] is not None
    assert trace.stat().st_size > 0


def test_a_large_trace_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_trace, "LARGEST", 10)
    gpu_trace.keep(tmp_path / "trace.gz", "a text that is longer than that")
    assert not (tmp_path / "trace.gz").exists() and "dropped" in capsys.readouterr().out


def test_a_failure_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(gpu_trace, "make_loop", broken)
    monkeypatch.setattr(sys, "argv", ["gpu_trace.py", "--size", "tiny"])
    assert gpu_trace.main() == 1
    assert capsys.readouterr().err.splitlines()[-1] == "gpu_trace: not measured: RuntimeError: out of memory"


def test_steps_without_a_trace_are_written_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = gpu_trace.parse(["--size", "tiny", "--output", str(tmp_path / "out.json")])
    args.device = "cpu"
    run = trace_run.Run(untraced=[1.0], traced=[1.0], exported="{}", steps=[(0, 1)])
    assert gpu_trace.report(args, run) == 1
    captured = capsys.readouterr()
    assert "step: 1 s untraced" in captured.out
    assert "the trace holds 0 of 1 steps" in captured.err.splitlines()[-1]
    assert json.loads((tmp_path / "out.json").read_text())["notes"]
