"""Summary of a call on about one screen, and tarball of its logs and figures. Both are replaced after each step."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gpu_kit import predictions
from gpu_kit.steps import Outcome

LAST_LINES = 3
"""Lines of a failed step's output that the summary shows."""
SITES = 5
"""Lines of Python that the summary shows for a trace."""
WIDTH = 118
LARGEST = 15 << 20
"""Bytes of a file in the tarball, and of the tarball. The middle of a larger file is cut, with a line that says so. The
largest files are left out until the tarball is small enough: as a whole it might not be accepted.
"""


def figures_of(folder: Path) -> dict[str, Any]:
    """Return the results in a folder, by the names of their files without suffix. Broken files are left out."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return found


def page(call: str, outcomes: Sequence[Outcome], figures: Mapping[str, Any], folder: Path) -> str:
    """Return the summary."""
    parts = [f"# {call}: {verdict(outcomes)}", *_machine(figures), "", *_steps(outcomes), *_failures(outcomes, folder)]
    measured = [row for row in predictions.rows(figures) if row[2]]
    if measured:
        parts += ["", "measured (expected):"]
        parts += [f"  {quantity}: {value} ({expected})" for quantity, expected, value in measured]
    parts += _kinds(figures)
    for name in ("10b-bf16", "10b-fp16", "2.7b-bf16", "2.7b-fp16"):
        parts += _large(name, figures.get(name, {}))
    parts += _trace(figures.get("trace", {}))
    parts += _fix(figures.get("fix", {}))
    return "\n".join(line[:WIDTH] for line in parts) + "\n"


def verdict(outcomes: Sequence[Outcome]) -> str:
    failed = [one.step for one in outcomes if one.failed]
    missing = [one.step for one in outcomes if one.what == "not run"]
    running = [one.step for one in outcomes if one.what == "running"]
    if running:  # the call was cut off, or goes on
        found = f"unfinished: {running[0]} is running"
        return f"{found}; FAILED: {', '.join(failed)}" if failed else found
    if failed:
        return f"FAILED: {', '.join(failed)}"
    return f"passed; not run: {', '.join(missing)}" if missing else "passed"


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a step failed or none was tried, 3 if none failed and some could not run, else 0."""
    if not outcomes or any(one.failed for one in outcomes):
        return 1
    return 3 if any(one.what == "not run" for one in outcomes) else 0


def _machine(figures: Mapping[str, Any]) -> Iterator[str]:
    facts = figures.get("facts")
    if not facts:
        return
    gpu, packages = facts.get("gpu") or {}, facts.get("packages") or {}
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "numpy") if name in packages)
    link = f"PCIe {gpu.get('pcie.link.gen.max')} x{gpu.get('pcie.link.width.max')}" if gpu else "no GPU"
    versions = f"Python {facts.get('python')}, {versions}"
    yield f"{gpu.get('name', 'a machine')}, {link}; {facts.get('cores')} cores; {versions}"
    memory = [one for one in facts.get("memory", []) if "MemTotal" in one]
    if memory:
        first, last = memory[0], memory[-1]
        text = f"memory: {first['MemTotal']} GiB, {first['MemAvailable']} available at first"
        rates = [one["GB/s"] for one in memory if "GB/s" in one]
        if rates:
            most = max(one.get("touched", 0) for one in memory)
            text += f"; {last['MemTotal']} after {most} GiB were written, at {median(rates):.1f} GB/s"
        yield text
    if disk := facts.get("nvme folder"):
        yield f"NVMe folder: {disk['type']} on {disk['source']}, {disk['free GB']} of {disk['GB']} GB free"


def _steps(outcomes: Sequence[Outcome]) -> Iterator[str]:
    before = ""
    for one in outcomes:
        why = "as above" if one.why and one.why == before else one.why
        before = one.why or before
        yield f"  {one.step:18} {one.what:24} {one.seconds:4.0f} s  {why}".rstrip()


