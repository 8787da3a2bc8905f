"""Fused experts in tiles: outputs, gradients and state dicts of the untiled module, bit for bit."""

from __future__ import annotations

import copy
import importlib
import io
import logging
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ModelError, UsageError
from infinity.nn import TiledExperts, tile
from infinity.nn.pieces import Assembly, Pieces
from support.experts import CHOSEN, EXPERTS, config_of, made

pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = {
    "mixtral": "MixtralExperts",
    "gpt_oss": "GptOssExperts",  # transposed, with biases
    "nemotron_h": "NemotronHExperts",  # without a gate
    "aria": "AriaExperts",
    "llama4": "Llama4TextExperts",
}
CONFIGS = {
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "aria": "AriaTextForCausalLM",
    "llama4": "Llama4ForCausalLM",
}


def experts_of(model_type: str, implementation: str, dtype: torch.dtype) -> nn.Module:
    """Return fused experts with random values."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    kind = getattr(module, CLASSES[model_type])
    config = config_of(CONFIGS[model_type])
    for field in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if hasattr(config, field):
            setattr(config, field, EXPERTS)
    config._experts_implementation = implementation
    experts: nn.Module = kind(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return experts.to(dtype)


def run(experts: nn.Module, dtype: torch.dtype, hit: int = EXPERTS) -> dict[str, torch.Tensor]:
    """Return output and gradients. hit: number of experts that get rows."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(24, 32, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(24, CHOSEN, generator=generator).requires_grad_()
    index = torch.rand(24, hit, generator=generator).topk(CHOSEN).indices
    dense = "Llama4" in repr(experts)
    output = experts(hidden) if dense else experts(hidden, index, weights)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    found = {"output": output.detach(), "hidden": hidden.grad}
    found |= {} if dense else {"weights": weights.grad}
    pieces, whole = Pieces(experts), Assembly()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        found |= dict(whole.add([pieces.of(name.removeprefix("0."), parameter)], parameter.grad))
    return found  # type: ignore[return-value]


def tiled(experts: nn.Module, number: int) -> nn.Module:
    """Return a copy in `number` tiles."""
    holder = nn.Sequential(copy.deepcopy(experts))
    nbytes = sum(p.numel() * p.element_size() for p in experts.parameters())
    assert tile(holder, nbytes // EXPERTS * -(-EXPERTS // number)) == ["0"]
    made = holder[0]
    assert isinstance(made, TiledExperts) and len(made.counts) == number
    return made


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("model_type", CLASSES)
def test_tiles_give_the_bits_of_the_untiled_module(
    model_type: str, implementation: str, dtype: torch.dtype, number: int
) -> None:
    """Output, and gradients of hidden states, routing weights and all experts."""
    experts = experts_of(model_type, implementation, dtype)
    if model_type == "nemotron_h" and implementation == "eager" and dtype == torch.bfloat16:
        with pytest.raises(UsageError, match=r"NemotronHExperts with experts_implementation 'eager' sums .* in fp32"):
            run(tiled(experts, number), dtype)
        return
    expected, found = run(experts, dtype), run(tiled(experts, number), dtype)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if implementation == "batched_mm" and number == 8:  # torch.bmm of few matrices is another kernel
            torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_experts_without_rows_have_gradients_of_zeros(implementation: str) -> None:
    """As in the untiled module: an optimizer decays them and their moments."""
    experts = experts_of("mixtral", implementation, torch.float32)
    expected, found = (run(each, torch.float32, hit=CHOSEN) for each in (experts, tiled(experts, 8)))
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(found[name], expected[name]) and not found[name][CHOSEN:].any()


def test_tiles_without_rows_are_not_called_without_gradients() -> None:
    experts = experts_of("mixtral", "grouped_mm", torch.float32)
    parts = tiled(experts, 8)
    calls: list[int] = []
    for number, part in enumerate(parts.tiles):
        part.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    index = torch.tensor([[5, 1], [1, 6]])
    arguments = torch.randn(2, 32), index, torch.rand(2, 2)
    with torch.no_grad():
        found = parts(*arguments)
    assert calls == [1, 5, 6]
    assert torch.equal(found, experts(*arguments))
    calls.clear()
    parts(*arguments)
    assert calls == list(range(8))


def test_projections_of_sorted_rows() -> None:
    """JetMoE's: the second argument has the number of rows of each expert."""
    module = importlib.import_module("transformers.models.jetmoe.modeling_jetmoe")
    experts: nn.Module = module.JetMoeParallelExperts(EXPERTS, 32, 48)
    torch.nn.init.normal_(experts.weight)  # type: ignore[arg-type]
    parts = tiled(experts, 4)
    hidden, sizes = torch.randn(9, 32, requires_grad=True), [4, 0, 0, 0, 3, 1, 0, 1]
    output = parts(hidden, sizes)
    assert torch.equal(output, experts(hidden, sizes))
    found = torch.autograd.grad(output.square().sum(), [hidden, *parts.parameters()])
    expected = torch.autograd.grad(experts(hidden, sizes).square().sum(), [hidden, *experts.parameters()])
    assert torch.equal(found[0], expected[0]) and torch.equal(torch.cat(found[1:]), expected[1])
    called: list[int] = []
    for number, part in enumerate(parts.tiles):  # type: ignore[arg-type]
        part.register_forward_pre_hook(lambda *_, number=number: called.append(number))
    with torch.no_grad():
        assert torch.equal(parts(hidden, sizes), output)
        assert called == [0, 2, 3]
        assert parts(hidden[:0], [0] * EXPERTS).shape == (0, 48)


def test_no_tokens() -> None:
    experts = experts_of("mixtral", "grouped_mm", torch.float32)
    with torch.no_grad():
        empty = tiled(experts, 4)(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2))
    assert empty.shape == (0, 32)


