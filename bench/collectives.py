"""Collectives of host memory over gloo: its own beside those of `infinity.comm.pairs`.

    python bench/collectives.py                      # 2 and 4 ranks, about 2 minutes on 2 cores
    python bench/collectives.py --ranks 2 --rounds 5 --name trial
    python bench/collectives.py --only agreement     # keeps the rest of the result

Each round runs every collective after a barrier, in an order that rotates. Wall is the median on rank 0; CPU is that of
its process, the kernel's copies included. "all-to-all" is gloo's, into a copy, and a sum of that in rank order.

"agreement" is `infinity.comm.agreement.announcer` around a collective that does nothing. It is predicted from earlier
ones, or never seen before. A sample is the mean of many.

Writes bench/results/collectives.json, then draws collectives.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
from report.page import load, publish

MEASUREMENTS = ("transfers", "agreement")


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "collectives")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.25, 1, 4, 16, 64], help="MiB of fp32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--agreeing", type=int, nargs="+", default=[2, 4, 8, 16], help="ranks that agree")
    parser.add_argument("--units", type=int, default=100, help="collectives of a sample of agreement")
    parser.add_argument(
        "--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), help="measurements to run (both)"
    )
    return parser.parse_args()


def candidates(rank: int, ranks: int, numel: int) -> dict[tuple[str, str], Callable[[], object]]:
    import torch
    import torch.distributed as dist

    from infinity.comm import communicator
    from infinity.comm.pairs import PairwiseCollectives

    flat, copy, shard = torch.zeros(numel), torch.empty(numel), torch.empty(numel // ranks)
    own = flat.view(ranks, -1)[rank]
    world = dist.group.WORLD
    assert world is not None
    pairs = PairwiseCollectives(world, rank, ranks, sums=shard.nbytes)

    def all_to_all() -> None:
        dist.all_to_all_single(copy, flat)
        parts = copy.view(ranks, -1)
        torch.add(parts[0], parts[1], out=own)
        for part in parts[2:]:
            own.add_(part)

    return {
        ("reduce-scatter", "gloo"): lambda: communicator._reduce_scatter(shard, flat),
        ("reduce-scatter", "all-to-all"): all_to_all,
        ("reduce-scatter", "pairs"): lambda: pairs.reduce_scatter(flat),
        ("all-gather", "gloo"): lambda: communicator._all_gather(flat, own),
        ("all-gather", "pairs"): lambda: pairs.all_gather(flat),
        ("all-reduce", "gloo"): lambda: dist.all_reduce(flat),
        ("all-reduce", "pairs"): lambda: pairs.all_reduce(flat),
    }


def joined(rank: int, ranks: int, folder: str) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)


def agree(rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    """One rank; the first writes what it measured to `folder`."""
    import itertools

    import torch.distributed as dist

    from infinity.comm.agreement.announcements import Announcement, Operation
    from infinity.comm.agreement.announcer import Announcer
    from infinity.comm.groups import duplicate_group

    joined(rank, ranks, folder)
    world = dist.group.WORLD
    assert world is not None
    announcer = Announcer(duplicate_group(world, "gloo"), rank, ranks)
    unseen = itertools.count(args.units)
    samples = []
    for how in ("predicted", "unseen"):
        for number in range(-3, args.rounds):  # the first rounds have no example yet
            units = [next(unseen) for _ in range(args.units)] if how == "unseen" else range(args.units)
            dist.barrier()
            before = announcer.exchanges
            began, spent = time.perf_counter(), time.process_time()
            for unit in units:
                announcer.run(Announcement(Operation.ALL_GATHER, unit), set(), 1, lambda: None)
            seconds, spent = time.perf_counter() - began, time.process_time() - spent
            messages = (announcer.exchanges - before) * (ranks - 1)
            if number >= 0:
                each = {"seconds": seconds, "cpu": spent, "messages": messages}
                means = {key: value / args.units for key, value in each.items()}
                samples.append({"ranks": ranks, "how": how, **means})
    if rank == 0:
        Path(folder, "samples.json").write_text(json.dumps(samples))
    announcer.close()
    dist.destroy_process_group()


def serve(rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    """One rank; the first writes what it measured to `folder`."""
    import torch.distributed as dist

    joined(rank, ranks, folder)
    samples = []
    for size in args.sizes:
        runs = candidates(rank, ranks, int(size * 2**18))
        for number, (what, how) in harness.interleaved(runs, args.rounds, warm_up=1):
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            runs[what, how]()
            seconds, spent = time.perf_counter() - began, time.process_time() - spent
            if number >= 0:
                sample = {"ranks": ranks, "mib": size, "what": what, "how": how, "seconds": seconds, "cpu": spent}
                samples.append(sample)
    if rank == 0:
        Path(folder, "samples.json").write_text(json.dumps(samples))
    dist.destroy_process_group()


def measure(rank: Callable[..., None], ranks: int, args: argparse.Namespace) -> list[harness.Result]:
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(rank, (ranks, args, folder), nprocs=ranks)
        return list(json.loads(Path(folder, "samples.json").read_text()))


def main() -> None:
    args = arguments()
    target = harness.target(args)
    if not args.redraw:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        result = load(target) if set(args.only) < set(MEASUREMENTS) and target.exists() else {}
        head = harness.head("collectives")
        if "transfers" in args.only:
            result |= {**head, "samples": [sample for ranks in args.ranks for sample in measure(serve, ranks, args)]}
        if "agreement" in args.only:
            samples = [sample for ranks in args.agreeing for sample in measure(agree, ranks, args)]
            result = {**head, "samples": [], **result, "agreement": {**head, "samples": samples}}
        harness.write_json(target, result)
    publish(target)


if __name__ == "__main__":
    main()
