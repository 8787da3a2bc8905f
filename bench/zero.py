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
that. Writes bench/results/zero.json, zero.md and zero.png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
AGREE = {"fp32": 1e-4, "bf16": 1e-2}  # relative: of losses after equally many steps
Sample = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """What takes part. against: the peer that its time is held against; allowed: the most it is to take of that; 0: no
    aim."""

    title: str
    kind: str
    stage: int
    offload: bool = False
    prefetch: str | int = "auto"
    against: str = ""
    allowed: float = 1.05


CONTENDERS = {
    "ddp": Contender("DistributedDataParallel", "ddp", 0),
    "fsdp2 kept": Contender("FSDP2, reshard_after_forward=False", "fsdp2", 2),
    "fsdp2": Contender("FSDP2", "fsdp2", 3),
    "fsdp2 cpu": Contender("FSDP2, CPUOffloadPolicy", "fsdp2", 3, offload=True),
    "infinity stage 0": Contender("Infinity, stage 0", "infinity", 0, against="ddp", allowed=0.0),
    "infinity stage 1": Contender("Infinity, stage 1", "infinity", 1, against="fsdp2 kept"),
    "infinity stage 2": Contender("Infinity, stage 2", "infinity", 2, against="fsdp2 kept"),
    "infinity stage 3": Contender("Infinity, stage 3", "infinity", 3, against="fsdp2"),
    "infinity stage 3, no prefetch": Contender(
        "Infinity, stage 3, prefetch_bytes 0", "infinity", 3, prefetch=0, against="fsdp2"
    ),
    "infinity stage 3 cpu": Contender(
        "Infinity, stage 3, all on cpu", "infinity", 3, offload=True, against="fsdp2 cpu", allowed=1.0
    ),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=list(AGREE), default="fp32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a turn")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads in a rank; 0: processors / ranks")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--name", default="zero", help="name of the result files")
    parser.add_argument("--redraw", action="store_true", help="write table and plot of an earlier run's JSON again")
    return parser.parse_args()


# -- what runs in a rank -----------------------------------------------------------------------------------------------


def shape(args: argparse.Namespace) -> Any:
    from infinity.gpt2.model import GPT2Config

    return GPT2Config(
        vocab_size=args.vocab,
        seq_length=args.sequence,
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
    )


def make_model(args: argparse.Namespace) -> Any:
    import torch

    from infinity.gpt2.model import GPT2

    torch.manual_seed(0)
    return GPT2(shape(args))


class Peer:
    """torch's own: `step(tokens, targets)` gives the loss."""

    def __init__(self, args: argparse.Namespace, contender: Contender) -> None:
        import torch

        self.model = make_model(args)
        self.masters: list[Any] = []
        low = args.dtype == "bf16"
        if contender.kind == "ddp":
            if low:
                self.masters = [p.detach().clone().requires_grad_() for p in self.model.parameters()]
                self.model.bfloat16()
            self.run = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        else:
            self._shard(args, contender, low)
            self.run = self.model
        trained = self.masters or list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01, fused=True)

    def _shard(self, args: argparse.Namespace, contender: Contender, low: bool) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (args.ranks,))}
        if contender.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if low:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        kept = contender.stage < 3
        for block in self.model.h:
            fully_shard(block, reshard_after_forward=not kept, **options)
        fully_shard(self.model, **(options | ({"reshard_after_forward": False} if kept else {})))

    def step(self, tokens: Any, targets: Any) -> Any:
        loss = self.run(tokens, targets)
        loss.backward()
        if self.masters:
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                master.grad = parameter.grad.float()
        self.optimizer.step()
        if self.masters:
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.data.copy_(master.data)
                parameter.grad = None
        self.optimizer.zero_grad()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return {}

    def facts(self) -> dict[str, int]:
        """Nothing is known of its tensors."""
        return {}


