"""Parts that use weights in unusual ways: views, lazy bits, functions of weights, custom saving, derivatives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fuzz.parts import WIDTH, Context, Part, leaf, mixed, weight


@leaf(
    "complex", "conj", "adjoint", "imag of conj", "real of conj", "neg view", "square", "resolved", "angle", "frozen",
    "frozen conj", "matmul conj", "conj linear", "physical conj", "trained",
)  # fmt: skip
class Complex(Part):
    """Views weights as complex numbers, whose conjugates and imaginary parts carry lazy bits."""

    def make(self) -> None:
        self.w = weight(WIDTH, WIDTH // 2, 2)
        if self.variant.startswith("frozen"):
            values = torch.view_as_complex(weight(WIDTH, WIDTH // 2, 2).data)
            self.fixed = nn.Parameter(values, requires_grad=False)
        elif self.variant == "trained":
            self.fixed = nn.Parameter(torch.view_as_complex(weight(WIDTH, WIDTH // 2, 2).data))

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        x = x.float()  # autocast does not support complex numbers
        w = torch.view_as_complex(self.w)  # (width, width/2)
        z = torch.complex(x, x.flip(-1))
        if self.variant == "conj":
            y = torch.view_as_real(z @ w.conj())
        elif self.variant == "adjoint":
            y = torch.view_as_real(z @ w @ w.mH)[..., 0]
        elif self.variant == "imag of conj":
            y = torch.cat([x @ w.conj().imag, x @ w.real], -1)
        elif self.variant == "real of conj":
            y = torch.cat([x @ w.conj().real, x @ w.imag], -1)
        elif self.variant == "neg view":
            y = torch.cat([x @ torch._neg_view(self.w[..., 0]), torch._neg_view(x) @ self.w[..., 1]], -1)
        elif self.variant == "square":
            y = torch.view_as_real((z @ w.conj()) * (z @ w))
        elif self.variant == "resolved":
            y = torch.view_as_real(z @ w.conj().resolve_conj())
        elif self.variant == "angle":
            y = torch.view_as_real(z @ (w * w.conj() * torch.exp(1j * w.conj().imag)))
        elif self.variant == "frozen":
            y = torch.view_as_real((z @ w) * (z @ self.fixed))
        elif self.variant == "frozen conj":
            y = torch.view_as_real((z @ w.conj()) + (z @ self.fixed.conj()) * (z @ w))
        elif self.variant == "matmul conj":
            y = torch.view_as_real((w.mT.conj() @ z.mT).mT)
        elif self.variant == "conj linear":
            y = torch.view_as_real(F.linear(z, w.mH, None))
        elif self.variant == "physical conj":
            y = torch.view_as_real(z @ w.conj_physical())
        else:
            y = torch.view_as_real(z @ w + z @ self.fixed.conj())
        return mixed(x, y.reshape(x.shape) if y.shape != x.shape else y)


@leaf(
    "mask", "where", "straight through", "greater", "maximum", "sort", "topk", "quantised", "comparison only",
    "sign of", "bernoulli",
)  # fmt: skip
class Mask(Part):
    """Uses a weight in comparisons and masks, which pass no gradient."""

    def make(self) -> None:
        self.w = weight()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        w = self.w
        used = {
            "where": lambda: torch.where(w > 0, w, 0.1 * w),
            "straight through": lambda: w + (w.sign() - w).detach(),
            "greater": lambda: w * (w > 0.1),
            "maximum": lambda: torch.maximum(w, w.t()),
            "sort": lambda: w.sort(0).values,
            "topk": lambda: w * torch.zeros_like(w).scatter(1, w.abs().topk(3, 1).indices, 1.0),
            "quantised": lambda: w + ((w * 8).round() / 8 - w).detach(),
            "comparison only": lambda: w.clone() + (w.data > 0).float(),
            "sign of": lambda: w.sign() * w.abs().sqrt().clamp(max=0.5),
            "bernoulli": lambda: w * (torch.rand_like(w) < torch.sigmoid(4 * w)),
        }[self.variant]()
        return mixed(x, F.linear(x, used))


@leaf("standardised", "weight", "cosine", "gram", "norm", "softmax", "view chain", "split", "unbind", "as_strided")
class Standardised(Part):
    """The layer's weight is a function of the parameter, or views of views of it."""

    def make(self) -> None:
        self.w = weight()
        self.bias = weight(WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        w = self.w
        if self.variant == "weight":
            used = (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 0.1)
        elif self.variant == "cosine":
            used = F.normalize(w, dim=1, eps=0.1)
        elif self.variant == "gram":
            used = w @ w.t()
        elif self.variant == "norm":
            used = w / w.norm()
        elif self.variant == "softmax":
            used = w.softmax(1)
        elif self.variant == "view chain":
            used = w.view(-1)[WIDTH:].view(WIDTH - 1, WIDTH).t().contiguous() @ w[1:].view(WIDTH - 1, WIDTH)
        elif self.variant == "split":
            one, other = w.chunk(2)
            used = torch.cat([other, one.detach()])
        elif self.variant == "unbind":
            used = torch.stack([row * (i + 1) / WIDTH for i, row in enumerate(w.unbind(0))])
        else:
            used = w.as_strided((WIDTH, WIDTH), (1, WIDTH))
        return mixed(x, F.linear(x, used, self.bias))


class _Product(torch.autograd.Function):
    """x @ w.T. how: the way in which it keeps the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        if how in ("saved", "saved twice"):
            ctx.save_for_backward(x, w, *([w.t()] if how == "saved twice" else []))
        else:
            ctx.save_for_backward(x)
            ctx.w = {"attribute": w, "list": [w], "view": w.t(), "closure": (lambda: w), "detached": w.detach()}[how]
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0]
        if ctx.how in ("saved", "saved twice"):
            w = ctx.saved_tensors[1]
        else:
            w = {"list": lambda: ctx.w[0], "view": lambda: ctx.w.t(), "closure": lambda: ctx.w()}.get(
                ctx.how, lambda: ctx.w
            )()
        return gradient @ w, gradient.flatten(0, 1).t() @ x.flatten(0, 1), None


@leaf(
    "custom function", "attribute", "saved", "saved twice", "list", "view", "closure", "detached", "once differentiable"
)
class CustomFunction(Part):
    def make(self) -> None:
        self.w = weight()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        how = "attribute" if self.variant == "once differentiable" else self.variant
        return mixed(x, _Product.apply(x, self.w, how))


@leaf(
    "normed", "spectral old", "spectral", "weight old", "weight", "orthogonal", "symmetric", "cached", "right inverse"
)
class Normed(Part):
    """torch's own ways of computing a weight: parametrizations, and hooks that set it before a forward."""

    def make(self) -> None:
        layer = nn.Linear(WIDTH, WIDTH)
        if self.variant == "spectral old":
            layer = torch.nn.utils.spectral_norm(layer)
        elif self.variant == "spectral":
            layer = parametrizations.spectral_norm(layer)
        elif self.variant == "weight old":
            layer = torch.nn.utils.weight_norm(layer)
        elif self.variant == "weight":
            layer = parametrizations.weight_norm(layer)
        elif self.variant == "orthogonal":
            layer = parametrizations.orthogonal(layer, orthogonal_map="cayley")
        else:
            parametrize.register_parametrization(layer, "weight", _Symmetric())
        self.layer = layer

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "cached":
            with parametrize.cached():
                return mixed(x, self.layer(self.layer(x)))
        if self.variant == "right inverse" and context.step == 1:
            with torch.no_grad():
                self.layer.weight = self.layer.weight * 0.9
        return mixed(x, self.layer(x))


class _Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)

    def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu()


