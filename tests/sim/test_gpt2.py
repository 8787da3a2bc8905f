"""GPT-2 against transformers' own, and its initialisation module by module."""

import math
from collections.abc import Mapping

import pytest
import torch

from infinity.errors import ConfigError
from infinity.sim.gpt2 import GPT2, GPT2Config

SMALL = GPT2Config(vocab_size=61, seq_length=19, num_layers=3, hidden_size=24, num_attention_heads=3)


def small(**changes: object) -> GPT2Config:
    return GPT2Config(**{**vars(SMALL), **changes})


def tokens(b: int = 4, t: int = 17) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, (b, t), generator=torch.Generator().manual_seed(1))


def from_transformers(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of `transformers.GPT2LMHeadModel` with this module's names and (out, in) weights.

    `load_state_dict` takes it for a tied and for an untied model. The weights are views of the given ones.
    """
    converted = {}
    for name, tensor in state_dict.items():
        name = name.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks that old versions stored
            continue
        is_conv1d = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        converted[name] = tensor.t() if is_conv1d else tensor
    return converted


@pytest.mark.parametrize("tied", [True, False])
def test_same_weights_same_logits_and_gradients_as_transformers(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61, n_positions=19, n_embd=24, n_layer=3, n_head=3, tie_word_embeddings=tied,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
        )
    )  # fmt: skip
    for parameter in reference.parameters():  # biases and norms away from 0 and 1, so that each one shows
        parameter.data += 0.1 * torch.randn_like(parameter)
    model = GPT2(small(tie_word_embeddings=tied))
    model.load_state_dict(from_transformers(reference.state_dict()))

    ids = tokens()
    ours, theirs = model(ids), reference(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    model(ids[:, :-1], ids[:, 1:]).backward()
    reference(ids, labels=ids).loss.backward()
    expected = from_transformers({n: p.grad for n, p in reference.named_parameters()})
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=f"gradient of {name}")


@pytest.mark.parametrize("tied", [True, False])
def test_counts_its_parameters(tied: bool) -> None:
    config = small(tie_word_embeddings=tied)
    assert sum(p.numel() for p in GPT2(config).parameters()) == config.num_parameters


def test_checkpointed_activations_change_neither_loss_nor_gradient() -> None:
    kept, recomputed = GPT2(SMALL), GPT2(small(checkpoint_activations=True))
    recomputed.load_state_dict(kept.state_dict())
    ids = tokens()
    losses = [model(ids[:, :-1], ids[:, 1:]) for model in (kept, recomputed)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for a, b in zip(kept.parameters(), recomputed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_checkpointed_activations_are_not_kept() -> None:
    def saved_bytes(checkpoint_activations: bool) -> int:
        model, ids, storages = GPT2(small(checkpoint_activations=checkpoint_activations)), tokens(), {}
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = (storage, storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(ids, ids)
        assert loss.requires_grad
        return sum(nbytes for _, nbytes in storages.values())

    assert saved_bytes(True) < 0.35 * saved_bytes(False)


def test_modules_materialised_one_at_a_time_are_initialised_like_the_whole() -> None:
    config = small(vocab_size=503, hidden_size=96)
    with torch.device("meta"):
        model = GPT2(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.lm_head.weight = model.wte.weight  # `to_empty` makes two of it
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    for module in reversed(list(model.modules())):
        model.initialize_module(module)
    residual = config.init_std / math.sqrt(2 * config.num_layers)
    for name, parameter in model.named_parameters():
        if ".ln_" in name or name.startswith("ln_f"):
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight"))))
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter))
        else:
            std = residual if "c_proj" in name else config.init_std
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
    assert model(tokens()[:, :-1], tokens()[:, 1:]).item() == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_untied_head_is_a_parameter_of_its_own() -> None:
    model = GPT2(small(tie_word_embeddings=False))
    assert "lm_head.weight" in dict(model.named_parameters())
    assert model.lm_head.weight is not model.wte.weight


def test_trains_in_bf16() -> None:
    model = GPT2(SMALL).to(torch.bfloat16)
    ids = tokens()
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="hidden_size 25 is not a multiple of num_attention_heads 3"):
        small(hidden_size=25)
    with pytest.raises(ConfigError, match="num_layers must be at least 1"):
        small(num_layers=0)
    with pytest.raises(ConfigError, match="20 tokens is longer than the model's seq_length 19"):
        GPT2(SMALL)(tokens(1, 20))
