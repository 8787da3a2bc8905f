"""Tokens a second, bytes read and memory of generating text with parameters on NVMe, in host memory, and plainly.

    python bench/generate.py                       # a Llama of 325 M parameters in bf16; about 5 minutes on 2 cores
    python bench/generate.py --layers 4 --rounds 1
    python bench/generate.py --experts 128 --hidden 512 --layers 8 --name generate_experts

Greedy decoding with a KV cache by transformers, one sequence. Every measurement runs in a process of its own, since
peak memory belongs to a process, and the kinds take turns, round by round, since machines are shared: compare medians
and ratios. `plain` is the model in memory. `bound` is the time the bytes of a token take at the disk's bandwidth,
measured in the same rounds. Every kind must give the same tokens. Writes bench/results/generate.json,
then draws generate.md from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import harness
from report.page import publish

KINDS = ("plain", "cpu", "nvme", "nvme, half cached", "disk")
"""Measurements: the model in memory, parameters in host memory and on NVMe, half of them cached; the disk."""
OF_EXPERTS = ("plain", "nvme", "nvme, in tiles", "disk")
"""Measurements of a mixture of experts: a layer's experts are read together, or one by one (`infinity.nn.tile`)."""
CHOSEN = 8
"""Experts of a token."""
WARM_UP = 4
"""Tokens that are not counted: the first is the prompt's, which records the trace."""


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "generate")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=0, help=f"experts of a layer, {CHOSEN} of which a token uses")
    parser.add_argument("--prompt", type=int, default=64, help="tokens that are read")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are written and counted")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the parameters")
    parser.add_argument("--only", choices=("save", *dict.fromkeys(KINDS + OF_EXPERTS)), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def shape(args: argparse.Namespace) -> Any:
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": args.hidden // 64,
        "max_position_embeddings": args.prompt + args.tokens + WARM_UP,
        "tie_word_embeddings": False,
        "dtype": torch.bfloat16,
    }
    if not args.experts:
        return transformers.LlamaConfig(intermediate_size=args.hidden * 11 // 4, **common)
    common |= {"num_experts": args.experts, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": args.hidden // 2}
    common["head_dim"] = 64
    return transformers.Qwen3MoeConfig(**common)


def model_class(args: argparse.Namespace) -> Any:
    import transformers

    return transformers.Qwen3MoeForCausalLM if args.experts else transformers.LlamaForCausalLM


def run_save(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model_class(args)(shape(args)).to(torch.bfloat16).save_pretrained(args.model)
    return {}


def load(args: argparse.Namespace, kind: str) -> tuple[Any, Any]:
    """The model with its values, and its engine; None for `plain`."""
    import torch

    import infinity

    if kind == "plain":
        return model_class(args).from_pretrained(args.model, dtype=torch.bfloat16).eval(), None
    with torch.device("meta"):
        model = model_class(args)(shape(args)).to(torch.bfloat16)
    where, _, how = kind.partition(", ")
    cached = how == "half cached"
    if how == "in tiles":
        infinity.nn.tile(model, 3 * args.hidden * (args.hidden // 2) * 2)  # an expert
    infinity.load_pretrained(model, args.model)
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": where, "nvme_path": args.nvme_path}},
        "infinity": {"cache_bytes": model.num_parameters() if cached else 0},  # of 2 bytes a parameter
    }
    return model, infinity.init_inference(model, config, dtype=torch.bfloat16)


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    import torch

    model, engine = load(args, kind)
    ids = torch.randint(3, args.vocab, (1, args.prompt), generator=torch.Generator().manual_seed(1))
    times: list[float] = []
    worked: list[float] = []
    seen: list[Any] = []

    def tick(*_: Any) -> None:
        times.append(time.perf_counter())
        worked.append(time.process_time())
        if engine is not None:
            seen.append(engine.ledger.snapshot())

    model.register_forward_pre_hook(tick)
    count = args.tokens + WARM_UP
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    tick()
    seconds = [after - before for before, after in pairwise(times)]
    result = {
        "parameters": model.num_parameters(),
        "said": said[0].tolist(),
        "prompt": seconds[0],
        "tokens": seconds[WARM_UP:],
        "processor": [after - before for before, after in pairwise(worked)][WARM_UP:],
        "peak_rss": harness.peak_rss(),
    }
    if engine is not None:
        moved = seen[-1] - seen[WARM_UP]
        result |= {
            "units": len(engine.units),
            "read": moved.nvme_bytes_read / args.tokens,
            "fetches": moved.fetches / args.tokens,
            "wait": moved.wait_seconds / args.tokens,
            "tier_bytes": engine.ledger.tier_bytes(),
        }
        engine.close()
    return result


def run_disk(args: argparse.Namespace) -> dict[str, Any]:
    from infinity.cli.drive.measure import Bench, Workload

    read = Workload("read")
    with Bench([args.nvme_path], 2 << 30, [read]) as bench:
        return {"rates": [bench.run(read, nbytes=2 << 30).gb_per_s for _ in range(3)]}


# -- the rounds --------------------------------------------------------------------------------------------------------


def child(kind: str, model: str) -> dict[str, Any]:
    return harness.run_child(__file__, [*sys.argv[1:], "--only", kind, "--model", model])


def show(found: dict[str, Any]) -> str:
    if "rates" in found:
        return f"{max(found['rates']):.2f} GB/s"
    return f"{1 / statistics.median(found['tokens']):.2f} tokens a second"


def check_tokens(runs: dict[str, list[dict[str, Any]]]) -> None:
    """End the run if two kinds wrote different tokens."""
    if len({tuple(run["said"]) for found in runs.values() for run in found if "said" in run}) != 1:
        raise SystemExit("the kinds wrote different tokens")


def main() -> None:
    args = arguments()
    if args.only:
        known = {"save": run_save, "disk": run_disk}
        print(json.dumps(known[args.only](args) if args.only in known else run(args, args.only)))
        return
    target, kinds = harness.target(args), OF_EXPERTS if args.experts else KINDS
    if not args.redraw:
        with tempfile.TemporaryDirectory(dir=args.nvme_path) as model:
            child("save", model)
            runs = harness.collect(kinds, args.rounds, partial(child, model=model), show)
        check_tokens(runs)
        flags = {
            name: getattr(args, name) for name in ("hidden", "layers", "vocab", "experts", "prompt", "tokens", "rounds")
        }
        flags["chosen"] = CHOSEN
        head = harness.head("generate", path=args.nvme_path) | {"transformers": version("transformers")}
        harness.write_json(target, {**head, "args": flags, "runs": runs})
    publish(target)


if __name__ == "__main__":
    main()
