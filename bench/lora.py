"""LoRA on a Llama of 6.7 billion parameters whose frozen base is on a drive, in bf16 and in 4 bits.

    python bench/lora.py --nvme-path /local_nvme                      # some ten minutes on 2 idle cores; 14 GB of drive
    python bench/lora.py --layers 2 --hidden 512 --limit ""            # a short one, without a limit of memory

Adapters of rank 16 beside every linear layer of the blocks (peft), AdamW with moments of 8 bits, batch 1, checkpointed
blocks, all states on nvme. The base has random weights and is built under `infinity.Init`; in 4 bits, layers of
bitsandbytes (nf4, scales quantised too) have random codes. Each process runs in a control group with --limit bytes of
memory where the machine allows that. Before, a small model of each kind is trained by the engine and by a plain loop,
from the same values. Writes bench/results/lora.json, then draws bench/results/lora.md and lora.png from it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import big
import harness
from infinity.sizes import parse_size
from report.lora import WARM_UP
from report.page import publish

if TYPE_CHECKING:
    from torch import nn

BASES = ("bf16", "nf4")
BLOCK = 64 * 256
"""Elements that share one scale of scales."""
SMALL = {"layers": 4, "hidden": 512, "sequence": 64}


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "lora")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--steps", type=int, default=2, help=f"counted steps, after {WARM_UP}")
    parser.add_argument("--prefetch", default="100MB", metavar="SIZE", help="infinity.prefetch_bytes")
    parser.add_argument("--limit", default="3GB", metavar="SIZE", help="memory of the control group; empty: no group")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--only", choices=BASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": args.nvme_path}
    return {
        "steps_per_print": 0,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"moments": "8bit", "prefetch_bytes": args.prefetch},
    }


# -- models ------------------------------------------------------------------------------------------------------------


def random_nf4(linear: nn.Linear) -> nn.Module:
    """Return a layer of bitsandbytes of the shape of `linear`, with random codes and the scales of weights of ±0.02."""
    import bitsandbytes as bnb
    import torch

    rows, width, numel = linear.out_features, linear.in_features, linear.out_features * linear.in_features
    how: dict[str, Any] = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "device": "meta"}
    made: nn.Module = bnb.nn.Linear4bit(width, rows, bias=False, **how)
    sample = torch.empty(BLOCK, dtype=torch.bfloat16).normal_(0, 0.02)
    _, state = bnb.functional.quantize_4bit(sample, compress_statistics=True, quant_type="nf4")
    state.shape, times = torch.Size((rows, width)), math.ceil(numel / BLOCK)
    state.absmax = state.absmax.repeat(times)[: numel // 64].contiguous()
    state.state2.absmax = state.state2.absmax.repeat(times)
    codes = torch.randint(256, (numel // 2, 1), dtype=torch.uint8)
    made.weight = bnb.nn.Params4bit(codes, quant_state=state, quant_type="nf4", bnb_quantized=True, module=made)
    made.quant_state = state
    return made


def random_bf16(module: nn.Module) -> None:
    """Replace parameters on the meta device by random values in bf16, and those of norms by ones."""
    import torch
    from torch import nn

    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            values = torch.ones(parameter.shape, dtype=torch.bfloat16)
            setattr(module, name, nn.Parameter(values.normal_(0, 0.02) if values.dim() > 1 else values))


def make_model(args: argparse.Namespace, base: str) -> nn.Module:
    """Return the base with adapters, built in the memory of a few layers."""
    from peft import LoraConfig, get_peft_model
    from torch import nn

    import infinity

    model: Any = big.make_model(args, args.layers, "meta")
    with infinity.Init(config_of(args)):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        for block in model.model.layers if base == "nf4" else []:
            for path, linear in [each for each in block.named_modules() if isinstance(each[1], nn.Linear)]:
                block.set_submodule(path, random_nf4(linear))
        for module in model.modules():
            random_bf16(module)
        model.is_loaded_in_4bit = base == "nf4"
        settings = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
        adapted: nn.Module = get_peft_model(model, settings)
    return adapted.train()


# -- what runs in the process whose memory is limited ------------------------------------------------------------------


def train(args: argparse.Namespace) -> harness.Result:
    import torch

    import infinity

    torch.manual_seed(0)
    began = time.perf_counter()
    model = make_model(args, args.only)
    engine, *_ = infinity.initialize(model=model, config=config_of(args))
    constructed = time.perf_counter() - began
    made, of_construction = engine.ledger.snapshot(), harness.peak_rss()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    tokens = torch.randint(0, 32000, (1, args.sequence))
    steps = []
    for number in range(WARM_UP + args.steps):
        if number == WARM_UP:
            first = harness.moved_so_far(engine)
        began = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        steps.append({"seconds": time.perf_counter() - began, "loss": loss.item()})
        print(f"step {number + 1}: {steps[-1]['seconds']:.1f} s, loss {steps[-1]['loss']:.4f}", flush=True)
    moved = harness.moved_so_far(engine) - first
    layouts = [unit.layout for unit in engine.units]
    result = {
        "trained": sum(layout.numel for layout in layouts if layout.trainable),
        "frozen": sum(layout.nbytes for layout in layouts if not layout.trainable),
        "construction": {"seconds": constructed, "written": made.nvme_bytes_written, "peak_rss": of_construction},
        "steps": steps,
        "read": moved.nvme_bytes_read / args.steps,
        "written": moved.nvme_bytes_written / args.steps,
        "drive": big.drive_bytes(args.nvme_path),
        "peak_rss": harness.peak_rss(),
        "group": big.memory_group_peak(),
    }
    engine.close()
    return result


def run_limited(args: argparse.Namespace, base: str) -> harness.Result:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", base]
    with big.memory_group(parse_size(args.limit)) if args.limit else big.no_group() as group:
        before: list[str] = []
        environment = dict(os.environ)
        if group is not None:
            before = ["sh", "-c", f'echo $$ > {shlex.quote(str(group))}/cgroup.procs && exec "$@"', "sh"]
            environment["BIG_GROUP"] = str(group)
        with subprocess.Popen([*before, *command], stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            line = ""
            for line in process.stdout:
                if line.startswith("step "):
                    print(f"{base}: {line.rstrip()}", file=sys.stderr, flush=True)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} ended with code {process.returncode}; its error is above.")
    result: harness.Result = json.loads(line)
    return result


# -- a small model beside a plain loop ---------------------------------------------------------------------------------


def beside_plain(args: argparse.Namespace, base: str) -> dict[str, list[float]]:
    """Return the losses of the engine and of a plain loop in bf16 with fp32 masters, from the same values."""
    import torch

    import infinity

    small = argparse.Namespace(**{**vars(args), **SMALL})
    torch.manual_seed(0)
    model = make_model(small, base)
    plain, found = copy.deepcopy(model), dict[str, list[float]](engine=[], plain=[])
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    masters = [parameter.detach().clone().float() for parameter in trained]  # as the engine's: peft's adapters are fp32
    for parameter in trained:
        parameter.data = parameter.data.bfloat16()
    tokens = torch.randint(0, 32000, (1, small.sequence))
    engine, *_ = infinity.initialize(model=model, config=config_of(small) | {"infinity": {"prefetch_bytes": 0}})
    with engine:
        for _ in range(WARM_UP + args.steps):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            found["engine"].append(loss.item())
    optimizer = torch.optim.AdamW(masters, lr=2e-4)
    for _ in range(WARM_UP + args.steps):
        loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for parameter, master in zip(trained, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for parameter, master in zip(trained, masters, strict=True):
            parameter.data.copy_(master)
        found["plain"].append(loss.item())
    return found


def main() -> None:
    args = arguments()
    if args.only:
        print(json.dumps(train(args)))
        return
    target = harness.target(args)
    if not args.redraw:
        names = ("layers", "hidden", "sequence", "rank", "limit", "prefetch")
        head = harness.head("lora", path=args.nvme_path)
        found: dict[str, Any] = {"small": {base: beside_plain(args, base) for base in BASES}, "of_small": SMALL}
        for base in BASES:
            rate = big.drive_rate(args, "read")
            found[base] = {**run_limited(args, base), "rates": [rate, big.drive_rate(args, "read")]}
        harness.write_json(target, {**head, "args": {name: getattr(args, name) for name in names}, **found})
    publish(target)


if __name__ == "__main__":
    main()
