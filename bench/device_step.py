"""Time and memory of a GPT-2 training step on one device in every placement, beside plain PyTorch and FSDP2 with CPU
offload.

    python bench/device_step.py --size 350m --output gpt2-350m.json
    python bench/device_step.py --size 1.3b --kinds plain cpu --clips 0 --bandwidths bandwidths.json
    python bench/device_step.py --size tiny            # on a CPU, too

All train in bf16 with fp32 masters, without and with clipping, each in a process of its own. The file is written after
each of them. A later run with the same package, size, steps and moments adds kinds that are missing or failed. Exit
status 1 if one failed. A placement that needs more space than the drive has is left out, and is no failure. `waited`:
seconds of a step for which compute stood still, waiting for the engine. `waits`: their reasons, a mean over the counted
steps.

The bound of a step is the longest of plain PyTorch's step and, for each link, the bytes that the engine moves over the
bandwidth that `infinity bench-links --out bandwidths.json` measured: to the device, from it, to and from the drive, and
those that the optimizer reads and writes in host memory.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import check
import harness
import training
from zero_contenders import Contender, InfinityLoop, make_loop

SIZES = {
    "tiny": {"hidden": 32, "layers": 2, "heads": 2, "vocab": 64, "sequence": 16, "batch": 2},
    "350m": {"hidden": 1024, "layers": 24, "heads": 16, "vocab": 50304, "sequence": 1024, "batch": 8},
    "1.3b": {"hidden": 2048, "layers": 24, "heads": 16, "vocab": 50304, "sequence": 1024, "batch": 8},
}
KINDS = {
    "plain": Contender("plain PyTorch, fused AdamW", "plain", 0),
    "fsdp2 cpu": Contender("FSDP2, CPUOffloadPolicy", "fsdp2", 3, "cpu", "cpu"),
    "none": Contender("Infinity, all on the device", "infinity", 3),
    "optimizer on cpu": Contender("Infinity, optimizer on cpu", "infinity", 3, "none", "cpu"),
    "cpu": Contender("Infinity, all on cpu", "infinity", 3, "cpu", "cpu"),
    "optimizer on nvme": Contender("Infinity, optimizer on nvme", "infinity", 3, "cpu", "nvme"),
    "nvme": Contender("Infinity, all on nvme", "infinity", 3, "nvme", "nvme"),
}
CLIPS = (0.0, 1.0)
WARM_UP = 2
LINKS = ("host_to_device", "device_to_host", "memory")
DRIVE = ("nvme_read", "nvme_write")
"""Keys of `infinity bench-links`, bytes a second each. Reads and writes of a drive take turns, so their times add."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--steps", type=int, default=4, help=f"counted steps, after {WARM_UP} that warm up (4)")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write, and to continue")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--clips", nargs="+", type=float, default=CLIPS, metavar="NORM", help="0: no clipping (0 1)")
    parser.add_argument("--moments", choices=("fp32", "bf16", "8bit"), default="fp32", help="Infinity's moments (fp32)")
    parser.add_argument("--seconds", type=int, default=120, help="seconds after which a run is stopped (120)")
    parser.add_argument("--bandwidths", type=Path, metavar="FILE", help="JSON of infinity bench-links, for the bound")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.ranks, args.dtype, args.prefetch = 1, "bf16", "auto"
    vars(args).update(SIZES[args.size])
    return args


def run(args: argparse.Namespace, what: str) -> harness.Result:
    """Train one kind in this process."""
    import torch
    import torch.distributed as dist

    from infinity.errors import OutOfSpaceError

    faulthandler.enable()
    logging.getLogger("infinity").setLevel(logging.WARNING)
    kind, _, clip = what.partition(", clip ")
    found = torch.accelerator.current_accelerator(check_available=True)
    args.device, args.clip = found.type if found is not None else "cpu", float(clip)
    contender = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        if contender.kind == "fsdp2":  # clipping adds norms of shards in host memory, hence both backends
            backend = "gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            loop, batch = make_loop(args, contender), training.random_batches(args)
        except OutOfSpaceError as error:
            return {"left_out": str(error)}
        seconds: list[float] = []
        counted: list[dict[str, float]] = []
        waits_before: dict[str, Any] = {}
        for _ in range(args.steps + WARM_UP):
            tokens, targets = (part.to(args.device) for part in batch())
            if len(seconds) == WARM_UP:
                waits_before = _waits(loop)
            before, began = _counters(loop), time.perf_counter()
            loss = float(loop.step(tokens, targets))
            seconds.append(time.perf_counter() - began)
            counted.append({name: after - before[name] for name, after in _counters(loop).items()})
        result = {
            "loss": loss,
            "seconds": harness.spread(seconds[WARM_UP:]).median,
            "step_seconds": seconds,
            "waited": harness.median(counted[WARM_UP:], "waited") if isinstance(loop, InfinityLoop) else None,
            "moved": {link: harness.median(counted[WARM_UP:], link) for link in (*LINKS, *DRIVE) if link in counted[0]},
            "waits": mean_waits(waits_before, _waits(loop), args.steps),
            "host_peak_bytes": harness.peak_rss(),
            "device_peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else 0,
        }
        if isinstance(loop, InfinityLoop):
            loop.engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return result | {"tokens_per_second": args.batch * args.sequence / result["seconds"]}


