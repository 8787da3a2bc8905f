"""Parts that some steps run, or train, in another way than the others."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from fuzz.parts import WIDTH, Context, Part, mixed, weight, wrapper


@wrapper(
    "sometimes", "detached", "input detached", "without graph", "left out", "twice", "backwards", "reentrant",
    "checkpointed", "shift detached", "bias detached", "only the bias", "only the children",
)  # fmt: skip
class Sometimes(Part):
    """Runs its children as its variant says in some steps, and plainly in the others: the later ones, the first two, or
    every other one. The own parameters need nothing that autograd saves.
    """

    def make(self) -> None:
        self.shift = weight(WIDTH)
        self.bias = weight(WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        step = context.step
        now = (step >= 2, step < 2, step % 2 == 1)[self.number % 3]
        return mixed(x, self._otherwise(x, context) if now else self._run(x, context))

    def _run(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return self.run_parts(x + self.shift, context) + self.bias

    def _otherwise(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        variant = self.variant
        if variant in ("reentrant", "checkpointed"):
            # A reentrant checkpoint gives its parameters no gradients if its input requires none.
            x = x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()
            y: torch.Tensor = checkpoint(self._run, x, context, use_reentrant=variant == "reentrant")
            return y
        if variant == "without graph":
            with torch.no_grad():
                return self._run(x, context)
        if variant == "detached":
            return self._run(x, context).detach()
        if variant == "input detached":
            return self._run(x.detach(), context)
        if variant == "shift detached":
            return self.run_parts(x + self.shift.detach(), context) + self.bias
        if variant == "bias detached":
            return self.run_parts(x + self.shift, context) + self.bias.detach()
        if variant == "only the bias":
            return self.run_parts(x + self.shift, context).detach() + self.bias
        if variant == "only the children":
            return self.run_parts(x + self.shift.detach(), context) + self.bias.detach()
        if variant == "twice":
            return self._run(self._run(x, context), context)
        if variant == "backwards":
            for part in reversed(self.parts):
                x = part(x, context)
            return x + self.bias
        return x  # left out
