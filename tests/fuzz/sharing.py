"""Parameters in more than one place: tied, kept past their hold, passed on, lent, sharing memory, hooked."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fuzz.parts import WIDTH, Context, Part, leaf, mixed, weight


@leaf("tied", "pair", "transposed", "three ways", "module twice", "module in two", "with bias")
class Tied(Part):
    def make(self) -> None:
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if self.variant in ("pair", "three ways", "with bias"):
            self.other.weight = self.one.weight
        if self.variant == "with bias":
            self.other.bias = self.one.bias
        if self.variant == "three ways":
            self.third = nn.Linear(WIDTH, WIDTH, bias=False)
            self.third.weight = self.one.weight
        if self.variant == "module in two":
            self.box = nn.Sequential(self.one, nn.Tanh())

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = torch.tanh(self.one(x))
        if self.variant == "transposed":
            return mixed(x, F.linear(self.other(y), self.one.weight.t()))
        if self.variant == "module twice":
            y = self.one(y)
        elif self.variant == "module in two":
            y = self.box(y)
        elif self.variant == "three ways":
            y = torch.tanh(self.third(y))
        return mixed(x, self.other(y))


@leaf(
    "kept", "list", "dict", "tuple of named", "closure", "first forward", "first forward list", "partial", "weak",
    "module list", "last forward", "on child",
)  # fmt: skip
class Kept(Part):
    """Keeps its Parameter object outside of its registration, and uses it from there."""

    def make(self) -> None:
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        w = self.layer.weight
        self.__dict__["hidden"] = {
            "list": [w],
            "dict": {"w": w},
            "tuple of named": tuple(self.layer.named_parameters()),
            "closure": lambda: w,
            "weak": weakref.ref(w),
            "module list": [self.layer],
        }.get(self.variant)
        if self.variant == "on child":
            self.last.__dict__["lender"] = w

    def stored(self) -> torch.Tensor:
        hidden = self.__dict__["hidden"]
        if self.variant == "list":
            return hidden[0]
        if self.variant == "dict":
            return hidden["w"]
        if self.variant == "tuple of named":
            return hidden[0][1]
        if self.variant in ("closure", "weak"):
            return hidden()
        if self.variant == "module list":
            return hidden[0].weight
        if self.variant == "on child":
            return self.last.__dict__["lender"]
        if self.variant == "partial":
            return self.layer.get_parameter("weight")
        if hidden is None:
            w = self.layer.weight
            hidden = self.__dict__["hidden"] = [w] if self.variant == "first forward list" else w
        return hidden[0] if self.variant == "first forward list" else hidden

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        w = self.layer.weight if self.variant == "last forward" and self.__dict__["hidden"] is None else self.stored()
        y = self.last(torch.tanh(F.linear(x, w)))
        if self.variant == "last forward":
            self.__dict__["hidden"] = self.layer.weight
        return mixed(x, y)


@leaf(
    "kept view", "flat", "detached", "from init", "from init detached", "transposed", "rows", "data",
    "numpy", "expanded", "every forward",
)  # fmt: skip
class KeptView(Part):
    """Keeps a view of a parameter beyond the forward that made it."""

    def make(self) -> None:
        self.w, self.last = weight(), nn.Linear(WIDTH, WIDTH)
        self.flat: Any = None
        if self.variant.startswith("from init"):
            self.flat = self.w.detach().view(-1) if self.variant.endswith("detached") else self.w.view(-1)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        w = self.w
        if self.flat is None or self.variant == "every forward":
            self.flat = {
                "flat": lambda: w.view(-1),
                "every forward": lambda: w.view(-1),
                "detached": lambda: w.detach().view(-1),
                "transposed": lambda: w.t(),
                "rows": lambda: w[2:4],
                "data": lambda: w.data,
                "numpy": lambda: w.detach().numpy(),
                "expanded": lambda: w[:1].expand(WIDTH, WIDTH),
            }[self.variant]()
        if self.variant == "rows":
            used = torch.cat([self.flat, w[2:]])
        elif self.variant == "numpy":
            used = w + torch.from_numpy(self.flat.copy())
        elif self.variant == "expanded":
            used = w + self.flat
        else:
            used = self.flat.view(WIDTH, WIDTH) if self.flat.dim() == 1 else self.flat
            used = used + w if not used.requires_grad else used
        return mixed(x, self.last(F.linear(x, used)))


@leaf("passing", "parameter", "list", "dict", "view", "closure", "detached", "bias", "module")
class Passing(Part):
    """Passes its Parameter to later parts, which use it after this part's forward."""

    def make(self) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        w = self.layer.weight
        context.passed[self.number] = {
            "parameter": lambda: w,
            "list": lambda: [w],
            "dict": lambda: {"w": w},
            "view": lambda: w.t(),
            "closure": lambda: lambda: w,
            "detached": lambda: w.detach(),
            "bias": lambda: self.layer.bias,
            "module": lambda: self.layer,
        }[self.variant]()
        return mixed(x, self.layer(x))


