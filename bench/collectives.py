"""Collectives of host memory over gloo: its own beside those of `infinity.comm.pairs`.

    python bench/collectives.py                      # 2 and 4 ranks, about 2 minutes on 2 cores
    python bench/collectives.py --ranks 2 --rounds 5 --name trial

Every collective in every round, after a barrier, in an order that rotates. Wall is the median on rank 0; CPU is that of
its process, the kernel's copies included. "all-to-all" is gloo's, into a copy, and a sum of that in rank order. Writes
bench/results/collectives.json and collectives.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Sample = dict[str, Any]
COLLECTIVES = {
    "reduce-scatter": ("gloo", "all-to-all", "pairs"),
    "all-gather": ("gloo", "pairs"),
    "all-reduce": ("gloo", "pairs"),
    "agreement": ("gloo", "pairs"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.25, 1, 4, 16, 64], help="MiB of fp32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--name", default="collectives", help="name of the result files")
    parser.add_argument("--redraw", action="store_true", help="write the table of an earlier run's JSON again")
    return parser.parse_args()


def candidates(rank: int, ranks: int, numel: int) -> dict[tuple[str, str], Callable[[], object]]:
    import torch
    import torch.distributed as dist

    from infinity.comm import collectives
    from infinity.comm.pairs import PairwiseCollectives

    flat, copy, shard = torch.zeros(numel), torch.empty(numel), torch.empty(numel // ranks)
    own = flat.view(ranks, -1)[rank]
    pairs = PairwiseCollectives(dist.group.WORLD, rank, ranks, sums=shard.nbytes)
    words, said = torch.zeros(3, dtype=torch.int64), torch.empty(3 * ranks, dtype=torch.int64)

    def all_to_all() -> None:
        dist.all_to_all_single(copy, flat)
        parts = copy.view(ranks, -1)
        torch.add(parts[0], parts[1], out=own)
        for part in parts[2:]:
            own.add_(part)

    return {
        ("reduce-scatter", "gloo"): lambda: collectives._reduce_scatter(shard, flat),
        ("reduce-scatter", "all-to-all"): all_to_all,
        ("reduce-scatter", "pairs"): lambda: pairs.reduce_scatter(flat),
        ("all-gather", "gloo"): lambda: collectives._all_gather(flat, own),
        ("all-gather", "pairs"): lambda: pairs.all_gather(flat),
        ("all-reduce", "gloo"): lambda: dist.all_reduce(flat),
        ("all-reduce", "pairs"): lambda: pairs.all_reduce(flat),
        ("agreement", "gloo"): lambda: collectives._all_gather(said, words),
        ("agreement", "pairs"): lambda: pairs.all_gather_ints([0, 0, 0]),
    }


def serve(rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    """One rank; the first writes what it measured to `folder`."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/meeting", ranks), rank=rank, world_size=ranks)
    samples: list[Sample] = []
    for size in args.sizes:
        runs = candidates(rank, ranks, int(size * 2**18))
        order = list(runs)
        for number in range(-1, args.rounds):
            turn = number % len(order)
            for what, how in order[turn:] + order[:turn]:
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


def measure(ranks: int, args: argparse.Namespace) -> list[Sample]:
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(serve, (ranks, args, folder), nprocs=ranks)
        return list(json.loads(Path(folder, "samples.json").read_text()))


def table(saved: dict[str, Any]) -> str:
    grouped: dict[tuple[Any, ...], list[Sample]] = {}
    for s in saved["samples"]:
        grouped.setdefault((s["ranks"], s["mib"], s["what"], s["how"]), []).append(s)

    def milliseconds(key: str, *which: Any) -> float:
        return 1e3 * statistics.median(s[key] for s in grouped[which])

    lines = [
        "# Collectives of host memory over gloo",
        "",
        f"`{saved['command']}` on {saved['machine']}, all ranks on one machine, over the loopback device. Milliseconds "
        "of wall time / of rank 0's CPU, medians. pairs: `infinity.comm.pairs`, which training on gloo takes. Sizes "
        "are those of the whole tensor; an agreement, which comes before every collective, is a few integers from each "
        "rank, whatever the size.",
        "",
    ]
    for ranks in dict.fromkeys(s["ranks"] for s in saved["samples"]):
        columns = [(what, how) for what, hows in COLLECTIVES.items() for how in hows]
        lines += [f"## {ranks} ranks", "", "| MiB | " + " | ".join(f"{what}, {how}" for what, how in columns) + " |"]
        lines += ["|---|" + "---|" * len(columns)]
        for mib in dict.fromkeys(s["mib"] for s in saved["samples"] if s["ranks"] == ranks):
            cells = [
                f"{milliseconds('seconds', ranks, mib, *column):.2f} / {milliseconds('cpu', ranks, mib, *column):.2f}"
                for column in columns
            ]
            lines.append(f"| {mib:g} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    args = arguments()
    target = RESULTS / f"{args.name}.json"
    if args.redraw:
        saved = json.loads(target.read_text())
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        cores = len(os.sched_getaffinity(0))
        saved = {
            "command": f"python bench/collectives.py {' '.join(sys.argv[1:])}".strip(),
            "machine": f"Linux {platform.release()}, {processor()}, {cores} cores, torch {version('torch')}",
            "samples": [sample for ranks in args.ranks for sample in measure(ranks, args)],
        }
        target.write_text(json.dumps(saved, indent=1) + "\n")
    text = table(saved)
    (RESULTS / f"{args.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
