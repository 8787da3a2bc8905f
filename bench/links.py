"""Copy bandwidth between host memory and a device, in both directions, and the cost of registering host memory.

    python bench/links.py                        # copies of 1 GiB; less than a minute
    python bench/links.py --size 4MiB 64MiB 256MiB
    python bench/links.py --output links.json    # into a file, too

`registered` is memory of `host_tensor(pin=True)`, `pageable` is unregistered, `both` copies in both directions at once,
and `device.copy` is the engine's copy, which `infinity bench-links` measures. Bandwidths are medians, of the bytes of
all directions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import check
import harness
from infinity.cli.links.rates import Copies
from infinity.sizes import format_size, parse_size
from infinity.tiers.accelerator import default_device
from infinity.tiers.device import Device
from infinity.tiers.memory import first_touch, host_tensor

CALLS = 4
"""Least number of copies of a turn."""
TURN = 256 << 20
"""Bytes of a turn of small copies, so that its synchronisation does not count."""


def candidates(device: Device, nbytes: int) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Return name → (bytes of a copy, call that issues a number of copies)."""
    engine = [Copies(device, nbytes) for _ in range(2)]
    there = [one.on_device for one in engine]
    registered = [one.host for one in engine]
    pageable = host_tensor(nbytes)
    first_touch(pageable)
    streams = [_stream(device) for _ in range(2)]

    def bare(calls: int, number: int, destination: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(calls):
            with streams[number]():
                destination.copy_(source, non_blocking=True)

    def both(calls: int) -> None:
        for _ in range(calls):
            bare(1, 0, there[0], registered[0])
            bare(1, 1, registered[1], there[1])

    return {
        "to device, registered": (nbytes, lambda calls: bare(calls, 0, there[0], registered[0])),
        "from device, registered": (nbytes, lambda calls: bare(calls, 1, registered[1], there[1])),
        "both, registered": (2 * nbytes, both),
        "to device, pageable": (nbytes, lambda calls: bare(calls, 0, there[0], pageable)),
        "from device, pageable": (nbytes, lambda calls: bare(calls, 1, pageable, there[1])),
        "to device, device.copy": (nbytes, engine[0].to_device),
        "from device, device.copy": (nbytes, engine[1].to_host),
    }


def _stream(device: Device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that enters a new stream of the device."""
    if device.torch_device.type == "cpu":
        return nullcontext
    library = torch.get_device_module(device.torch_device)
    stream = library.Stream(device.torch_device)
    return lambda: library.stream(stream)


def copies(device: Device, nbytes: int, rounds: int) -> list[harness.Result]:
    """Return the seconds of a call of each candidate, in the order of rounds. One round first, to warm up."""
    found, calls = candidates(device, nbytes), max(CALLS, TURN // nbytes)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for number, name in harness.interleaved(found, rounds, warm_up=1):
        _synchronize(device)
        began = time.perf_counter()
        found[name][1](calls)
        _synchronize(device)
        if number >= 0:
            seconds[name].append((time.perf_counter() - began) / calls)
    size = format_size(nbytes)
    return [
        {"name": name, "size": size, "bytes": moved, "seconds": seconds[name]} for name, (moved, _) in found.items()
    ]


def _synchronize(device: Device) -> None:
    if device.torch_device.type != "cpu":
        torch.accelerator.synchronize(device.torch_device)


def register_seconds_per_gb(nbytes: int, rounds: int) -> float:
    """Return the seconds that registration adds to mapping and touching a GB. Without CUDA, about 0."""

    def seconds(pin: bool) -> float:
        began = time.perf_counter()
        memory = host_tensor(nbytes, pin=pin)
        if not pin:
            first_touch(memory)
        return time.perf_counter() - began

    pin = torch.cuda.is_available()
    return harness.spread((seconds(pin) - seconds(False)) / nbytes * 1e9 for _ in range(rounds)).median


def measure(device: Device, sizes: Sequence[int], rounds: int) -> harness.Result:
    return {
        **harness.head("links"),
        "device": str(device.torch_device),
        "copies": [one for nbytes in sizes for one in copies(device, nbytes, rounds)],
        "register_seconds_per_gb": register_seconds_per_gb(max(sizes), rounds),
    }


def figures(result: harness.Result) -> dict[str, float]:
    """Return the figures that `bench/limits.json` is about."""
    seconds = {(one["size"], one["name"]): one["seconds"] for one in result["copies"]}
    pairs = {
        f"{way}, {size}": (seconds[size, f"{way}, registered"], seconds[size, f"{way}, device.copy"])
        for size in dict.fromkeys(size for size, _ in seconds)
        for way in ("to device", "from device")
    }
    return {f"{name}: device.copy ÷ bare": harness.median_ratio(*pair) for name, pair in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, nargs="+", default=[1 << 30], help="bytes of a copy (1GiB)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (7)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a JSON file for what was measured")
    args = parser.parse_args()
    device = default_device()
    if device.torch_device.type == "cpu":
        raise SystemExit("there is nothing to measure: there is no accelerator here")
    result = measure(device, args.size, args.rounds)
    for one in result["copies"]:
        rate = one["bytes"] / harness.spread(one["seconds"]).median / 1e9
        print(f"{one['name']:26}  {one['size']:>7}  {rate:6.1f} GB/s")
    print(f"registration: {result['register_seconds_per_gb']:.3f} s/GB")
    for verdict in check.verdicts(json.loads(check.LIMITS.read_text(encoding="utf-8"))["links"], figures(result)):
        print(f"{'met   ' if verdict.met else 'MISSED'}  {verdict.text}")
    if args.output is not None:
        harness.write_json(args.output, result)


if __name__ == "__main__":
    main()
