"""Models on the meta device start with the values their own code would have given, or are refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity.errors import ModelError
from infinity.sim.gpt2 import GPT2, GPT2Config
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded


class Lora(nn.Module):
    """A LoRA adapter as in PEFT: two layers beside the base layer, the second of which starts as zero."""

    def __init__(self, base_layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})
        nn.init.kaiming_uniform_(self.lora_A["default"].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


def adapted(model: Any, freeze: bool = True) -> nn.Module:
    """Replace linear layers with more than 8 outputs by adapters. freeze: freeze the other parameters."""
    if freeze:
        model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, Lora) and child.out_features > 8:
                setattr(module, name, Lora(child))
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def start(model: nn.Module, unit_size: int = 100_000) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with open_engine(model, engine_config(unit_size=unit_size)) as engine:
        return engine.state_dict()


def gpt2() -> nn.Module:
    return GPT2(GPT2Config(61, seq_length=8, num_layers=2, hidden_size=32, num_attention_heads=2))


class Ruled(nn.Module):
    """Initialises itself as nanoGPT does, by a rule applied to all modules."""

    def __init__(self, scaled: bool = False, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict
        """True if its rule requires every layer to have a bias."""
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.LSTM(32, 16)) for _ in range(2))
        self.apply(self._init_weights)
        if scaled:
            for block in self.blocks:
                nn.init.normal_(block[0].weight, std=0.001)  # type: ignore[index]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=5.0, std=0.02)
            if module.bias is not None or self.strict:
                nn.init.zeros_(module.bias)


class Edited(nn.Module):
    """Edits its layer after the layer's own initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.zeros_(self.last.weight)


class Reaching(nn.Module):
    """Has a rule that initialises its layers, which may be units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first.weight, mean=3.0)
        nn.init.normal_(self.second.weight, mean=4.0)
        nn.init.constant_(self.scale, 2.0)


class Halfway(nn.Module):
    """Initialises only a part of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight[:2] = 1.0


class Constant(nn.Module):
    """Sets its values out of place in its constructor; its rule gives the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Around(nn.Module):
    """Wraps a model to compute its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "tied": lambda: Stack(tied=True),
    "padding": lambda: nn.Embedding(64, 32, padding_idx=3),
    "recurrent": lambda: nn.LSTM(16, 32),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.PReLU(32)),
    "there and back": lambda: nn.Linear(64, 64).bfloat16().float(),
    "frozen": lambda: nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)),
    "a rule": Ruled,
    "a rule within": lambda: Around(Ruled()),
    "a rule that reaches others": Reaching,
    "initialize_module": gpt2,
    "initialize_module within": lambda: Around(gpt2()),
    "a constant": Constant,
}


@pytest.mark.parametrize("unit_size", [100, 1_000_000])
@pytest.mark.parametrize("name", RIGHT)
def test_what_rules_reproduce(name: str, unit_size: int) -> None:
    """Rules give the distribution of a model built on the cpu, for any unit size."""
    built, found = seeded(RIGHT[name]).state_dict(), start(on_meta(RIGHT[name]), unit_size)
    assert found.keys() == built.keys()
    for key, value in found.items():
        assert not value.is_floating_point() or value.isfinite().all(), key
        mean, spread = float(built[key].double().mean()), float(built[key].double().std(unbiased=False))
        assert float(value.double().mean()) == pytest.approx(mean, abs=0.6 * spread + 1e-6), key
        assert value.numel() < 16 or float(value.double().std()) == pytest.approx(spread, rel=0.4, abs=1e-6), key
    assert all(torch.equal(value, found[key]) for key, value in start(on_meta(RIGHT[name]), 5000).items())


def test_layers_that_one_rule_initialises_draw_different_values() -> None:
    found = start(on_meta(Reaching), 100)
    assert not torch.isclose(found["first.weight"] - 3, found["second.weight"] - 4).any(dim=1).all()


def given_away() -> nn.Module:
    """Return a model that had values before it was moved to the meta device."""
    with torch.device("cpu"):
        return seeded(Stack).to("meta")


def headed() -> nn.Module:
    model = Ruled()
    model.head = nn.Linear(16, 16)
    return model