def _counters(loop: Any) -> dict[str, float]:
    """Return the seconds waited and the bytes moved so far."""
    if not isinstance(loop, InfinityLoop):
        return {}
    from infinity.plan.placement import State

    now, policy = loop.engine.ledger.snapshot(), loop.engine.parts.plan.policy
    found = {"waited": now.wait_seconds, "device_to_host": float(getattr(loop.device, "from_device", 0))}
    found["host_to_device"] = float(getattr(loop.device, "to_device", 0))
    found |= {"nvme_read": float(now.nvme_bytes_read), "nvme_write": float(now.nvme_bytes_written)}
    if policy.tier_of(State.OPTIM) != "device":  # its records and the parameters are read and written, gradients read
        record = policy.states(loop.engine.units[0].layout).bytes_per_element
        found["memory"] = (2 * (record + 2) + 2) * now.updated_elements
    return found


def _waits(loop: Any) -> dict[str, Any]:
    """Return the waits so far; none of plain PyTorch, and of packages that did not count them by reason."""
    count = getattr(loop.engine.ledger, "waits", dict) if isinstance(loop, InfinityLoop) else dict
    return {reason: dict(vars(one)) for reason, one in count().items()}


def mean_waits(before: Mapping[str, Any], after: Mapping[str, Any], steps: int) -> dict[str, dict[str, float]]:
    """Return reason → count, seconds slept and stood still of a step, in the mean of the steps between two readings."""
    return {
        reason: {name: (value - before.get(reason, {}).get(name, 0)) / steps for name, value in one.items()}
        for reason, one in after.items()
        if one != before.get(reason)
    }


def child(what: str, seconds: int = 120) -> harness.Result:
    """Train one kind in a process of its own, which ends after `seconds`; {"error": reason} if that fails."""
    try:
        # In the foreground, so that a signal to this process's group ends it too.
        limit = ["timeout", "--foreground", "--signal", "ABRT", "--kill-after", "10", str(seconds)]
        return harness.run_child(__file__, [*sys.argv[1:], "--only", what], before=limit)
    except SystemExit as error:
        return {"error": failure(error)}


def failure(error: SystemExit) -> str:
    """Return how a child ended, without its command."""
    return str(error.code).partition(" ended with ")[2] or "failed"


def bound(runs: Mapping[str, harness.Result], what: str, rates: Mapping[str, Any]) -> float | None:
    """Return the least seconds of Infinity's step: of plain PyTorch's, and of the bytes of each link over its rate.

    None if plain's step or a rate was not measured.
    """
    moved = runs[what].get("moved")
    plain = runs.get(f"plain, clip {what.rpartition(' ')[2]}", {}).get("seconds")
    used = {link: nbytes for link, nbytes in (moved or {}).items() if nbytes}
    if moved is None or plain is None or any(rates.get(link) is None for link in used):
        return None
    seconds = {link: nbytes / rates[link] for link, nbytes in used.items()}
    drive = sum(seconds.pop(link, 0.0) for link in DRIVE)
    return float(max([plain, drive, *seconds.values()]))


def shown(run: Mapping[str, Any]) -> str:
    """Return a line about one kind."""
    if "left_out" in run:
        return f"left out: {run['left_out']}"
    if "error" in run:
        return str(run["error"])
    text = f"{run['seconds']:.4g} s a step, loss {run['loss']:.4f}"
    return text + (f", bound {run['bound']:.4g} s" if run["bound"] else "")


def package() -> str:
    """Return a hash of the files of the installed package."""
    spec = find_spec("infinity")
    assert spec is not None and spec.origin is not None
    total = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.rglob("*")):
        if path.suffix in (".py", ".so"):
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


def figures(result: harness.Result) -> dict[str, float]:
    """Return the figures that `bench/limits.json` is about."""
    runs = {what: one for what, one in result["runs"].items() if "seconds" in one}
    found = {f"{result['size']}, {what}: step ÷ bound": one["seconds"] / one["bound"]
             for what, one in runs.items() if one.get("bound")}  # fmt: skip
    for clip in (f", clip {clip:g}" for clip in CLIPS):
        if {f"plain{clip}", f"none{clip}"} <= set(runs):
            ratio = runs[f"plain{clip}"]["seconds"] / runs[f"none{clip}"]["seconds"]
            found[f"{result['size']}, none{clip}: plain ÷ ours"] = ratio
    return found


def main() -> int:
    args = parse()
    if args.only:
        print(json.dumps(run(args, args.only)))
        return 0
    result = {**harness.head("device_step", path=args.nvme_path), "size": args.size, "steps": args.steps}
    result |= {"package": package(), "moments": args.moments}
    before = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    same = all(before.get(key) == result[key] for key in ("size", "steps", "package", "moments"))
    rates = json.loads(args.bandwidths.read_text()) if args.bandwidths and args.bandwidths.exists() else {}
    runs = {what: one for what, one in before.get("runs", {}).items() if same and "seconds" in one}
    result["runs"] = runs
    for what in [f"{kind}, clip {clip:g}" for clip in args.clips for kind in args.kinds]:
        if what not in runs:
            runs[what] = child(what, args.seconds)
        runs[what]["bound"] = bound(runs, what, rates)
        if args.output:
            harness.write_json(args.output, result)
        print(f"{args.size}, {what}: {shown(runs[what])}", flush=True)
    limits = json.loads(check.LIMITS.read_text(encoding="utf-8"))["device_step"]
    for one in check.verdicts(limits, figures(result)):
        print(f"{'met   ' if one.met else 'MISSED'}  {one.text}")
    return int(any("error" in one for one in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
