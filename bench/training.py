"""The model, the plain PyTorch loop and the rounds that training benchmarks have in common.

Imports torch and infinity inside functions: a process that only starts others needs neither.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
from report.page import publish

if TYPE_CHECKING:
    import torch
    from torch import nn

    from infinity.sim.gpt2 import GPT2, GPT2Config

SHAPE = ("hidden", "layers", "heads", "vocab", "sequence", "batch")


@dataclass(frozen=True)
class Shape:
    """A GPT-2 with a head of its own, and its batch."""

    hidden: int
    layers: int
    heads: int
    sequence: int
    batch: int
    vocab: int = 8192
    checkpointed: bool = False


SHAPES = {
    "small": Shape(512, 12, 8, 128, 4),
    "S": Shape(1024, 24, 16, 128, 4),
    "wide": Shape(2048, 6, 16, 16, 1),
    "long": Shape(768, 12, 12, 512, 4, checkpointed=True),
}


def add_shape(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Flags of a GPT-2 and its batch: --hidden, --layers, --heads, --vocab, --sequence, --batch."""
    for name in SHAPE:
        text = "samples of a rank in a step" if name == "batch" else None
        parser.add_argument(f"--{name}", type=int, default=defaults[name], help=text)


def gpt2_config(*, hidden: int, layers: int, heads: int, vocab: int, sequence: int, tied: bool = True) -> GPT2Config:
    """tied: the head's weight is the embedding."""
    from infinity.sim.gpt2 import GPT2Config

    return GPT2Config(
        vocab_size=vocab,
        seq_length=sequence,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        tie_word_embeddings=tied,
    )


def gpt2_of(shape: Shape) -> GPT2Config:
    """The configuration of a shape."""
    found = gpt2_config(
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        vocab=shape.vocab,
        sequence=shape.sequence,
        tied=False,
    )
    return replace(found, checkpoint_activations=shape.checkpointed)


def config_of(args: argparse.Namespace, *, tied: bool = True) -> GPT2Config:
    """The configuration that the flags of `add_shape` ask for."""
    return gpt2_config(
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        vocab=args.vocab,
        sequence=args.sequence,
        tied=tied,
    )


def make_gpt2(args: argparse.Namespace, device: str = "cpu", *, tied: bool = True) -> GPT2:
    """The GPT-2 of the flags, on `device`; `meta` holds no values."""
    import torch

    from infinity.sim.gpt2 import GPT2

    with torch.device(device):
        return GPT2(config_of(args, tied=tied))


def random_batches(args: argparse.Namespace, seed: int = 1) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A function that gives the next (tokens, targets), each (batch, sequence), int64: the same ones for a seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, args.vocab, (args.batch, args.sequence + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def nvme_config(args: argparse.Namespace, clip: float, **infinity: Any) -> dict[str, Any]:
    """The engine's configuration with all states in args.nvme_path. infinity: keys of the section of that name."""
    offload = {"device": "nvme", "nvme_path": args.nvme_path}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": infinity,
    }


class Masters:
    """fp32 copies of a model's parameters, which an optimizer updates, and the cast back: bf16 training by hand."""

    def __init__(self, model: nn.Module) -> None:
        """Copies the parameters; the model is bf16 afterwards."""
        self.values = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        self.parameters = list(model.bfloat16().parameters())

    def take_gradients(self) -> None:
        """Convert the parameters' gradients to fp32; the parameters have none afterwards."""
        for parameter, master in zip(self.parameters, self.values, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None

    def write_back(self) -> None:
        """Cast the masters into the parameters, and drop the gradients."""
        for parameter, master in zip(self.parameters, self.values, strict=True):
            parameter.data.copy_(master.data)
            master.grad = None


def compare(
    script: str,
    args: argparse.Namespace,
    kinds: Iterable[str],
    run: Callable[[argparse.Namespace, str], dict[str, Any]],
    show: Callable[[dict[str, Any]], str],
) -> None:
    """Run each kind in `args.rounds` processes of its own, interleaved; write their results and draw the page.

    script: the benchmark's file, which each process runs with `--only KIND`; it prints what `run` returns. args: the
    flags of `add_shape`, --rounds, --steps, --nvme-path and --only. show: the figure of a line for a result.
    """
    if args.only:
        print(json.dumps(run(args, args.only)))
        return
    target = harness.target(args)
    if not args.redraw:

        def child(kind: str) -> dict[str, Any]:
            return harness.run_child(script, [*sys.argv[1:], "--only", kind])

        runs = harness.collect(kinds, args.rounds, child, show)
        flags = {name: getattr(args, name) for name in (*SHAPE, "rounds", "steps")}
        head = harness.head(Path(script).stem, path=args.nvme_path)
        harness.write_json(target, {**head, "args": flags, "runs": runs})
    publish(target)