def test_arguments_may_be_named() -> None:
    experts = experts_of("gpt_oss", "grouped_mm", torch.float32)
    hidden, index, weights = torch.randn(3, 32), torch.tensor([[0, 1], [2, 7], [4, 3]]), torch.rand(3, 2)
    found = tiled(experts, 4)(hidden, routing_weights=weights, router_indices=index)
    assert torch.equal(found, experts(hidden, index, weights))


# -- state dicts -------------------------------------------------------------------------------------------------------


def test_state_dicts_copies_and_pickles_have_all_experts() -> None:
    experts = experts_of("gpt_oss", "grouped_mm", torch.float32)
    parts = tiled(experts, 4)
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    loaded = tiled(experts_of("gpt_oss", "grouped_mm", torch.float32), 2)
    loaded.load_state_dict({name: value.clone() for name, value in experts.state_dict().items()})
    hidden, index, weights = torch.randn(3, 32), torch.tensor([[0, 1], [2, 7], [4, 3]]), torch.rand(3, 2)
    for each in (parts, copy.deepcopy(parts), torch.load(file, weights_only=False), loaded):
        states = each.state_dict()
        assert list(states) == list(experts.state_dict())
        assert all(torch.equal(states[name], value) for name, value in experts.state_dict().items())
        assert torch.equal(each(hidden, index, weights), experts(hidden, index, weights))


def test_tiles_are_views_and_begin_at_blocks_of_8_bit_moments() -> None:
    model = made()
    before = model.model.layers[0].mlp.experts.gate_up_proj.data_ptr()
    names = tile(model, 3 * 3 * 32 * 32 * 4)
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    parts = model.model.layers[0].mlp.experts
    assert parts.counts == [3, 3, 2] and parts.tiles[0].gate_up_proj.data_ptr() == before
    assert all(piece.blocks(256) for _, piece in parts.pieces())
    assert isinstance(parts.tiles[0], type(made().model.layers[0].mlp.experts)), "initial values depend on the class"


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_an_expert_larger_than_a_tile_is_refused() -> None:
    with pytest.raises(ModelError, match=r"experts cannot be replaced by tiles: one expert has 12288 bytes, more than"):
        tile(made(), 12287)


def test_experts_that_share_a_parameter_are_refused() -> None:
    model = made()
    model.model.layers[1].mlp.experts.post_expert_norm = nn.LayerNorm(32)
    with pytest.raises(ModelError, match=r"layers.1.mlp.experts .*: all of its experts share a parameter or buffer"):
        tile(model, 20_000)
    assert not any(isinstance(module, TiledExperts) for module in model.modules()), "refused before any change"


def test_classes_that_are_not_known_stay(caplog: pytest.LogCaptureFixture) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.num_experts = nn.Parameter(torch.zeros(8, 64, 32)), 8

    with caplog.at_level(logging.WARNING, "infinity"):
        assert tile(nn.Sequential(Experts()), 20_000) == []
    assert "fused experts of transformers are tiled. Larger than max_bytes remain: 0.gate_up_proj" in caplog.text


def test_other_implementations_are_refused() -> None:
    parts = tiled(experts_of("mixtral", "deepgemm", torch.float32), 4)
    with pytest.raises(UsageError, match="experts_implementation is 'deepgemm', and tiles of experts support eager"):
        run(parts, torch.float32)


def test_experts_of_other_ranks_are_refused() -> None:
    parts = tiled(experts_of("mixtral", "grouped_mm", torch.float32), 4)
    with pytest.raises(UsageError, match="a row is routed to expert 8, and the module has 8"):
        parts(torch.randn(1, 32), torch.tensor([[0, 8]]), torch.rand(1, 2))


def test_code_that_reads_the_tensors_is_refused() -> None:
    parts: Any = tiled(experts_of("mixtral", "grouped_mm", torch.float32), 4)
    with pytest.raises(AttributeError, match="gate_up_proj of fused experts is in their tiles"):
        _ = parts.gate_up_proj


def test_the_name_is_that_of_the_package() -> None:
    assert infinity.nn.TiledExperts is TiledExperts
