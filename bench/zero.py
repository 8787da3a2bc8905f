"""A data-parallel training step beside torch's own: DistributedDataParallel and FSDP2, on gloo ranks on the CPU.

    python bench/zero.py                                   # 2 ranks, fp32: about 8 minutes on 2 cores
    python bench/zero.py --dtype bf16 --name zero_bf16
    python bench/zero.py --only "infinity stage 3" fsdp2 --rounds 3 --name trial

All train the same GPT-2 from the same values on the same batches, each rank on its own part, with AdamW; that their
losses agree is checked. Every contender has rank processes of its own, which live as long as the run does, since peak
memory belongs to a process and starting one costs seconds. They take turns, round by round, in an order that rotates,
and the others sleep meanwhile: compare medians, and ratios, which are medians of the ratios within a round. A turn is
a step that warms up and then `--steps` counted ones, timed from a barrier.

fp32: everything. bf16: the model computes in bf16 and an fp32 master is updated (FSDP2: param_dtype bf16; DDP: masters
beside the model; Infinity: its 16-bit remainders); gradients are reduced in fp32, but by DDP, which reduces the
model's own. torch's AdamW is the fused one, FSDP2 wraps block by block and then the root.

"On the wire" is what the kernel counted on the loopback device, headers included, so let nothing else use it. Theory:
an all-gather or a reduce-scatter of a tensor moves (n - 1) / n of its bytes from each of n ranks, an all-reduce twice
that. Writes bench/results/zero.json, then draws zero.md and zero.png from
it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import training
from report.page import publish
from zero_contenders import CONTENDERS, make_loop

LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
AGREE = {"fp32": 1e-4, "bf16": 1e-2}  # relative: of losses after equally many steps
Sample = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "zero")
    training.add_shape(parser, hidden=512, layers=8, heads=8, vocab=8192, sequence=128, batch=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=list(AGREE), default="fp32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a turn")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads in a rank; 0: processors / ranks")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.set_defaults(device="cpu", clip=0.0)
    return parser.parse_args()


def torch_threads(args: argparse.Namespace) -> int:
    return int(args.threads or max(1, harness.cores() // args.ranks))


# -- what runs in a rank -----------------------------------------------------------------------------------------------


def serve(rank: int, name: str, args: argparse.Namespace, meeting: str, pipe: Connection) -> None:
    """One rank of one contender: answers each number of steps with the time they took."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else threads spin on the processors of whoever is next
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    logging.getLogger("infinity").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(torch_threads(args))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.ranks)
    runner = make_loop(args, CONTENDERS[name])
    batch = training.random_batches(args, seed=1 + rank)

    def step() -> float:
        return float(runner.step(*batch()))

    pipe.send(runner.facts())
    while True:
        try:
            steps = pipe.recv()
        except EOFError:
            return
        losses = [step()]
        dist.barrier()
        before = runner.traffic()
        began, spent = time.perf_counter(), time.process_time()
        losses += [step() for _ in range(steps)]
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        moved = {key: (value - before[key]) / steps for key, value in runner.traffic().items()}
        time.sleep(0.3)  # what is under way beside the model belongs to this turn's bytes
        dist.barrier()
        answer = {"seconds": seconds / steps, "cpu_seconds": spent / steps, "losses": losses, "traffic": moved}
        pipe.send(answer | {"peak_rss": harness.peak_rss()})


# -- the rounds --------------------------------------------------------------------------------------------------------


class Communicator:
    """The rank processes of one contender."""

    def __init__(self, name: str, args: argparse.Namespace, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = os.path.join(folder, f"{args.only.index(name)}")
        self.name = name
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(args.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, name, args, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.facts = self._answers()[0]

    def _answers(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            raise SystemExit(f"a rank of {self.name} ended; its error is above") from None

    def turn(self, steps: int) -> Sample:
        before = int(LOOPBACK.read_text())
        for pipe in self._pipes:
            pipe.send(steps)
        answers = self._answers()
        wire = (int(LOOPBACK.read_text()) - before) / len(answers) / (steps + 1)
        return {
            "name": self.name,
            "seconds": answers[0]["seconds"],
            "cpu_seconds": statistics.mean(answer["cpu_seconds"] for answer in answers),
            "losses": answers[0]["losses"],
            "traffic": answers[0]["traffic"],
            "wire": wire,
            "peak_rss": max(answer["peak_rss"] for answer in answers),
        }

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


def measure(args: argparse.Namespace) -> tuple[list[Sample], dict[str, Any]]:
    """Samples of all turns, and what each contender knows of its tensors. One round first, to warm up."""
    groups: list[Communicator] = []
    samples = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in args.only:
                groups.append(Communicator(name, args, folder))
                print(f"{name}: ready", file=sys.stderr, flush=True)
        for number, group in harness.interleaved(groups, args.rounds, warm_up=1):
            sample = {"round": number, **group.turn(args.steps)}
            print(f"round {number + 1}/{args.rounds}  {group.name:30} {sample['seconds'] * 1e3:.0f} ms a step",
                  file=sys.stderr, flush=True)  # fmt: skip
            if number >= 0:
                samples.append(sample)
        return samples, {group.name: group.facts for group in groups}
    finally:
        for group in groups:
            group.stop()


# -- the result --------------------------------------------------------------------------------------------------------


def check_losses(args: argparse.Namespace, samples: list[Sample]) -> float:
    """The largest relative difference of losses after equally many steps; ends the run if it is too large."""
    runs: dict[str, list[float]] = {}
    for sample in sorted(samples, key=lambda sample: sample["round"]):
        runs.setdefault(sample["name"], []).extend(sample["losses"])
    apart = harness.apart(runs.values())
    if apart > AGREE[args.dtype]:
        raise SystemExit(f"losses differ by {apart:.1e}: not all contenders train the same. {runs}")
    return apart


def parameters(args: argparse.Namespace) -> int:
    return training.config_of(args).num_parameters


def main() -> None:
    args = arguments()
    target = harness.target(args)
    if not args.redraw:
        samples, facts = measure(args)
        result = {
            **harness.head("zero"),
            "threads": torch_threads(args),
            "parameters": parameters(args),
            "apart": check_losses(args, samples),
            "args": {key: value for key, value in vars(args).items() if key not in ("name", "results", "redraw")},
            "facts": facts,
            "samples": samples,
        }
        harness.write_json(target, result)
    publish(target)


if __name__ == "__main__":
    main()
