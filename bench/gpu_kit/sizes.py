"""Sizes of a call's models and times: those of a GPU, and small ones for a dry run on an emulated device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Flags of the scripts that differ between a GPU and a dry run."""

    copies: tuple[str, ...] = ("4MiB", "64MiB", "256MiB")
    rounds: int = 5
    large: str = "1.3b"
    small: str = "350m"
    kinds: tuple[str, ...] = ("plain", "none", "cpu", "fsdp2 cpu")
    workers: int = 6
    """Processes of pytest."""
    bits: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    """Options of pytest, by step."""
    ten: tuple[str, ...] = ()
    """Flags of gpt2_10b_v100.sh for `headline`; empty: the model of 10 B."""
    fallback: tuple[str, ...] = ("--num-layers", "32", "--hidden-size", "2560")
    """Flags of the model of 2.7 B, which runs if that of 10 B fails."""
    links_seconds: int = 16
    steps: int = 4
    memory_gib: float = 110
    """GiB that `facts` writes to; 0.8 of the machine's memory if that is little more, or if there is no device."""
    adam: tuple[str, ...] = ()


TINY = ("--num-layers", "3", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--vocab-size")
DRY = Sizes(
    copies=("64KiB",),
    rounds=1,
    large="tiny",
    small="tiny",
    kinds=("plain", "none", "cpu"),
    workers=2,
    bits=("-k", "fp32-AdamW-fp32-unclipped-1"),
    tests=("-k", "test_update_schedules_agree or test_the_norm or test_one_rank"),
    streams=("-k", "outside_of_the_stream or batches_in_host_memory"),
    ten=(*TINY, "256", "--micro-batch-size", "2", "--device-memory", "1GiB"),
    fallback=(*TINY, "256", "--micro-batch-size", "2", "--device-memory", "1GiB"),
    links_seconds=2,
    steps=1,
    memory_gib=0.0625,
    adam=("--help",),  # its kernels need CUDA
)
"""FSDP2 has no collectives on the emulated device."""
