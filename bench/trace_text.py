"""Text of a result of `gpu_trace.py`, at most about 60 lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness import Result
from kineto import short

WIDTH = 260
SITES = 10


def text(result: Result) -> str:
    """Return what the result holds; parts that are missing are left out."""
    return "\n".join(
        line[:WIDTH] for part in (_head, _shares, _counters, _gaps, _sites, _kernels) for line in part(result)
    )


def _head(result: Result) -> Iterator[str]:
    named = [str(result[key]) for key in ("device", "size", "title") if key in result]
    yield ", ".join([*named, f"clip {result.get('clip', 0):g}"])
    step = result.get("step_seconds", {})
    if step:
        untraced, traced = step["untraced_median"], step["traced_median"]
        each = ", ".join(f"{one:.4g}" for one in step["traced"])
        loss = f"loss {result.get('loss', 0):.4f}"
        yield f"step: {untraced:.4g} s untraced; traced {each} s ({traced / untraced - 1:+.0%}); {loss}"
    sampler = result.get("sampler", {})
    if sampler:
        yield (
            f"sampler: {sampler['samples']} samples, every {sampler['median_ms']:.2g} ms "
            f"(95 %: {sampler['p95_ms']:.2g}, longest {sampler['longest_ms']:.3g})"
        )
    clock = result.get("clock")
    if clock:
        yield f"clock: drift {clock['drift_us']:.1f} µs, error at most {clock['error_us']:.1f} µs"
    for note in result.get("notes", []):
        yield f"note: {note}"


def _shares(result: Result) -> Iterator[str]:
    rows = result.get("shares", [])
    if rows:
        names = f"{'':8}{'ms':>9}{result.get('busy', 'kernels'):>12}{'to device':>11}{'from device':>12}"
        yield f"{names}{'on device':>11}{'copies alone':>14}{'nothing':>9}"
    for row in rows:
        yield (
            f"{row['name']:8}{row['milliseconds']:9.2f}{row['kernels']:12.1%}{row['to device']:11.1%}"
            f"{row['from device']:12.1%}{row['on device']:11.1%}{row['copies alone']:14.1%}{row['nothing']:9.1%}"
        )
    for row in result.get("copies", [])[:4]:
        rate = row["bytes"] / row["ms"] / 1e6 if row["ms"] else 0.0
        moved = f"{row['bytes'] / 1e9:.3f} GB, {rate:.1f} GB/s"
        yield f"  {row['name']}: {row['count']} copies, {row['ms']:.2f} ms, {moved}"
    reasons = result.get("gap_reasons", {})
    if reasons:
        yield "gaps: " + "; ".join(
            f"{name or 'unknown'} {one['ms']:.2f} ms in {one['count']}" for name, one in reasons.items()
        )


def _counters(result: Result) -> Iterator[str]:
    simple = {
        name: value for name, value in result.get("counters", {}).items() if not isinstance(value, dict) and value
    }
    if simple:
        yield "engine: " + ", ".join(f"{name} {value:.6g}" for name, value in simple.items())
    for name, value in result.get("counters", {}).items():
        if isinstance(value, dict):
            shown = sorted(value.items(), key=lambda item: -abs(item[1]))
            yield f"engine, {name}: " + ", ".join(f"{key} {one:.4g}" for key, one in shown if one)


def _gaps(result: Result) -> Iterator[str]:
    found = result.get("gaps", [])
    if found:
        columns = ("step, ms from its start, ms", "reason (ms since launch)", f"{result.get('busy', 'kernels')} around")
        yield f"largest gaps: {' | '.join((*columns, 'copies, calls in ms', 'threads, innermost frame first'))}"
    for gap in found:
        launched = gap["launched_ms_before"]
        reason = gap["ended"] or "?"
        if launched is not None:
            reason += f" ({launched:.3g})"
        meanwhile = " ".join(f"{way} {ms:.2g}" for way, ms in gap["copies"].items())
        calls = " ".join(f"{name} {ms:.2g}" for name, ms in list(gap["calls"].items())[:1])
        around = f"{gap['before'][:28]} → {gap['after'][:28]}"
        yield (
            f"{gap['step']} {gap['start_ms']:8.2f} {gap['ms']:7.3f} | {reason} | {around} | "
            f"{', '.join(filter(None, (meanwhile, calls))) or '-'} | {_threads(gap['threads'])}"
        )


def _threads(found: dict[str, dict[str, Any]]) -> str:
    """Return three frames of the model's threads, and one of each helper thread that is not idle."""
    parts = []
    for name, one in found.items():
        is_helper = name.startswith("infinity-")
        frames = one["frames"][: 1 if is_helper else 3]
        if is_helper and not any(frame.startswith(("infinity/", "bench/")) for frame in one["frames"]):
            continue
        parts.append(f"{name.removeprefix('infinity-')} {one['in']}/{one['of']}: {' < '.join(frames)}")
    return "; ".join(parts) or "no samples"


def _sites(result: Result) -> Iterator[str]:
    rows = result.get("gap_sites", [])
    if rows:
        yield "gap seconds, count, median ms, reason, site < callers"
        for row in rows[:SITES]:
            frames = " < ".join([row["site"], *row["callers"]])
            yield f"{row['seconds']:10.5f} {row['count']:6} {row['median_ms']:8.3f}  {row['ended']:7} {frames}"
    elif result.get("host_sites"):
        yield "share of samples, site"
        for row in result["host_sites"][:SITES]:
            yield f"{row['share']:7.1%}  {row['site']}"


def _kernels(result: Result) -> Iterator[str]:
    rows = result.get("kernels", [])
    if rows:
        yield "most time: ms, count, kernel"
    for row in rows:
        yield f"{row['ms']:10.2f} {row['count']:6}  {short(row['name'])}"