class Ours:
    """Infinity: the same."""

    def __init__(self, args: argparse.Namespace, contender: Contender) -> None:
        import infinity

        offload = {"device": "cpu" if contender.offload else "none"}
        config = {
            "train_micro_batch_size_per_gpu": args.batch,
            "bf16": {"enabled": args.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": contender.stage,
                "offload_param": offload if contender.stage == 3 else {"device": "none"},
                "offload_optimizer": offload,
            },
            "infinity": {"prefetch_bytes": contender.prefetch},
        }
        self.engine, *_ = infinity.initialize(model=make_model(args), config=config)

    def step(self, tokens: Any, targets: Any) -> Any:
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return dict(vars(self.engine.ranks.traffic))

    def facts(self) -> dict[str, int]:
        """Units, and elements of their flat tensors, padding included."""
        return {"units": len(self.engine.units), "numel": sum(unit.layout.numel for unit in self.engine.units)}


def torch_threads(args: argparse.Namespace) -> int:
    return args.threads or max(1, cores() // args.ranks)


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
    dist.init_process_group("gloo", store=dist.FileStore(meeting, args.ranks), rank=rank, world_size=args.ranks)
    contender = CONTENDERS[name]
    runner: Peer | Ours = (Ours if contender.kind == "infinity" else Peer)(args, contender)
    generator = torch.Generator().manual_seed(1 + rank)

    def step() -> float:
        tokens = torch.randint(0, args.vocab, (args.batch, args.sequence + 1), generator=generator)
        return float(runner.step(tokens[:, :-1], tokens[:, 1:]))

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
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pipe.send(
            {
                "seconds": seconds / steps,
                "cpu_seconds": spent / steps,
                "losses": losses,
                "traffic": moved,
                "peak_rss": peak,
            }
        )


# -- the rounds --------------------------------------------------------------------------------------------------------


class Communicator:
    """The rank processes of one contender."""

    def __init__(self, name: str, args: argparse.Namespace, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = os.path.join(folder, f"{name} meets")
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


def one_round(groups: list[Communicator], number: int, steps: int) -> list[Sample]:
    turn = number % len(groups)
    return [{"round": number, **group.turn(steps)} for group in groups[turn:] + groups[:turn]]


def measure(args: argparse.Namespace) -> tuple[list[Sample], dict[str, Any]]:
    groups = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in args.only:
                groups.append(Communicator(name, args, folder))
                print(f"{name}: ready", file=sys.stderr, flush=True)
        samples = []
        for number in range(-1, args.rounds):
            found = one_round(groups, number, args.steps)
            samples += found if number >= 0 else []
            shown = "  ".join(f"{s['name']} {s['seconds'] * 1e3:.0f}" for s in found)
            print(f"round {number + 1}/{args.rounds}, ms a step: {shown}", file=sys.stderr, flush=True)
        return samples, {group.name: group.facts for group in groups}
    finally:
        for group in groups:
            group.stop()


# -- what came of it ---------------------------------------------------------------------------------------------------


def check_losses(args: argparse.Namespace, samples: list[Sample]) -> float:
    """The largest relative difference of losses after equally many steps; ends the run if it is too large."""
    runs: dict[str, list[float]] = {}
    for sample in sorted(samples, key=lambda sample: sample["round"]):
        runs.setdefault(sample["name"], []).extend(sample["losses"])
    apart = max((max(column) - min(column)) / min(column) for column in zip(*runs.values(), strict=True))
    if apart > AGREE[args.dtype]:
        raise SystemExit(f"losses differ by {apart:.1e}: not all contenders train the same. {runs}")
    return apart


def theory(args: argparse.Namespace, contender: Contender, facts: dict[str, Any]) -> dict[str, float]:
    """Bytes of whole tensors that a step has to gather and reduce, where no unit stays between forward and backward."""
    ddp = contender.kind == "ddp"
    param = facts["numel"] * (2 if args.dtype == "bf16" else 4)
    grad = param if ddp else facts["numel"] * 4
    if contender.stage == 0:
        return {"all_reduce_bytes": grad, "all_gather_bytes": 0, "reduce_scatter_bytes": 0}
    gathers = 2 if contender.stage == 3 else 1
    return {"all_reduce_bytes": 0, "all_gather_bytes": gathers * param, "reduce_scatter_bytes": grad}


def on_the_wire(issued: dict[str, float], ranks: int) -> float:
    """Bytes that each rank has to send for what was issued."""
    whole = issued["all_gather_bytes"] + issued["reduce_scatter_bytes"] + 2 * issued["all_reduce_bytes"]
    return whole * (ranks - 1) / ranks


def rows(saved: dict[str, Any]) -> list[dict[str, Any]]:
    args, samples, facts = argparse.Namespace(**saved["args"]), saved["samples"], saved["facts"]
    found = []
    for name in args.only:
        contender = CONTENDERS[name]
        mine = {s["round"]: s for s in samples if s["name"] == name}
        peer = {s["round"]: s for s in samples if s["name"] == contender.against}
        expected = theory(args, contender, facts[name] or {"numel": saved["parameters"]})
        issued = {key: next(iter(mine.values()))["traffic"].get(key) for key in expected}
        row: dict[str, Any] = {
            "name": name,
            "title": contender.title,
            "seconds": statistics.median(s["seconds"] for s in mine.values()),
            "cpu_seconds": statistics.median(s["cpu_seconds"] for s in mine.values()),
            "peak_rss": max(s["peak_rss"] for s in mine.values()),
            "wire": statistics.median(s["wire"] for s in mine.values()),
            "wire_theory": on_the_wire(expected, args.ranks),
            "wire_issued": on_the_wire(issued, args.ranks) if facts[name] else None,
            "theory": expected,
            "issued": issued if facts[name] else None,
        }
        if peer:
            row["ratio"] = statistics.median(mine[r]["seconds"] / peer[r]["seconds"] for r in mine)
            row["against"], row["allowed"] = CONTENDERS[contender.against].title, contender.allowed
            row["within"] = not contender.allowed or row["ratio"] <= contender.allowed
        found.append(row)
    return found


def table(saved: dict[str, Any]) -> str:
    args = argparse.Namespace(**saved["args"])
    found = rows(saved)
    lines = [
        f"# A data-parallel step of {saved['parameters'] / 1e6:.1f} M parameters on {args.ranks} ranks, {args.dtype}",
        "",
        f"`{saved['command']}` on {saved['machine']}. GPT-2: hidden {args.hidden}, {args.layers} layers, {args.heads} "
        f"heads, vocabulary {args.vocab}, sequence {args.sequence}, batch {args.batch} a rank; AdamW; gloo over the "
        f"loopback device; {saved['threads']} of torch's threads a rank. Medians of {args.rounds} rounds of "
        f"{args.steps} steps, all taking turns; "
        f"ratios are medians of those within a round. All losses agree within {saved['apart']:.0e}.",
        "",
        "| | step, ms | beside its peer | at most | CPU of a rank, ms | peak RSS of a rank, GB |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        star = "" if row.get("within", True) else "\\*"
        allowed = f"{row['allowed']:.2f}" if row.get("allowed") else ""
        beside = f"**{row['ratio']:.2f}**{star} × {row['against']} | {allowed}" if "ratio" in row else " | "
        lines.append(
            f"| {row['title']} | {row['seconds'] * 1e3:.0f} | {beside} | {row['cpu_seconds'] * 1e3:.0f} | "
            f"{row['peak_rss'] / 1e9:.2f} |"
        )
    lines += [
        "",
        *(["\\* more than was aimed for.", ""] if any(not row.get("within", True) for row in found) else []),
        "## Bytes",
        "",
        "MB a step, of whole tensors: what was issued, and the theory where no unit stays between forward and backward "
        "(stage 3: 2 × all-gather + 1 × reduce-scatter). Infinity's units that are still in a buffer when backward "
        "comes to them are not gathered again, nor is FSDP2's root. On the wire: what each rank sent, as the kernel "
        "counted it, beside the theory's, and beside what the issued bytes need.",
        "",
        "| | all-gather | theory | reduce-scatter | theory | all-reduce | theory | on the wire | theory | needed for "
        "what was issued |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        line = f"| {row['title']} |"
        for key in ("all_gather_bytes", "reduce_scatter_bytes", "all_reduce_bytes"):
            seen = f"{row['issued'][key] / 1e6:.1f}" if row["issued"] else ""
            line += f" {seen} | {row['theory'][key] / 1e6:.1f} |"
        needed = f"{row['wire_issued'] / 1e6:.1f}" if row["issued"] else ""
        lines.append(f"{line} {row['wire'] / 1e6:.1f} | {row['wire_theory'] / 1e6:.1f} | {needed} |")
    if "remark" in saved:
        lines += ["", saved["remark"]]
    return "\n".join([*lines, "", f"![Step time and bytes]({saved['name']}.png)", ""])


def plot(saved: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    args = argparse.Namespace(**saved["args"])
    found = rows(saved)[::-1]
    figure = Figure(figsize=(12, 0.42 * len(found) + 1.9), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    height = 1 - 1.45 / (0.42 * len(found) + 1.9)
    left = figure.add_axes((0.25, 0.09, 0.42, height))
    right = figure.add_axes((0.71, 0.09, 0.27, height))
    by_title = {row["title"]: row for row in found}
    for place, row in enumerate(found):
        color = "#2f6fde" if row["name"].startswith("infinity") else "#9aa3af"
        left.barh(place, row["seconds"] * 1e3, height=0.66, color=color)
        ends = row["seconds"] * 1e3
        label = f"{ends:.0f} ms"
        if "ratio" in row:
            if row["allowed"]:
                limit = by_title[row["against"]]["seconds"] * 1e3 * row["allowed"]
                left.plot([limit, limit], [place - 0.33, place + 0.33], color="#1f2430", linewidth=1.4)
                ends = max(ends, limit)
            label += f", {row['ratio']:.2f} × {row['against'].split(',')[0].replace('DistributedDataParallel', 'DDP')}"
        left.text(ends, place, f"  {label}", va="center", fontsize=8, color="#374151")
        right.barh(place, row["wire"] / 1e6, height=0.66, color=color)
        limit = row["wire_theory"] / 1e6
        right.plot([limit, limit], [place - 0.33, place + 0.33], color="#1f2430", linewidth=1.4)
        right.text(max(limit, row["wire"] / 1e6), place, f"  {row['wire'] / 1e6:.0f}", va="center", fontsize=8)
    left.set_yticks(range(len(found)), [row["title"] for row in found], fontsize=8)
    right.set_yticks([])
    left.set_xlim(0, 1.5 * max(row["seconds"] for row in found) * 1e3)
    right.set_xlim(0, 1.2 * max(row["wire"] for row in found) / 1e6)
    for axes in (left, right):
        axes.tick_params(length=0, colors="#374151", labelsize=8)
        axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
    title = f"A step of {saved['parameters'] / 1e6:.1f} M parameters on {args.ranks} gloo ranks, {args.dtype}"
    figure.text(0.02, 0.945, title, fontsize=13, weight="bold", color="#1f2430")
    figure.text(0.25, 0.885, "ms; black lines: what was aimed for", fontsize=9, color="#6b7280")
    figure.text(0.71, 0.885, "MB that a rank sends; black lines: the theory", fontsize=9, color="#6b7280")
    figure.savefig(path)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    args = arguments()
    target = RESULTS / f"{args.name}.json"
    if args.redraw:
        saved = json.loads(target.read_text())
    else:
        samples, facts = measure(args)
        saved = {
            "command": f"python bench/zero.py {' '.join(sys.argv[1:])}".strip(),
            "machine": f"Linux {platform.release()}, {processor()}, {cores()} cores, torch {version('torch')}",
            "threads": torch_threads(args),
            "name": args.name,
            "parameters": shape(args).num_parameters,
            "apart": check_losses(args, samples),
            "args": vars(args),
            "facts": facts,
            "samples": samples,
        }
        RESULTS.mkdir(exist_ok=True)
        target.write_text(json.dumps(saved, indent=1) + "\n")
    text = table(saved)
    (RESULTS / f"{args.name}.md").write_text(text)
    plot(saved, RESULTS / f"{args.name}.png")
    print(text)


if __name__ == "__main__":
    main()
