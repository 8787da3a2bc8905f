"""Train a GPT-2 with 10 billion parameters on one device of 32 GB, with states in host memory and on NVMe.

    bench/gpt2_10b_v100.sh                           # this script, with the flags of the model spelled out
    bench/gpt2_10b_v100.sh --plan                    # what each placement takes of each memory; allocates nothing
    bench/gpt2_10b_v100.sh --smoke --out smoke.json  # every placement and format with a tiny model: a test

Flags are Megatron-LM's. The model starts from random values and trains on the source of Python's standard library, one
byte a token. Prints what the placements take and refuses one that does not fit, with the bytes that are missing.

A wait has two times: the seconds for which the model's thread slept, and those in which the device was idle meanwhile.
`resident` is plain PyTorch's TFLOP/s with a few of the same blocks, recomputed too, all on the device.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import check
import harness
from gpt2.data import TokenDataset, load_corpus
from gpt2_10b_memory import Need, activation_bytes, available_bytes, enforce, needs, plan_of, table
from gpt2_10b_smoke import deterministic, misplaced
from gpt2_10b_steps import (
    FORMULA,
    counted_device,
    line,
    model_flops,
    rates,
    recomputed_flops,
    resident_rate,
    train,
)
from gpt2_flags import add_shape, positive, shape_of
from infinity.cli.timeline import lanes
from infinity.cli.trace_file import read_trace
from infinity.config import Config
from infinity.engine.initialize import initialize
from infinity.errors import ConfigError, InfinityError
from infinity.rules import MomentFormat
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.sizes import parse_size, show_bytes, show_count
from infinity.tiers.device import Device

if TYPE_CHECKING:
    from infinity.engine.training import TrainingEngine

CONFIGS = Path(__file__).resolve().parent / "configs"
PLACEMENTS = {
    "cpu": "gpt2_10b_v100.json",
    "optimizer-nvme": "gpt2_10b_v100_optimizer_nvme.json",
    "nvme": "gpt2_10b_v100_nvme.json",
}
MOMENTS: tuple[MomentFormat, ...] = ("fp32", "bf16", "8bit")
SHAPE = GPT2Config(num_layers=50, hidden_size=4096, num_attention_heads=32, checkpoint_activations=True)
SMOKE = replace(SHAPE, vocab_size=256, seq_length=64, hidden_size=64, num_attention_heads=4)
SMOKE_BATCH, SMOKE_STEPS = 2, 3
WARM_UP = 2
"""Steps left out of medians: the first records the trace, the second follows it."""
RESIDENT_LAYERS = 4
Save = Callable[[harness.Result], None]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{FORMULA}\n", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_shape(parser, SHAPE)
    parser.add_argument("--micro-batch-size", type=positive, default=10, metavar="N", help="of a forward (10)")
    text = "sequences of a step, a multiple of the micro-batch (default: one micro-batch)"
    parser.add_argument("--global-batch-size", type=positive, metavar="N", help=text)
    parser.add_argument("--train-iters", type=positive, default=5, metavar="N", help="steps, of which 2 warm up (5)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the config's)")
    parser.add_argument("--clip-grad", type=float, default=0.0, help="clip the norm of the gradient (0: no clipping)")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp16", dest="bf16", action="store_false", help="train in fp16 (default)")
    precision.add_argument("--bf16", action="store_true", help="train in bf16")
    parser.set_defaults(bf16=False)
    parser.add_argument("--placement", choices=PLACEMENTS, default="cpu", help="where states live (cpu)")
    parser.add_argument("--moments", choices=MOMENTS, default="8bit", help="format of the optimizer's moments (8bit)")
    text = "infinity.memory.device (30GiB); ignored by --smoke"
    parser.add_argument("--device-memory", type=parse_size, default="30GiB", metavar="SIZE", help=text)
    parser.add_argument("--nvme-path", type=Path, default=Path(tempfile.gettempdir()), help="folder for states")
    parser.add_argument("--data", help="text to train on (default: source of Python's standard library)")
    parser.add_argument("--seed", type=int, default=0)
    text = f"blocks of the resident model; 0: do not measure it (default: {RESIDENT_LAYERS}, on the CPU 0)"
    parser.add_argument("--resident-layers", type=int, metavar="N", help=text)
    parser.add_argument("--plan", action="store_true", help="print what each placement takes, and end")
    parser.add_argument("--smoke", action="store_true", help="train a tiny model in every placement and compare bits")
    text = "profile one more step, print its lanes, and write a trace for infinity timeline"
    parser.add_argument("--timeline", type=Path, metavar="FILE", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(arguments)
    args.global_batch_size = args.global_batch_size or args.micro_batch_size
    if args.global_batch_size % args.micro_batch_size:
        parser.error(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size}"
        )
    return args


def config_of(args: argparse.Namespace, placement: str, moments: MomentFormat) -> Config:
    """Return the placement's configuration with the values of the flags. If `device_memory` is None, all states are
    in the tiers that the placement names.
    """
    given: dict[str, Any] = json.loads((CONFIGS / PLACEMENTS[placement]).read_text(encoding="utf-8"))
    if args.bf16:
        given = {"bf16": {"enabled": True}} | {key: value for key, value in given.items() if key != "fp16"}
    if args.lr is not None:
        given["optimizer"]["params"]["lr"] = args.lr
    for part in ("offload_param", "offload_optimizer"):
        if given["zero_optimization"][part]["device"] == "nvme":
            given["zero_optimization"][part]["nvme_path"] = str(args.nvme_path)
    memory = {} if args.device_memory is None else {"device": args.device_memory}
    given["infinity"] |= {"moments": moments, "memory": memory}
    return Config.load(
        {
            "steps_per_print": 0,
            "train_batch_size": args.global_batch_size,
            "train_micro_batch_size_per_gpu": args.micro_batch_size,
            "gradient_clipping": args.clip_grad,
            **given,
        }
    )


def open_engine(shape: GPT2Config, config: Config, device: Device, seed: int) -> TrainingEngine:
    """Return an engine around a model of random values that is constructed unit by unit."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = GPT2(shape)
    return initialize(model=model, config=config, device=device)[0]


