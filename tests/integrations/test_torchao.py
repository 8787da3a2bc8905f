"""torchao's quantised weights as frozen bases: stored by their inner tensors, on every tier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchao", reason="make test-integrations installs it")
for library in ("transformers", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

import infinity  # noqa: E402
from infinity.errors import ModelError  # noqa: E402
from infinity.tiers.device import CpuDevice  # noqa: E402
from support.configs import engine_config  # noqa: E402
from support.late_device import LateDevice  # noqa: E402
from support.lifetime import Residents, assert_nothing_leaked, pool_buffers  # noqa: E402
from support.loops import Result, assert_close, open_engine, parameters_of, plain, train, trained  # noqa: E402
from support.models import Linears, seeded, token_batches, vector_batches  # noqa: E402
from support.quantised import Adapted, Recomputed, adapted  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
WIDTH = 128
BATCHES = vector_batches(4, width=WIDTH)


def configs() -> dict[str, Any]:
    from torchao import quantization as ao

    return {
        "int8": ao.Int8WeightOnlyConfig(),
        "int8 with dynamic activations": ao.Int8DynamicActivationInt8WeightConfig(),
        "float8": ao.Float8WeightOnlyConfig(),
        "int4 in int8": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    }


KINDS = (*configs(), "nf4")
"""nf4 holds four inner tensors of three dtypes, and names its sizes in its context."""


def to_nf4(weight: torch.Tensor) -> torch.Tensor:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    made: torch.Tensor = to_nf4(weight, 64, 64)
    return made


def quantised(kind: str, layer: type[Adapted] = Adapted, dtype: torch.dtype = torch.float32) -> Linears:
    from torchao.quantization import quantize_

    make: Callable[..., Adapted] = partial(layer, WIDTH)
    model = adapted(to_nf4 if kind == "nf4" else lambda weight: weight, make, dtype=dtype)  # type: ignore[arg-type]
    if kind != "nf4":
        quantize_(model, configs()[kind], filter_fn=lambda _, name: name.endswith(".base"))
    return model


def adapters(result: Result) -> Result:
    return Result(result.losses, {name: v for name, v in result.parameters.items() if ".base.weight" not in name})


def values(weight: Any) -> torch.Tensor:
    """Return what the class computes with."""
    with torch.no_grad():
        return nn.functional.linear(torch.eye(WIDTH, dtype=weight.dtype), weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [Adapted, Recomputed])
@pytest.mark.parametrize(
    "stage, param, optim",
    [(3, "nvme", "nvme"), (3, "cpu", "cpu"), (3, "none", "none"), (2, "none", "cpu"), (0, "none", "none")],
)
def test_trains_like_a_plain_loop(stage: int, param: str, optim: str, layer: type[Adapted], kind: str) -> None:
    """The first loss has the same bits, later ones differ by AdamW's rounding alone. Nothing keeps a buffer."""
    config = engine_config(param, optim, stage=stage, prefetch_bytes=0)
    make = partial(quantised, kind, layer)
    expected = plain(seeded(make), BATCHES, config)
    model: Any = seeded(make)
    weights, before = [each.base.weight for each in model.layers], [values(each.base.weight) for each in model.layers]
    kinds = {type(weight) for weight in weights}
    with open_engine(model, config) as engine:
        residents = Residents(engine)
        result = Result(train(engine, BATCHES), parameters_of(engine))
        assert not engine.parts.store.kept.warned
        if param == "nvme":
            assert residents.most <= pool_buffers(engine) < len(engine.units)
        for weight, value in zip(weights, before, strict=True):
            assert torch.equal(values(weight), value)
        state = engine.state_dict()
        assert {type(value) for name, value in state.items() if name.endswith("base.weight")} == kinds
        assert torch.equal(values(state["layers.1.base.weight"]), before[1])
        assert_nothing_leaked(engine)
        engine.close(restore=True)
    assert result.losses[0] == expected.losses[0]
    assert_close(adapters(result), adapters(expected))
    assert {type(weight) for weight in weights} == kinds
    assert all(torch.equal(values(weight), value) for weight, value in zip(weights, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_places_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    """bf16, a late device and a resumed run, too."""
    batches = [tuple(each.bfloat16() for each in batch) for batch in BATCHES]
    make = partial(quantised, kind, dtype=torch.bfloat16)
    config = partial(engine_config, bf16=True, prefetch_bytes=0, folder=tmp_path)
    expected = trained(seeded(make), batches, config("none", "none"))
    assert expected.losses[0] == seeded(make)(*batches[0]).item()
    late = trained(seeded(make), batches, config("nvme", "cpu"), LateDevice())
    with open_engine(seeded(make), config("cpu", "nvme")) as engine:
        train(engine, batches[:2])
        engine.save_checkpoint(tmp_path)
    with open_engine(seeded(make, 1), config("nvme", "nvme")) as engine:
        engine.load_checkpoint(tmp_path)
        resumed = Result(expected.losses[:2] + train(engine, batches[2:]), parameters_of(engine))
    for other in (late, resumed):
        assert other.losses == expected.losses
        for name, value in other.parameters.items():
            same = expected.parameters[name].reshape(-1).view(torch.uint8)
            assert torch.equal(value.reshape(-1).view(torch.uint8), same), name


@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_in_inference(kind: str, param: str) -> None:
    expected = seeded(partial(quantised, kind))(*BATCHES[0])
    model = seeded(partial(quantised, kind))
    engine = infinity.init_inference(model, engine_config(param, prefetch_bytes=0), device=CpuDevice())
    with engine, torch.no_grad():
        for _ in range(2):
            assert torch.equal(engine(*BATCHES[0]), expected)


def llama(folder: Path) -> Any:
    """Return a small Llama that from_pretrained quantises, with PEFT's adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

    if not (folder / "base").exists():
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        seeded(lambda: LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))).save_pretrained(folder / "base")
    model = LlamaForCausalLM.from_pretrained(
        folder / "base", quantization_config=TorchAoConfig(configs()["int8"]), dtype=torch.float32
    )
    return seeded(lambda: get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])))


@pytest.mark.parametrize("param", ["none", "nvme"])
def test_peft_on_a_base_that_from_pretrained_quantises(param: str, tmp_path: Path) -> None:
    config = engine_config(param, prefetch_bytes=0, unit_size=40_000)
    batches = token_batches(3)

    def loss_of(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch[0], labels=batch[0]).loss
        return found

    expected = plain(llama(tmp_path), batches, config, loss_of)
    with open_engine(llama(tmp_path), config) as engine:
        losses = train(engine, batches, loss_of)
        assert not engine.parts.store.kept.warned
        assert any("qdata" in slot.name for unit in engine.units for slot in unit.layout.slots)
    assert losses[0] == expected.losses[0] and losses == pytest.approx(expected.losses, rel=1e-5)


def test_a_trainable_quantised_weight_is_refused_by_name(tmp_path: Path) -> None:
    model: Any = quantised("int8")
    model.layers[0].base.weight.requires_grad_(True)
    said = r"layers\.0\.base\.weight is a torchao\.\S*Int8Tensor that requires a gradient.*freeze it.*\.dequantize\(\)"
    with pytest.raises(ModelError, match=said):
        infinity.initialize(model, engine_config(), device=CpuDevice())
