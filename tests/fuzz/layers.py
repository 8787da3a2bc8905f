"""Ordinary layers, and parameters of unusual shapes and uses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fuzz.parts import VOCABULARY, WIDTH, Context, Deliberate, Part, leaf, mixed, weight


@leaf("linear", "gelu", "relu", "no bias", "wide", "in place", "dropout", "baddbmm")
class Linear(Part):
    def make(self) -> None:
        hidden = 4 * WIDTH if self.variant == "wide" else WIDTH
        self.up = nn.Linear(WIDTH, hidden, bias=self.variant != "no bias")
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = self.up(x)
        if self.variant == "in place":
            y.mul_(0.5)
            y += 0.1
            y = F.relu(y, inplace=True)
        elif self.variant == "relu":
            y = F.relu(y)
        else:
            y = F.gelu(y)
        if self.variant == "dropout":
            y = F.dropout(y, 0.25, self.training)
        if self.variant == "baddbmm":
            y = torch.baddbmm(y, y, self.up.weight.expand(len(y), -1, -1), beta=0.5)
        return mixed(x, self.down(y))


@leaf("norm", "layer", "group", "batch", "rms", "instance")
class Norm(Part):
    def make(self) -> None:
        make = {
            "layer": lambda: nn.LayerNorm(WIDTH),
            "group": lambda: nn.GroupNorm(2, WIDTH),
            "batch": lambda: nn.BatchNorm1d(WIDTH),
            "rms": lambda: nn.RMSNorm(WIDTH),
            "instance": lambda: nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True),
        }
        self.norm = make[self.variant]()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        channels_first = self.variant in ("group", "batch", "instance")
        return mixed(x, self.norm(x.transpose(1, 2)).transpose(1, 2) if channels_first else self.norm(x))


@leaf("recurrent", "lstm", "gru", "rnn", "two layers", "cell", "by hand", "projected")
class Recurrent(Part):
    def make(self) -> None:
        if self.variant == "cell":
            self.net: nn.Module = nn.GRUCell(WIDTH, WIDTH)
        elif self.variant == "by hand":
            self.net = nn.Linear(2 * WIDTH, WIDTH)
        elif self.variant == "projected":
            self.net = nn.LSTM(WIDTH, 2 * WIDTH, proj_size=WIDTH, batch_first=True)
        elif self.variant == "two layers":
            self.net = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)
        else:
            kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[self.variant]
            self.net = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant not in ("cell", "by hand"):
            return mixed(x, self.net(x)[0])
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            if self.variant == "cell":
                state = self.net(x[:, t], state)
            else:
                state = torch.tanh(self.net(torch.cat([x[:, t], state], -1)))
            out.append(state)
        return mixed(x, torch.stack(out, 1))


@leaf("attention", "mha", "encoder", "encoder norm first", "decoder", "sdpa")
class Attention(Part):
    def make(self) -> None:
        if self.variant in ("mha", "sdpa"):
            self.net: nn.Module = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        elif self.variant == "decoder":
            self.net = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        else:
            first = self.variant == "encoder norm first"
            self.net = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=first)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant in ("mha", "sdpa"):
            return mixed(x, self.net(x, x, x, need_weights=self.variant == "mha")[0])
        return mixed(x, self.net(x, x) if self.variant == "decoder" else self.net(x))


@leaf("convolution", "plain", "depthwise", "transposed")
class Convolution(Part):
    def make(self) -> None:
        kind = nn.ConvTranspose1d if self.variant == "transposed" else nn.Conv1d
        self.net = kind(WIDTH, WIDTH, 3, padding=1, groups=WIDTH if self.variant == "depthwise" else 1)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return mixed(x, self.net(x.transpose(1, 2)).transpose(1, 2))


@leaf("embedding", "plain", "max_norm", "padding", "bag", "functional", "by index", "scaled by frequency")
class Embedding(Part):
    def make(self) -> None:
        if self.variant == "bag":
            self.net: nn.Module = nn.EmbeddingBag(VOCABULARY, WIDTH)
        else:
            self.net = nn.Embedding(
                VOCABULARY,
                WIDTH,
                max_norm=1.0 if self.variant == "max_norm" else None,
                padding_idx=0 if self.variant == "padding" else None,
                scale_grad_by_freq=self.variant == "scaled by frequency",
            )

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "bag":
            return mixed(x, self.net(context.tokens)[:, None])
        if self.variant == "functional":
            return mixed(x, F.embedding(context.tokens, self.net.weight, max_norm=1.5))
        if self.variant == "by index":
            return mixed(x, self.net.weight[context.tokens])
        return mixed(x, self.net(context.tokens))


class Named(nn.Parameter):
    """A user's own kind of Parameter."""