# -- the commands ------------------------------------------------------------------------------------------------------


def digest(engine: TrainingEngine) -> str:
    """Return a hash of all parameters' bits."""
    total = hashlib.sha256()
    for name, value in engine.stream_state_dict():
        total.update(name.encode())
        total.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def all_needs(
    args: argparse.Namespace, shape: GPT2Config, device: Device
) -> Iterator[tuple[str, MomentFormat, list[Need]]]:
    """Yield what each placement takes with each format of moments."""
    free = available_bytes(device, args.device_memory, args.nvme_path)
    activations = activation_bytes(shape, args.micro_batch_size, 2)
    for placement, moments in product(PLACEMENTS, MOMENTS):
        plan = plan_of(shape, config_of(args, placement, moments), device)
        yield placement, moments, needs(plan, activations, free)


def run(args: argparse.Namespace, shape: GPT2Config, device: Device, save: Save) -> harness.Result:
    """Print the needs of all placements, train in one and return the records. ConfigError if it does not fit."""
    print(enforce(device, args.device_memory))
    found = list(all_needs(args, shape, device))
    print("bytes that each placement takes, with the activations that backward starts from:")
    print(*table(iter(found)), sep="\n")
    taken = {(placement, moments): one for placement, moments, one in found}
    result: harness.Result = {
        "needs": [[placement, moments, [vars(need) for need in one]] for placement, moments, one in found]
    }
    if args.plan:
        return result
    if missing := "; ".join(str(need) for need in taken[args.placement, args.moments] if need.missing):
        kind = f"{args.placement} with {args.moments} moments"
        raise ConfigError(f"{kind} does not fit. It needs {missing}. Choose another --placement.")
    layers = args.resident_layers
    if layers is None:
        layers = 0 if device.torch_device.type == "cpu" else min(RESIDENT_LAYERS, shape.num_layers)
    if layers:
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        rate = resident_rate(replace(shape, num_layers=layers), args.micro_batch_size, dtype, device)
        result["resident_tflops"] = rate / 1e12
        save(result)
        print(f"resident: {result['resident_tflops']:.3g} TFLOP/s with {layers} blocks")
        _forget_peak(device)
    tokens = TokenDataset(load_corpus(args.data).train, shape.seq_length, args.seed)
    began = time.perf_counter()
    with open_engine(shape, config_of(args, args.placement, args.moments), device, args.seed) as engine:
        result["construction_seconds"] = time.perf_counter() - began
        print(f"constructed in {result['construction_seconds']:.3g} s")
        result["steps"] = []
        save(result)
        for record in train(engine, tokens, args.train_iters, device):
            result["steps"].append(record | rates(record, shape, args.global_batch_size))
            save(result)
            print(line(result["steps"][-1]), flush=True)
        if args.timeline is not None:
            engine.profile(1, args.timeline)
            (record,) = train(engine, tokens, 1, device)
            print(f"profiled: {record['seconds']:.3g} s")
    if args.timeline is not None:
        result["lanes"] = lanes(read_trace(args.timeline))
        print(*lanes_text(result["lanes"]), sep="\n")
    return result