def _failures(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    for one in outcomes:
        log = folder / f"{one.step}.txt"
        if one.failed and log.exists():
            text = [line for line in _ends(log, 1 << 16).decode(errors="replace").splitlines() if line.strip()]
            yield from ("", f"{one.step}, the last lines:", *(f"  {line}" for line in text[-LAST_LINES:]))


def _kinds(figures: Mapping[str, Any]) -> Iterator[str]:
    for name, result in figures.items():
        if result.get("bench") != "device_step":
            continue
        yield from ("", f"{name}, {result.get('moments')} moments:")
        for kind, run in result.get("runs", {}).items():
            if "seconds" not in run:
                yield f"  {kind:28} {run.get('error') or run.get('left_out')}"
                continue
            waited = "" if run.get("waited") is None else f", idle for the engine {run['waited']:.3f}"
            bound = f", bound {run['bound']:.3f}" if run.get("bound") else ""
            peaks = f"{run['device_peak_bytes'] / 1e9:.1f} GB device, {run['host_peak_bytes'] / 1e9:.1f} host"
            yield f"  {kind:28} {run['seconds']:.3f} s{waited}{bound}; loss {run['loss']:.4f}; {peaks}"


def _large(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    steps = result.get("steps", [])
    if not steps:
        return
    resident, last = result.get("resident_tflops"), steps[-1]
    built = result.get("construction_seconds", 0.0)
    yield from ("", f"{name}: constructed in {built:.0f} s, resident {resident or 0:.0f} TFLOP/s")
    for step in steps:
        share = f", {100 * step['recomputing_tflops'] / resident:.0f} % of resident" if resident else ""
        yield (
            f"  step {step['step']}: loss {step['loss']:.4f}, {step['seconds']:.2f} s, {step['tokens_per_second']:.0f} "
            f"tokens/s, {step['model_tflops']:.0f} TFLOP/s{share}"
        )
    peaks = f"{last['device_peak_bytes'] / 1e9:.1f} GB device, {last['host_peak_bytes'] / 1e9:.1f} GB host"
    idle = ", ".join(
        f"{reason} {one['stood_still']:.3f}" for reason, one in last["waits"].items() if one["stood_still"] >= 0.0005
    )
    for lane in ("reduce", "device_to_host", "host_to_device", "update"):
        if one := result.get("lanes", {}).get(lane):
            rate = f"{(one['bytes_per_second'] or 0.0) / 1e9:.1f} GB/s"
            yield f"  {lane}: busy {one['busy_seconds']:.2f} s, exposed {one['exposed_seconds']:.2f}, {rate}"
    yield f"  peaks {peaks}; Adam {last['update_seconds']:.2f} s; idle for {idle or 'nothing'}"


def _trace(result: Mapping[str, Any]) -> Iterator[str]:
    shares = result.get("shares")
    if not shares:
        return
    total = shares[-1]
    names = ("kernels", "to device", "from device", "nothing")
    shown = ", ".join(f"{name} {100 * total[name]:.0f} %" for name in names if name in total)
    yield from ("", f"trace, share of the steps: {shown}; gaps by line (trace.txt has more):")
    for one in result.get("gap_sites", [])[:SITES]:
        yield f"  {one.get('seconds', 0):.4f} s in {one.get('count')}: {one.get('site')}"


def _fix(result: Mapping[str, Any]) -> Iterator[str]:
    if result.get("lines"):
        yield from ("", "before and after:", *(f"  {line}" for line in result["lines"]))


def leave_files(results: Path, call: str, text: str, folder: Path) -> None:
    """Replace CALL.md and CALL.tar.gz in `results`. The tarball has the summary and all files of `folder`."""
    results.mkdir(parents=True, exist_ok=True)
    _replace(results / f"{call}.md", text.encode())
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[f"{call}/{path.relative_to(folder)}"] = _ends(path, LARGEST)
    notes = {f"{call}/summary.md": text.encode()}
    while len(packed := _packed(notes | files)) > LARGEST and files:
        # The one that takes most of the tarball: a larger text packs better.
        largest = max(files, key=lambda name: len(zlib.compress(files[name], 1)))
        del files[largest]
        notes[f"{call}/left_out.txt"] = notes.get(f"{call}/left_out.txt", b"") + f"{largest}\n".encode()
    _replace(results / f"{call}.tar.gz", packed)


def _packed(contents: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        for name, content in contents.items():
            _add(tar, name, content)
    return packed.getvalue()


def _ends(path: Path, most: int) -> bytes:
    """Return a file; of one with more than `most` bytes, its beginning and its end."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= most:
            return file.read(most)
        first = file.read(most // 2)
        file.seek(size - most // 2)
        return first + f"\n[cut: the file has {size} bytes]\n".encode() + file.read(most // 2)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
