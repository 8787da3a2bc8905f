"""Parts whose parameters are edited in place by a forward, a hook or another part."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fuzz.parts import WIDTH, Context, Part, leaf, mixed, weight


def edit(w: torch.Tensor, how: str) -> None:
    """Change a weight by a small amount, in one of the ways that users do."""
    if how == "data clamp":
        w.data.clamp_(-0.5, 0.45)
    elif how == "data mul":
        w.data.mul_(0.95)
    elif how == "data slice":
        w.data[0] *= 0.9
    elif how == "data copy":
        w.data.copy_(w.data * 0.97)
    elif how == "assign":
        w.data = w.data * 0.96
    elif how == "assign view":
        w.data = (w.data.flatten() * 0.96).view(w.shape)
    elif how == "detach":
        w.detach().mul_(0.94)
    elif how == "detach set":
        w.detach()[...] = w.detach() * 0.93
    elif how == "numpy":
        array = w.detach().numpy()
        array[...] = array * 0.92
    elif how == "no_grad":
        with torch.no_grad():
            w.mul_(0.95).add_(0.001)
    elif how == "foreach":
        with torch.no_grad():
            torch._foreach_mul_([w], 0.95)
    elif how == "init":
        nn.init.constant_(w[0] if w.dim() else w, 0.1)
    elif how == "out":
        with torch.no_grad():
            torch.mul(w, 0.95, out=w)
    elif how == "renorm":
        with torch.no_grad():
            w.view(len(w), -1).renorm_(2, 0, 0.8) if w.dim() else w.clamp_(max=0.8)


EDITS = (
    "data clamp", "data mul", "data slice", "data copy", "assign", "assign view", "detach", "detach set", "numpy",
    "no_grad", "foreach", "init", "out", "renorm",
)  # fmt: skip


@leaf("edited before use", *EDITS)
class EditedBefore(Part):
    """Edits its parameter in its forward before using it."""

    def make(self) -> None:
        self.w, self.bias = weight(), weight(WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.training:
            edit(self.w, self.variant)
        return mixed(x, F.linear(x, self.w, self.bias))


@leaf("edited after use", *(how for how in EDITS if how not in ("no_grad", "foreach", "init", "out", "renorm")))
class EditedAfter(Part):
    """Edits its parameter after using it, without a change of its version: backward sees the edited value."""

    def make(self) -> None:
        self.w, self.other = weight(), weight()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = torch.tanh(F.linear(x, self.w))
        if self.training:
            edit(self.w, self.variant)
        return mixed(x, F.linear(y, self.other))


@leaf("edited by hook", *EDITS, "forward hook", "own pre-hook", "prepended", "with kwargs", "of child", "backward hook")
class EditedByHook(Part):
    """Edits its parameter in a hook of its module."""

    def make(self) -> None:
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        how = self.variant if self.variant in EDITS else "data mul"
        if self.variant == "forward hook":
            self.layer.register_forward_hook(lambda m, a, out: edit(m.weight, how))
        elif self.variant == "own pre-hook":
            self.register_forward_pre_hook(lambda m, a: edit(m.layer.weight, how))
        elif self.variant == "prepended":
            self.layer.register_forward_pre_hook(lambda m, a: edit(m.weight, how), prepend=True)
        elif self.variant == "with kwargs":
            self.layer.register_forward_pre_hook(lambda m, a, k: edit(m.weight, how), with_kwargs=True)
        elif self.variant == "of child":
            self.layer.register_forward_pre_hook(lambda m, a: edit(self.last.weight, how))
        elif self.variant == "backward hook":
            self.layer.register_full_backward_hook(lambda m, i, o: edit(m.bias, how))
        else:
            self.layer.register_forward_pre_hook(lambda m, a: edit(m.weight, how))

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return mixed(x, self.last(torch.tanh(self.layer(x))))


@leaf("average", "parameter", "parameter lerp", "buffer", "teacher", "teacher no_grad", "counts", "swap", "centred")
class Average(Part):
    """Frozen parameters that follow others, or activations, by moving averages."""

    def make(self) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.register_buffer("seen", torch.zeros(WIDTH))
        if self.variant.startswith(("teacher", "swap")):
            self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = self.layer(x)
        if self.variant.startswith("teacher"):
            if self.variant == "teacher":
                for old, new in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                    old.data.lerp_(new.data, 0.1)
            else:
                with torch.no_grad():
                    self.teacher.weight.mul_(0.9).add_(self.layer.weight, alpha=0.1)
            return mixed(x, y - 0.5 * self.teacher(x))
        if self.variant == "swap":
            with torch.no_grad():
                kept = self.layer.weight.clone()
                self.layer.weight.copy_(self.teacher.weight)
                z = self.layer(x)
                self.layer.weight.copy_(kept)
            return mixed(x, self.layer(x) - 0.5 * z)
        now = y.detach().mean((0, 1))
        if self.variant == "parameter":
            self.mean.data.mul_(0.9).add_(now, alpha=0.1)
        elif self.variant == "parameter lerp":
            with torch.no_grad():
                self.mean.lerp_(now, 0.1)
        elif self.variant == "buffer":
            self.seen = 0.9 * self.seen + 0.1 * now
        elif self.variant == "counts":
            self.mean.data += 0.01
            self.seen += 1
        elif self.variant == "centred":
            self.mean.data = 0.9 * self.mean.data + 0.1 * now
        return mixed(x, y - self.mean - 0.1 * self.seen)


@leaf("codebook", "moving average", "straight through", "restart", "trained")
class Codebook(Part):
    """Vector quantisation; the code of a row follows from the tokens, so that rounding cannot change it."""

    def make(self) -> None:
        self.codes = nn.Parameter(torch.randn(4, WIDTH) * 0.5, requires_grad=self.variant == "trained")
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        z = self.inner(x)
        index = context.tokens % 4
        if self.training and self.variant in ("moving average", "restart"):
            sums = torch.zeros_like(self.codes).index_add_(0, index.flatten(), z.detach().float().flatten(0, 1))
            if self.variant == "moving average":
                self.codes.data.mul_(0.9).add_(0.02 * sums)
            else:
                with torch.no_grad():
                    self.codes[context.step % 4] = 0.1 * sums[context.step % 4]
        code = F.embedding(index, self.codes)
        if self.variant == "trained":
            return mixed(x, code - z)
        return mixed(x, z + (code - z).detach())


@leaf("power iteration", "parameter", "buffer", "data", "wholly by hand")
class PowerIteration(Part):
    """Spectral normalisation as people write it: a frozen vector that every forward improves."""

    def make(self) -> None:
        self.w = weight()
        if self.variant == "buffer":
            self.register_buffer("u", F.normalize(torch.randn(WIDTH), dim=0))
        else:
            self.u = nn.Parameter(F.normalize(torch.randn(WIDTH), dim=0), requires_grad=False)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "data":
            v = F.normalize(self.w.data.t() @ self.u.data, dim=0)
            self.u.data = F.normalize(self.w.data @ v, dim=0)
            sigma = self.u @ self.w @ v
        else:
            with torch.no_grad():
                v = F.normalize(self.w.t() @ self.u, dim=0)
                self.u.copy_(F.normalize(self.w @ v, dim=0))
            sigma = self.u.clone() @ self.w @ v
        if self.variant == "wholly by hand":
            sigma = sigma.detach()
        return mixed(x, F.linear(x, self.w / (sigma.abs() + 0.1)))