@leaf("taking", "use", "use twice", "save", "compare", "edit", "call")
class Taking(Part):
    """Uses the Parameter that the nearest part before it passed on."""

    def make(self) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def taken(self, context: Context) -> torch.Tensor | None:
        before = [number for number in context.passed if number < self.number]
        given = context.passed[max(before)] if before else None
        if isinstance(given, nn.Module):
            return given.weight
        if isinstance(given, list):
            return given[0]
        if isinstance(given, dict):
            return given["w"]
        return given() if callable(given) and not isinstance(given, torch.Tensor) else given

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y, w = self.layer(x), self.taken(context)
        if w is None:
            return mixed(x, y)
        if self.variant == "compare":
            return mixed(x, y * (w > 0).float().mean() + y * w.abs().max().detach())
        if self.variant == "edit":
            w.data.mul_(0.98)
        y = F.linear(y, w) if w.dim() == 2 else y * w
        if self.variant == "use twice":
            y = F.linear(torch.tanh(y), w) if w.dim() == 2 else y + w
        return mixed(x, y)


@leaf("lent", "parent reads", "sibling", "after", "before", "in hook", "named_parameters", "state_dict", "getattr")
class Lent(Part):
    """Reads weights outside of the module that owns them."""

    def make(self) -> None:
        self.one, self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH)
        if self.variant == "in hook":
            self.other.register_forward_hook(lambda m, a, out: out + 0.1 * self.one[0].weight.mean())

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "before":
            w = self.one[0].weight
            return mixed(x, self.other(self.one(x)) + F.linear(x, w))
        if self.variant == "sibling":
            return mixed(x, F.linear(x, self.one[0].weight, self.other.bias))
        y = self.other(self.one(x))
        if self.variant == "after":
            y = y * self.one[0].weight.square().mean() + self.other.weight.mean()
        elif self.variant == "named_parameters":
            y = y + sum(p.square().mean() for _, p in self.one.named_parameters())
        elif self.variant == "state_dict":
            y = y + sum(v.square().mean() for v in self.one.state_dict().values())
        elif self.variant == "getattr":
            y = y + F.linear(x, getattr(self.one[0], "weight"))  # noqa: B009 - a way that people read it
        elif self.variant == "parent reads":
            y = F.linear(y, self.one[0].weight, self.one[0].bias)
        return mixed(x, y)


