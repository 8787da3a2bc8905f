"""Share of time in which a device computes in steps of a GPT-2, and the Python frames that run while it is idle.

    python bench/gpu_trace.py --size 1.3b --kind cpu --output trace.json
    python bench/gpu_trace.py --size tiny            # on a CPU, too: operators stand for kernels

torch.profiler traces some steps after those that warm up, and a thread samples the Python frames of all threads
meanwhile. Prints the shares of time in which kernels and copies run, the largest gaps between kernels with the frames
that ran in them, all gaps by site in the package, the engine's counters and the longest kernels. A `late` gap ends with
a kernel that the host launched in the gap. A `queued` gap ends with a kernel that was launched before and waited for
other work of the device. Exit status 1 if nothing was measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import io
import json
import logging
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import harness
import kineto
import trace_gaps
from device_step import KINDS, SIZES
from frame_sampler import Sample
from trace_run import STEP, Run, measure
from trace_text import text
from zero_contenders import make_loop

RECORDING = 2
"""Steps of an engine before those that count: the first records its order, the second follows it."""
GAPS = 20
KERNELS = 10
LARGEST = 12_000_000
"""Bytes of a compressed trace that --trace keeps."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--kind", choices=KINDS, default="cpu", help="where states live, as in device_step.py (cpu)")
    parser.add_argument("--clip", type=float, default=0.0, help="norm to clip the gradient to (0: no clipping)")
    parser.add_argument("--steps", type=int, default=2, help="traced steps (2)")
    parser.add_argument("--warm-up", type=int, default=3, help="untraced steps before (3); one traced step follows")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the profiler's trace, compressed with gzip")
    parser.add_argument("--no-frames", dest="frames", action="store_false", help="do not sample Python's frames")
    args = parser.parse_args(arguments)
    if args.steps < 1 or args.warm_up < 1:
        parser.error("--steps and --warm-up must be at least 1")
    args.ranks, args.dtype, args.prefetch = 1, "bf16", "auto"
    vars(args).update(SIZES[args.size])
    return args


# -- the result --------------------------------------------------------------------------------------------------------


def first_part(args: argparse.Namespace, run: Run) -> harness.Result:
    """Return the part of the result that needs no trace."""
    counted = run.untraced[RECORDING:] or run.untraced[-1:]
    head = run.attempt("the head", lambda: harness.head("gpu_trace", path=args.nvme_path), {"bench": "gpu_trace"})
    return {
        **head,
        "device": run.attempt("the device's name", lambda: device_name(args.device), args.device),
        **{"size": args.size, "kind": args.kind, "clip": args.clip},
        "title": KINDS[args.kind].title,
        "loss": run.loss,
        "step_seconds": {
            "untraced": run.untraced,
            "traced": run.traced,
            "untraced_median": harness.spread(counted).median,
            "traced_median": harness.spread(run.traced).median,
        },
        "sampler": run.sampler,
        "counters": run.counters,
        "host_sites": run.attempt("sites", lambda: trace_gaps.host_sites(samples_in(run)), list[Any]()),
        "notes": run.notes,
    }


def samples_in(run: Run) -> list[Sample]:
    """Return the samples in the traced steps."""
    return [sample for sample in run.samples if any(start <= sample.ns < end for start, end in run.steps)]


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