def parameter_added() -> nn.Module:
    model = Stack()
    model.head.scale = nn.Parameter(torch.zeros(3))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "edited by its owner": (Edited, r"last\.weight \(Linear\) is on the meta device and was edited 2 times in place"),
    "edited afterwards": (lambda: Around(Edited()), r"inner\.last\.weight \(Linear\)"),
    "adapters": (lambda: adapted(Stack()), r"blocks\.0\.up\.lora_A\.default\.weight \(Linear\)"),
    "adapters beside trained": (lambda: adapted(Stack(), freeze=False), r"lora_A\.default\.weight \(Linear\)"),
    "adapters on a rule": (lambda: adapted(Ruled()), r"lora_A\.default\.weight \(Linear\).*Ruled\._init_weights\(\)"),
    "adapters on initialize_module": (lambda: adapted(gpt2()), r"GPT2\.initialize_module\(\) would reinitialise it"),
    "adapters that a rule fails for": (
        lambda: adapted(Ruled(strict=True)),
        r"Ruled\._init_weights\(\) fails for blocks\.0\.0\.lora_A\.default \(Linear\).*AttributeError",
    ),
    "a rule, then an edit": (lambda: Ruled(scaled=True), r"blocks\.0\.0\.weight \(Linear\).* was edited 3 times"),
    "a head that the rule never saw": (headed, r"head\.weight \(Linear\).* was edited 1 times"),
    "a parameter of its own": (parameter_added, r"parameter head\.scale \(Linear\)"),
    "half set": (Halfway, r"parameter weight \(Halfway\) .*reset_parameters\(\) does not set it, or not all of it"),
    "moved to meta": (given_away, r"parameter embedding\.weight \(Embedding\) .* was edited 0 times"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_rules_do_not_reproduce(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ModelError, match=said) as caught:
        start(on_meta(make))
    assert "Build the model on the cpu; where it does not fit in memory, under infinity.Init" in str(caught.value)


def test_a_model_that_was_refused_is_as_it_was() -> None:
    model = on_meta(Edited)
    before = dict(model.named_parameters())
    versions = [parameter._version for parameter in before.values()]
    for _ in range(2):
        with pytest.raises(ModelError):
            start(model)
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(after[name] is parameter for name, parameter in before.items())
    assert [parameter._version for parameter in after.values()] == versions


def test_the_way_that_the_error_names(tmp_path: Path) -> None:
    """The error's fixes work: `Init`, and a base model on meta with loaded values and adapters from the cpu."""
    expected = start(adapted(seeded(Stack)))
    assert not expected["blocks.0.up.lora_B.default.weight"].any()
    with infinity.Init(engine_config(folder=tmp_path, unit_size=4096)):
        model = adapted(seeded(Stack))
    found = start(model)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    save_file(seeded(Stack).state_dict(), tmp_path / "model.safetensors")
    base = on_meta(Stack)
    infinity.load_pretrained(base, tmp_path)
    torch.manual_seed(3)
    found = start(adapted(base))
    assert found.keys() == expected.keys() and not found["blocks.0.up.lora_B.default.weight"].any()
    assert all(torch.equal(value, found[name]) for name, value in expected.items() if "lora_A" not in name)


# -- transformers ------------------------------------------------------------------------------------------------------


def hugging_face(name: str) -> Any:
    pytest.importorskip("transformers")
    from support import hugging_face as models

    return getattr(models, name)


@pytest.mark.parametrize("unit_size", [4096, 1_000_000])
@pytest.mark.parametrize("within", [False, True], ids=["itself", "within another"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
def test_transformers(name: str, within: bool, unit_size: int) -> None:
    """transformers models start as on the cpu, though a block's rule edits layers in other units (gpt2, t5)."""
    make = hugging_face(name)

    def whole() -> nn.Module:
        return Around(make()) if within else make()

    built, found = seeded(whole).state_dict(), start(on_meta(whole), unit_size)
    assert found.keys() == built.keys()
    for key, value in found.items():
        spread = float(built[key].double().std())
        assert float(value.double().std()) == pytest.approx(spread, rel=0.35, abs=1e-6), key
        assert float(value.double().mean()) == pytest.approx(float(built[key].double().mean()), abs=0.5 * spread), key


def edited(model: Any) -> nn.Module:
    nn.init.zeros_(model.lm_head.weight)
    return model  # type: ignore[no-any-return]


def replaced(model: Any) -> nn.Module:
    model.lm_head = nn.Linear(32, 128, bias=False)
    return model  # type: ignore[no-any-return]


def strange(model: Any) -> nn.Module:
    model.model.layers[0].extra = nn.Bilinear(4, 4, 4)
    return model  # type: ignore[no-any-return]


def bare(model: Any) -> nn.Module:
    model.model.gate = nn.Parameter(torch.ones(3))
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (adapted, r"q_proj\..* \(Linear\) is on .*no part of the LlamaForCausalLM that its config describes"),
        (lambda model: adapted(model, freeze=False), r"no part of the LlamaForCausalLM that its config describes"),
        (edited, r"lm_head\.weight \(Linear\) .*was edited after LlamaForCausalLM was constructed"),
        (replaced, r"parameter .*lm_head\.weight \(Linear\)"),
        (strange, r"layers\.0\.extra\.weight \(Bilinear\)"),
        (bare, r"gate \(LlamaModel\)"),
    ],
    ids=["adapters", "adapters beside trained", "edited", "replaced", "strange", "bare"],
)
@pytest.mark.parametrize("within", [False, True], ids=["itself", "within another"])
def test_what_was_done_to_a_model_of_transformers(within: bool, change: Any, said: str) -> None:
    model = change(on_meta(hugging_face("llama")))
    with torch.device("meta"):  # parameters added on the cpu have values
        model = change(hugging_face("llama")())
    with pytest.raises(ModelError, match=said):
        start(Around(model) if within else model)


def test_adapters_with_values_on_a_model_of_transformers(tmp_path: Path) -> None:
    """Loaded values are kept, whatever adapters wrap them and however parameters are then named."""
    source: Any = seeded(hugging_face("llama"))
    source.save_pretrained(tmp_path)
    base = on_meta(hugging_face("llama"))
    infinity.load_pretrained(base, tmp_path)
    found = start(adapted(base))
    for name, value in found.items():
        if "lora_" in name:
            assert bool(value.any()) == ("lora_A" in name), name
        else:
            assert torch.equal(value, source.state_dict()[name.replace(".base_layer", "")]), name


def of_a_user(kind: str) -> type[Any]:
    """Return a user's class that transformers initialises, with a part that transformers does not know."""
    from transformers import LlamaForCausalLM

    class Own(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if kind == "edited":
                nn.init.zeros_(self.lm_head.weight)
            elif kind == "bare":
                self.gate = nn.Parameter(torch.ones(3))
            else:
                self.extra = nn.Bilinear(8, 8, 8) if kind == "strange" else nn.Linear(16, 16)
            self.post_init()

    return Own


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("edited", r"lm_head\.weight \(Linear\) .*was edited 2 times in place"),
        ("bare", r"parameter gate \(Own\) .*_init_weights\(\) does not set it"),
        ("strange", None),
        ("known", None),
    ],
)
def test_classes_of_users_over_transformers(kind: str, said: str | None) -> None:
    """Layers that the rule skips keep the values of their constructors."""
    config = copy.deepcopy(hugging_face("llama")().config)

    def make() -> nn.Module:
        return of_a_user(kind)(config)  # type: ignore[no-any-return]

    if said is not None:
        with pytest.raises(ModelError, match=said):
            start(on_meta(make))
        return
    built, found = seeded(make).state_dict(), start(on_meta(make))
    for key, value in found.items():
        spread = float(built[key].std())
        assert value.numel() < 32 or float(value.std()) == pytest.approx(spread, rel=0.4, abs=1e-6), key


def test_buffers_on_meta_leave_the_values_of_other_modules_alone() -> None:
    """Rules that make a buffer do not change other values of its module."""

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8, device="cpu")
            self.register_buffer("mask", torch.empty(3, device="meta"))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.inner.weight)
            self.mask.fill_(2)

    model: Any = Owner()
    expected = model.inner.weight.detach().clone()
    found = start(model)
    assert torch.equal(found["inner.weight"], expected) and found["mask"].tolist() == [2, 2, 2]