@leaf("shared memory", "two parameters", "buffer", "part of another", "overlapping", "data of another", "plain tensor")
class SharedMemory(Part):
    """Holds tensors that shared memory before the engine took the model."""

    def make(self) -> None:
        values = torch.randn(2 * WIDTH, WIDTH) * 0.3
        self.one = nn.Parameter(values[:WIDTH])
        if self.variant in ("two parameters", "data of another"):
            self.other = nn.Parameter(values[:WIDTH] if self.variant == "two parameters" else self.one.data)
        elif self.variant == "buffer":
            self.register_buffer("other", self.one.data)
        elif self.variant == "part of another":
            self.other = nn.Parameter(values[WIDTH:])
        elif self.variant == "overlapping":
            self.other = nn.Parameter(values[WIDTH // 2 : WIDTH // 2 + WIDTH])
        else:
            self.other = self.one.data

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return mixed(x, F.linear(torch.tanh(F.linear(x, self.one)), self.other))


@leaf(
    "gradient hook", "scale", "clip", "on activation", "post accumulate", "full backward", "full backward pre",
    "output hook", "count", "view hook", "retain_grad",
)  # fmt: skip
class GradientHook(Part):
    def make(self) -> None:
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        w = self.layer.weight
        if self.variant == "scale":
            w.register_hook(lambda g: g * 0.5)
        elif self.variant == "clip":
            w.register_hook(lambda g: g.clamp(-0.01, 0.01))
        elif self.variant == "post accumulate":
            w.register_post_accumulate_grad_hook(_halve)
        elif self.variant == "full backward":
            self.layer.register_full_backward_hook(lambda m, i, o: tuple(None if g is None else 0.5 * g for g in i))
        elif self.variant == "full backward pre":
            self.layer.register_full_backward_pre_hook(lambda m, o: tuple(0.5 * g for g in o))
        elif self.variant == "output hook":
            self.layer.register_forward_hook(lambda m, a, out: torch.tanh(out))
        elif self.variant == "count":
            self.register_buffer("calls", torch.zeros(()))
            w.register_hook(lambda g: self.calls.add_(1) and None)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = self.layer(x)
        if y.requires_grad and self.variant == "on activation":
            y.register_hook(lambda g: g * 0.5)
        if y.requires_grad and self.variant == "retain_grad":
            y.retain_grad()
        if self.variant == "view hook" and self.layer.weight.requires_grad and torch.is_grad_enabled():
            view = self.layer.weight.t()
            view.register_hook(lambda g: g * 0.5)
            y = y + x @ view
        return mixed(x, self.last(torch.tanh(y)))


def _halve(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _unpack_list(packed: list[torch.Tensor]) -> torch.Tensor:
    return packed[0]


SAVED_HOOKS: dict[str, Any] = {
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "identity": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "list": lambda: saved_tensors_hooks(lambda t: [t], _unpack_list),
    "clone": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    "numpy": lambda: saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy),
    "detach": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    "half": lambda: saved_tensors_hooks(lambda t: (t.half(), t.dtype), lambda packed: packed[0].to(packed[1])),
    "closure": lambda: saved_tensors_hooks(lambda t: lambda: t, lambda packed: packed()),
    "view": lambda: saved_tensors_hooks(lambda t: t.view(-1) if t.is_contiguous() else t, lambda t: t),
}


@leaf("saved hooks", *(name for name in SAVED_HOOKS if name != "view"))
class SavedHooks(Part):
    """Runs layers under the user's saved-tensor hooks."""

    def make(self) -> None:
        self.w, self.layer = weight(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        with SAVED_HOOKS[self.variant]():
            y = self.layer(torch.tanh(F.linear(x, self.w)))
        return mixed(x, y * torch.sigmoid(y))


@leaf(
    "functional", "call", "call scaled", "call kept", "vmap", "stacked", "deepcopy", "deepcopy in init",
    "swap attribute", "vmap module", "linearised",
)  # fmt: skip
class Functional(Part):
    """Applies torch.func to a module and to copies of it."""

    def make(self) -> None:
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.twins = [copy.deepcopy(self.layer)]
        self.kept = dict(self.layer.named_parameters()) if self.variant == "call kept" else {}

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        call = torch.func.functional_call
        named = dict(self.layer.named_parameters())
        if self.variant == "call":
            y = call(self.layer, named, (x,))
        elif self.variant == "call scaled":
            y = call(self.layer, {name: 0.9 * p for name, p in named.items()}, (x,))
        elif self.variant == "call kept":
            y = call(self.layer, self.kept, (x,))
        elif self.variant == "vmap":
            y = torch.vmap(lambda row: F.linear(row, self.layer.weight, self.layer.bias))(x)
        elif self.variant == "vmap module":
            y = torch.vmap(self.layer)(x)
        elif self.variant == "stacked":
            params = {name: torch.stack([p, 0.5 * p]) for name, p in named.items()}
            y = torch.vmap(lambda each: call(self.layer, each, (x,)))(params).sum(0)
        elif self.variant == "deepcopy":
            with torch.no_grad():
                z = copy.deepcopy(self.layer)(x)
            y = self.layer(x) + 0.5 * z
        elif self.variant == "linearised":
            y = torch.func.jvp(lambda v: F.linear(v, self.layer.weight), (x,), (torch.ones_like(x),))[1]
        elif self.variant == "swap attribute":
            w = self.layer.weight
            del self.layer._parameters["weight"]
            self.layer.weight = 0.9 * w
            y = self.layer(x)
            del self.layer.weight
            self.layer.register_parameter("weight", w)
        else:
            y = self.layer(x) + self.twins[0](x)
        return mixed(x, self.last(y))
