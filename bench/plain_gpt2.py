"""A plain PyTorch loop for GPT-2, everything in host memory, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gpt2.data import TokenDataset, load_corpus
from infinity.sim.gpt2 import GPT2, GPT2Config

STATE_BYTES = 16
"""Bytes of states per parameter: the parameter, its gradient and AdamW's two moments, in fp32."""


@dataclass(frozen=True)
class Need:
    """Bytes of host memory that the plain loop needs."""

    states: int
    """Parameters, gradients and moments."""
    activations: int
    """Tensors that autograd saves for a backward pass."""
    process: int
    """Python and torch, without a model."""

    @property
    def total(self) -> int:
        return self.states + self.activations + self.process


def need_of(shape: GPT2Config, batch_size: int, process: int) -> Need:
    """Return the need of a loop with sequences of full length. process: bytes of Python and torch."""
    outside, one = (activation_bytes(replace(shape, num_layers=layers), batch_size) for layers in (1, 2))
    activations = outside + (shape.num_layers - 1) * (one - outside)
    return Need(STATE_BYTES * shape.num_parameters, activations, process)


def activation_bytes(shape: GPT2Config, batch_size: int) -> int:
    """Return the bytes that autograd saves in a forward pass, counted on the meta device: no memory is taken."""
    with torch.device("meta"):
        model = GPT2(shape)
        ids = torch.zeros(batch_size, shape.seq_length, dtype=torch.int64)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage  # held, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)
    return sum(storage.nbytes() for storage in saved.values())


class OutOfMemory(Exception):
    """The plain loop failed for lack of memory. Its text says where, and repeats torch's message."""


def train(
    shape: GPT2Config,
    batch_size: int,
    steps: int,
    data: str | None,
    seed: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train in fp32 with AdamW. Calls on_step(step, loss) after each step. Raises OutOfMemory."""
    corpus = load_corpus(data)
    text = TokenDataset(corpus.train, shape.seq_length, seed)
    torch.manual_seed(seed)
    place = "the construction of the model"
    try:
        model = GPT2(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
        for step in range(1, steps + 1):
            place = f"the forward pass of step {step}"
            loss = model(*text.batch((step - 1) * batch_size, batch_size))
            place = f"the backward pass of step {step}"
            loss.backward()
            place = f"optimizer.step() of step {step}"
            optimizer.step()
            optimizer.zero_grad()
            on_step(step, loss.item())
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{place}: {_message(error)}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch or Python is one for lack of host memory."""
    signs = ("allocate memory", "bad_alloc", "out of memory", "could not create a memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def _message(error: BaseException) -> str:
    """Return torch's message without its place in torch's source."""
    lines = str(error).splitlines()
    text = lines[0] if lines else type(error).__name__
    return text.rpartition("] ")[2].partition("err == 0. ")[2] or text