@leaf("shapes", "scalar", "empty", "not contiguous", "list", "dict", "many", "subclass", "fp64 frozen", "integers")
class Shapes(Part):
    def make(self) -> None:
        self.w = weight()
        if self.variant == "scalar":
            self.scale = nn.Parameter(torch.tensor(0.7))
        elif self.variant == "empty":
            self.none = nn.Parameter(torch.empty(0, WIDTH))
        elif self.variant == "not contiguous":
            self.turned = nn.Parameter(weight(WIDTH, 2 * WIDTH).data.t())
        elif self.variant == "list":
            self.several = nn.ParameterList([weight(WIDTH) for _ in range(3)])
        elif self.variant == "dict":
            self.named = nn.ParameterDict({"a": weight(WIDTH), "b": weight(WIDTH)})
        elif self.variant == "many":
            self.several = nn.ParameterList([weight(WIDTH, scale=0.05) for _ in range(40)])
        elif self.variant == "subclass":
            self.own = Named(torch.randn(WIDTH))
        elif self.variant == "fp64 frozen":
            self.other = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64), requires_grad=False)
        elif self.variant == "integers":
            self.other = nn.Parameter(torch.randint(0, WIDTH, (WIDTH,)), requires_grad=False)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = F.linear(x, self.w)
        if self.variant == "scalar":
            y = y * self.scale
        elif self.variant == "empty":
            y = F.linear(y, torch.cat([self.w, self.none]))
        elif self.variant == "not contiguous":
            y = y @ self.turned.t() @ self.turned
        elif self.variant in ("list", "many"):
            for each in self.several:
                y = y + each
        elif self.variant == "dict":
            y = y * self.named["a"] + self.named["b"]
        elif self.variant == "subclass":
            y = y * self.own
        elif self.variant == "fp64 frozen":
            y = (y * self.other).float()
        elif self.variant == "integers":
            y = y[..., self.other]
        return mixed(x, y)


@leaf("branch", "parity", "experts", "sometimes unused", "never used", "first step only", "late")
class Branch(Part):
    """Chooses the parameters to use by the batch or the step, never by rounded values."""

    def make(self) -> None:
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "experts":
            chosen = context.tokens % 2 == 0
            y = torch.zeros_like(x)
            for expert, rows in ((self.one, chosen), (self.other, ~chosen)):
                if rows.any():
                    y = y.masked_scatter(rows[..., None].expand_as(y), expert(x[rows]).to(y.dtype))
            return mixed(x, y)
        use_other = {
            "parity": int(context.tokens.sum()) % 2 == 0,
            "sometimes unused": context.step % 2 == 1,
            "never used": False,
            "first step only": context.step == 0,
            "late": context.step > 1,
        }[self.variant]
        y = self.one(x)
        return mixed(x, y + self.other(y) if use_other else y)


@leaf("stopped", "no_grad", "detach", "detach weight", "inference", "zero", "clone")
class Stopped(Part):
    """Some of its parameters receive no gradient."""

    def make(self) -> None:
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.variant == "no_grad":
            with torch.no_grad():
                y = self.one(x)
        elif self.variant == "inference":
            with torch.inference_mode():
                y = self.one(x)
            y = y.clone()
        elif self.variant == "detach":
            y = self.one(x).detach()
        elif self.variant == "detach weight":
            y = F.linear(x, self.one.weight.detach(), self.one.bias)
        elif self.variant == "zero":
            y = self.one(x) * 0.0
        else:
            y = F.linear(x, self.one.weight.clone(), self.one.bias.clone())
        return mixed(x, self.other(y))


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context):  # type: ignore[no-untyped-def]
        ctx.context = context
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if ctx.context.raises == "backward":
            raise Deliberate("backward")
        return gradient, None


@leaf("raising", "plain", "inside", "caught", "again")
class Raising(Part):
    """Raises where the context says so. caught: goes on without the layer. again: calls the layer once more."""

    def make(self) -> None:
        self.before, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.context: Context | None = None
        self.layer.register_forward_pre_hook(self.check, prepend=True)
        self.failed = False

    def check(self, module: nn.Module, args: object) -> None:
        if self.context is not None and self.context.raises == "pre-hook":
            raise Deliberate("pre-hook")
        if self.variant in ("caught", "again") and not self.failed:
            self.failed = True
            raise Deliberate("once")

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        self.context, self.failed = context, False
        y = _RaiseInBackward.apply(self.before(x), context)
        if context.raises == "forward":
            raise Deliberate("forward")
        try:
            y = self.layer(y)
        except Deliberate:
            if self.variant == "again":
                y = self.layer(y)
            elif self.variant != "caught":
                raise
        return mixed(x, y)