def analyse(run: Run) -> harness.Result:
    """Return the part of the result that the trace gives. ValueError if the trace does not hold the steps."""
    trace = kineto.checked(kineto.parse(kineto.events_of(run.exported)))
    clock = kineto.fit(run.marks, trace.annotations)
    marked = next((trace.annotations[mark.name] for mark in run.marks if mark.name in trace.annotations), None)
    windows = []
    for number, (began, ended) in enumerate(run.steps):
        span = trace.annotations.get(f"{STEP}{number}")
        if span is not None:
            windows.append((span.start, span.end))
        elif clock is not None:
            windows.append((clock.at(began), clock.at(ended)))
    if len(windows) < len(run.steps):
        raise ValueError(f"the trace holds {len(windows)} of {len(run.steps)} steps")
    if clock is None:
        trace.notes.append("no marks in the trace: samples cannot be placed in it")
    busy = trace_gaps.busy_spans(trace, marked.thread if marked else "")
    lost, launched = kineto.unseen(trace, windows[0][0], windows[-1][1])
    if trace.kernels and lost:
        trace.notes.append(
            f"{lost} of {launched} launches have no kernel in the trace: the share of kernels is a lower bound"
        )
    overhead = sum(row["ms"] for row in trace_gaps.most(trace.overheads, windows, len(trace.overheads)))
    if overhead:
        trace.notes.append(f"the profiler itself took {overhead:.2f} ms of the steps")
    found = trace_gaps.gaps(busy, trace.launches, windows)
    meanwhile = trace_gaps.Meanwhile(trace, run.samples, clock)
    largest = sorted(found, key=lambda gap: -gap.length)[:GAPS]
    rows = [(f"step {k}", [window]) for k, window in enumerate(windows)] + [("all", windows)]
    run.notes += trace.notes
    return {
        "busy": "kernels" if trace.kernels else "operators",
        "clock": {"drift_us": clock.drift, "error_us": clock.error} if clock else None,
        "shares": [{"name": name, **trace_gaps.shares(busy, trace.copies, parts)} for name, parts in rows],
        "copies": trace_gaps.most(trace.copies, windows, 10),
        "gap_reasons": reasons(found),
        "gaps": [trace_gaps.described(gap, windows[gap.step], meanwhile) for gap in largest],
        "gap_sites": trace_gaps.by_site(found, meanwhile),
        "kernels": trace_gaps.most(busy, windows, KERNELS),
    }


def reasons(found: list[trace_gaps.Gap]) -> dict[str, dict[str, float]]:
    """Return milliseconds and numbers of gaps by the reason of their ends; `short` ones apart."""
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for gap in found:
        name = gap.ended if gap.length >= trace_gaps.FLOOR else "short"
        total[name] += gap.length / 1e3  # type: ignore[assignment]
        count[name] += 1
    return {name: {"ms": ms, "count": count[name]} for name, ms in total.most_common()}


def keep(path: Path, trace: str) -> None:
    """Write the trace, unless it is too large."""
    packed = gzip.compress(trace.encode(), compresslevel=6)
    if len(packed) > LARGEST:
        print(f"the trace is dropped: {len(packed)} bytes are more than {LARGEST}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)


def write(args: argparse.Namespace, run: Run, result: harness.Result) -> None:
    if args.output:
        run.attempt("writing the result", lambda: harness.write_json(args.output, result), None)


def report(args: argparse.Namespace, run: Run) -> int:
    """Write and print the result. Returns the exit status."""
    result = first_part(args, run)
    write(args, run, result)
    empty = dict[str, Any]()
    found = run.attempt("the analysis of the trace", lambda: analyse(run), empty) if run.exported else empty
    result |= found
    write(args, run, result)
    print(run.attempt("the text", lambda: text(result), json.dumps(found)[:5000]), flush=True)
    if args.trace and run.exported:
        run.attempt("keeping the trace", lambda: keep(args.trace, run.exported), None)
    if not found:
        print(f"gpu_trace: the steps ran, and their trace is missing: {'; '.join(run.notes)}", file=sys.stderr)
    return int(not found)


def main() -> int:
    args, run = parse(), Run()
    with suppress(io.UnsupportedOperation):  # stderr without a file
        faulthandler.enable()
    try:
        import torch
        import torch.distributed as dist

        logging.getLogger("infinity").setLevel(logging.WARNING)
        found = torch.accelerator.current_accelerator(check_available=True)
        args.device = found.type if found is not None else "cpu"
        contender = KINDS[args.kind]
        with tempfile.TemporaryDirectory() as folder:
            if contender.kind == "fsdp2":
                backend = "gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl"
                dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
            loop: Any = make_loop(args, contender)
            try:
                measure(args, run, loop)
                status = report(args, run)
            finally:
                if hasattr(loop, "engine"):
                    run.attempt("closing the engine", loop.engine.close, None)
                if dist.is_initialized():
                    run.attempt("the end of the process group", dist.destroy_process_group, None)
    except Exception as error:  # noqa: BLE001 - one line says why nothing was measured
        traceback.print_exc()
        print(f"gpu_trace: not measured: {type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