@leaf(
    "derivative", "of input", "of weight", "of weight created", "twice", "jvp", "functional grad", "vjp", "inner loop",
)  # fmt: skip
class Derivative(Part):
    """Computes derivatives in its forward; backward differentiates through them."""

    def make(self) -> None:
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.one(x))).square().sum()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        create = torch.is_grad_enabled()
        with torch.enable_grad():
            if self.variant == "functional grad":
                return mixed(x, torch.func.grad(self.energy)(x))
            if self.variant == "jvp":
                return mixed(x, torch.autograd.functional.jvp(self.one, x, torch.ones_like(x), create_graph=create)[1])
            if self.variant == "vjp":
                out, pull = torch.func.vjp(self.one, x)
                return mixed(x, pull(out)[0])
            if self.variant in ("of input", "twice"):
                point = x if x.requires_grad else x.detach().requires_grad_()
                (force,) = torch.autograd.grad(self.energy(point), point, create_graph=create)
                if self.variant == "twice" and create:
                    (force,) = torch.autograd.grad(force.square().sum(), point, create_graph=True)
                return mixed(x, force)
            wanted = self.one.weight
            if not wanted.requires_grad:
                return mixed(x, self.one(x))
            created = create and self.variant != "of weight"
            (gradient,) = torch.autograd.grad(self.energy(x), wanted, create_graph=created)
            if self.variant == "inner loop":
                return mixed(x, F.linear(x, wanted - 0.01 * gradient, self.one.bias))
            return mixed(x, self.one(x) @ torch.tanh(gradient))
