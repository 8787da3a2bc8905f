"""Megatron-LM's flags for the shape of a GPT-2, shared by the scripts that train one."""

from __future__ import annotations

import argparse

from gpt2.data import VOCAB_SIZE
from infinity.sim.gpt2 import GPT2Config

_SIZES = {
    "num_layers": "transformer blocks",
    "hidden_size": "width of the residual stream",
    "num_attention_heads": "attention heads of a block",
    "seq_length": "tokens of a sequence",
    "vocab_size": f"rows of the embedding; bytes use {VOCAB_SIZE}",
}


def add_shape(parser: argparse.ArgumentParser, shape: GPT2Config) -> None:
    """Add the flags of a shape, with `shape` as their defaults."""
    for name, text in _SIZES.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(shape, name)
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{text} (default: {default})")
    checkpoints = argparse.BooleanOptionalAction if shape.checkpoint_activations else "store_true"
    parser.add_argument(
        "--checkpoint-activations",
        action=checkpoints,
        default=shape.checkpoint_activations,
        help="recompute each block in backward",
    )
    parser.add_argument(
        "--untie-embeddings-and-output-weights", action="store_true", help="give the head its own weight"
    )


def shape_of(args: argparse.Namespace) -> GPT2Config:
    """Return the shape that the flags of `add_shape` give."""
    return GPT2Config(
        **{name: getattr(args, name) for name in _SIZES},
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        checkpoint_activations=args.checkpoint_activations,
    )


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