def lanes_text(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each lane of the profiled step."""
    for lane, one in found.items():
        rate = one["bytes_per_second"]
        moved = f", {show_bytes(one['bytes'])} at {rate / 1e9:.1f} GB/s" if rate else ""
        yield f"  {lane:15} busy {one['busy_seconds']:.3f} s, exposed {one['exposed_seconds']:.3f} s{moved}"


def _forget_peak(device: Device) -> None:
    gc.collect()
    library = torch.get_device_module(device.torch_device)
    if hasattr(library, "reset_peak_memory_stats"):
        library.empty_cache()
        library.reset_peak_memory_stats(device.torch_device)


def figures(result: harness.Result, accumulation: int) -> dict[str, float]:
    """Return the figures that `bench/limits.json` is about, as far as they were measured."""
    steady = result.get("steps", [])[WARM_UP:]
    if not steady:
        return {}
    last, name = steady[-1], f"accumulation {accumulation}"
    found = {"peak host, GiB": last["host_peak_bytes"] / 2**30, "construction, s": result["construction_seconds"]}
    if last["device_peak_bytes"]:
        found["peak device, GiB"] = last["device_peak_bytes"] / 2**30
    if "resident_tflops" in result:
        ratio = harness.median(steady, "recomputing_tflops") / result["resident_tflops"]
        found[f"{name}: TFLOP/s ÷ resident"] = ratio
    return found


def targets(found: dict[str, float]) -> Iterator[str]:
    """Yield a line for each limit: met, missed or not measured."""
    for limit in json.loads(check.LIMITS.read_text(encoding="utf-8"))["gpt2_10b"]:
        verdicts = check.compare(limit, found)
        yield from (f"{'met   ' if one.met else 'MISSED'}  {one.text}" for one in verdicts)
        if not verdicts:
            yield f"not measured  {limit['figure']}"


def smoke(args: argparse.Namespace, device: Device) -> tuple[harness.Result, bool]:
    """Train a tiny model in every placement with every format. Returns the runs, and whether placements agree and have
    their states in their tiers. --device-memory has no effect: such a budget would keep all states on the device.
    """
    torch.set_num_threads(1)  # these operations are too small to be divided
    args.micro_batch_size = args.global_batch_size = SMOKE_BATCH
    args.device_memory = None
    text = TokenDataset(load_corpus(args.data).train, SMOKE.seq_length, args.seed)
    runs: list[harness.Result] = []
    agree = True
    for moments, placement in product(MOMENTS, PLACEMENTS):
        with open_engine(SMOKE, config_of(args, placement, moments), device, args.seed) as engine:
            elsewhere, reserved = list(misplaced(engine)), engine.ledger.tier_bytes()
            losses = [record["loss"] for record in train(engine, text, SMOKE_STEPS, device)]
            skipped, bits = engine.skipped_steps, digest(engine)
        found = {"losses": losses, "skipped_steps": skipped, "digest": bits, "reserved_bytes": reserved}
        runs.append({"placement": placement, "moments": moments, **found, "misplaced": elsewhere})
        print(f"{placement:14}  {moments:4}  loss {losses[-1]:.6f}  parameters {bits[:12]}", flush=True)
        for problem in elsewhere:
            print(f"FAILED: {placement} with {moments} moments: {problem}")
            agree = False
    for moments in MOMENTS:
        kinds = {(tuple(run["losses"]), run["digest"]) for run in runs if run["moments"] == moments}
        if len(kinds) > 1:
            print(f"FAILED: with {moments} moments, placements differ in a bit")
            agree = False
    return {"runs": runs}, agree


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if `--smoke` fails, 2 after an error."""
    args = parse(arguments)
    logging.getLogger("infinity").setLevel(logging.WARNING)
    with deterministic() if args.smoke else nullcontext():
        return execute(args, arguments)


def execute(args: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    """Run the command of `args`, print and write its results. Returns the exit code."""
    device, agree = counted_device(), True
    save = writer(args, arguments, device)
    shape = SMOKE if args.smoke else shape_of(args)
    print(
        f"GPT-2 with {show_count(shape.num_parameters)} parameters on {device.torch_device}, torch {torch.__version__}"
    )
    try:
        if args.smoke:
            result, agree = smoke(args, device)
        else:
            operations = [count(shape, args.global_batch_size) / 1e12 for count in (model_flops, recomputed_flops)]
            print(FORMULA, "Here: {:.4g} and {:.4g} TFLOP.".format(*operations))
            result = run(args, shape, device, save)
            if not args.plan:
                print(*targets(figures(result, args.global_batch_size // args.micro_batch_size)), sep="\n")
    except (InfinityError, OSError) as error:
        print(f"gpt2_10b.py: {error}", file=sys.stderr)
        return 2
    save(result)
    return int(not agree)


def writer(args: argparse.Namespace, arguments: Sequence[str] | None, device: Device) -> Save:
    """Return a function that writes a result to `--out`. An interrupted run keeps its completed steps."""
    if args.out is None:
        return lambda result: None
    head = harness.head("gpt2_10b", path=args.nvme_path, arguments=arguments)
    head["device"] = str(device.torch_device)
    head["flags"] = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return lambda result: harness.write_json(args.out, {**head, **result})


if __name__ == "__main__":
    sys.exit(main())
