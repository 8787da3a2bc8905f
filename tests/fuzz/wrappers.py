"""Parts that run other parts: checkpoints, nesting, repetition, modes, hooks, and ways of calling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fuzz.parts import WIDTH, Context, Deliberate, Part, mixed, weight, wrapper
from fuzz.sharing import SAVED_HOOKS


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


@wrapper(
    "checkpoint", "reentrant", "non-reentrant", "reentrant each", "non-reentrant each", "selective", "both", "nested",
    "late reentrant", "keyword", "of parameter",
)  # fmt: skip
class Checkpoint(Part):
    """Checkpoints its children, together or one by one."""

    def make(self) -> None:
        self.w = weight()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        # A reentrant checkpoint gives its parameters no gradients if its input requires none.
        x = x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()
        if self.variant.endswith("each"):
            for part in self.parts:
                x = checkpoint(part, x, context, use_reentrant=self.variant == "reentrant each")
            return x
        if self.variant == "selective":
            fn = partial(create_selective_checkpoint_contexts, _save_products)
            return checkpoint(self.run_parts, x, context, use_reentrant=False, context_fn=fn)
        if self.variant == "nested":
            inner = partial(checkpoint, self.run_parts, use_reentrant=False)
            return checkpoint(inner, x, context, use_reentrant=False)
        if self.variant == "both":
            inner = partial(checkpoint, self.run_parts, use_reentrant=True)
            return checkpoint(inner, x, context, use_reentrant=True)
        if self.variant == "keyword":
            return checkpoint(self.run_parts, x, context=context, use_reentrant=False)
        if self.variant == "of parameter":
            y = checkpoint(lambda x, w: self.run_parts(F.linear(x, w), context), x, self.w, use_reentrant=False)
            return mixed(x, y)
        if self.variant == "late reentrant":
            return mixed(x, F.linear(checkpoint(self.run_parts, x, context, use_reentrant=True), self.w))
        return checkpoint(self.run_parts, x, context, use_reentrant=self.variant == "reentrant")


@wrapper("nest", "own before", "own after", "own both", "deep", "deep own", "bias only")
class Nest(Part):
    """Has parameters of its own, used around the children. deep: twelve nested modules."""

    def make(self) -> None:
        self.w = weight()
        self.bias = weight(WIDTH)
        if self.variant.startswith("deep"):
            inside: nn.Module = nn.ModuleList(self.parts)
            for _ in range(12):
                inside = _Shell(inside, own=self.variant == "deep own")
            self.shell = inside
            self.parts = nn.ModuleList()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant.startswith("deep"):
            return self.shell(x, context)
        if self.variant in ("own before", "own both"):
            x = mixed(x, F.linear(x, self.w))
        x = self.run_parts(x, context)
        if self.variant in ("own after", "own both"):
            x = mixed(x, F.linear(x, self.w))
        return x + self.bias


class _Shell(nn.Module):
    def __init__(self, inside: nn.Module, own: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.w = weight() if own else None
        self.inside = inside

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        x = x * self.scale
        if isinstance(self.inside, nn.ModuleList):
            for part in self.inside:
                x = part(x, context)
        else:
            x = self.inside(x, context)
        return x if self.w is None else mixed(x, F.linear(x, self.w))


@wrapper("repeat", "twice", "three times", "alternating", "backwards", "by step", "halves")
class Repeat(Part):
    """Uses its children several times in a forward."""

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "halves":
            one, other = x.chunk(2, 1)
            return torch.cat([self.run_parts(one, _half(context, 0)), self.run_parts(other, _half(context, 1))], 1)
        if self.variant in ("alternating", "backwards"):
            y = self.run_parts(x, context)
            for part in reversed(self.parts):
                y = part(y, context)
            return y
        times = {"twice": 2, "three times": 3, "by step": 1 + context.step % 2}[self.variant]
        for _ in range(times):
            x = self.run_parts(x, context)
        return x


def _half(context: Context, which: int) -> Context:
    made = Context(context.tokens.chunk(2, 1)[which], context.step)
    made.passed, made.raises = context.passed, context.raises
    return made


@wrapper(
    "mode", "autocast", "eval", "enable_grad", "no_grad first", "saved identity", "saved list", "save_on_cpu", "anomaly"
)
class Mode(Part):
    """Runs its children under a context manager."""

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "autocast":
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # as in `fuzz.loops`
                y = self.run_parts(x, context)
            return y.float()
        if self.variant == "eval":
            training = self.parts.training
            self.parts.eval()
            y = self.run_parts(x, context)
            self.parts.train(training)
            return y
        if self.variant == "no_grad first":
            with torch.no_grad():
                y = self.run_parts(x, context)
            return self.run_parts(x, context) + 0.1 * y
        if self.variant == "anomaly":
            with torch.autograd.detect_anomaly(check_nan=False):
                return self.run_parts(x, context)
        if self.variant == "enable_grad":
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                return self.run_parts(x, context)
        hooks = {"saved identity": "identity", "saved list": "list", "save_on_cpu": "save_on_cpu"}[self.variant]
        with SAVED_HOOKS[hooks]():
            return self.run_parts(x, context)


@wrapper("guard", "catch", "again", "pre-hook", "first child fails")
class Guard(Part):
    """Runs its children, and goes on without them if they raise."""

    def make(self) -> None:
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.due = 0
        if self.variant in ("pre-hook", "again"):
            self.parts[-1].register_forward_pre_hook(self.fail, prepend=True)

    def fail(self, module: nn.Module, args: object) -> None:
        if self.due:
            self.due -= 1
            raise Deliberate("once")

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        self.due = 1 if self.variant in ("pre-hook", "again") and context.step != 1 else 0
        try:
            y = self.run_parts(x, context)
            if self.variant == "first child fails" and context.step == 1:
                raise Deliberate("late")
            return y
        except Deliberate as error:
            if context.raises and str(error) == context.raises and self.variant != "catch":
                raise
            if self.variant == "again":
                return self.run_parts(x, context)
            return mixed(x, self.spare(x))


@wrapper("around", "sum", "skip by step", "functional", "functional scaled", "detach out", "hooked", "list out", "gate")
class Around(Part):
    """Calls its children and combines their results in various ways."""

    def make(self) -> None:
        self.gate = weight(WIDTH)
        if self.variant == "hooked":
            for part in self.parts:
                part.register_forward_pre_hook(lambda m, a: (a[0] * 0.9, *a[1:]))
                part.register_forward_hook(lambda m, a, out: out * 1.1)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "sum":
            return mixed(x, sum(part(x, context) for part in self.parts))
        if self.variant == "skip by step":
            for number, part in enumerate(self.parts):
                if (number + context.step) % 2 == 0:
                    x = part(x, context)
            return x * self.gate
        if self.variant.startswith("functional"):
            factor = 0.9 if self.variant.endswith("scaled") else None
            for part in self.parts:
                named = {
                    name: p if factor is None else p * factor
                    for name, p in part.named_parameters()
                    if p.is_floating_point()
                }
                x = torch.func.functional_call(part, named, (x, context))
            return x
        if self.variant == "detach out":
            return self.run_parts(x, context).detach() * self.gate + x
        if self.variant == "gate":
            return torch.where(self.gate > 0, self.run_parts(x, context), x)
        return self.run_parts(x, context) * self.gate
