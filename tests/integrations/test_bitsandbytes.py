"""bitsandbytes' layers as frozen bases: bits of a plain loop from every tier, and runs of Trainer, PEFT and TRL."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

for library in ("bitsandbytes", "trl", "datasets", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

import bitsandbytes as bnb  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import infinity  # noqa: E402
from infinity.checkpoint.export import export  # noqa: E402
from infinity.errors import CheckpointError, UsageError  # noqa: E402
from infinity.tiers.device import CpuDevice  # noqa: E402
from integrations.hugging_face import TWO_RANKS, measure  # noqa: E402
from support.configs import engine_config  # noqa: E402
from support.late_device import LateDevice  # noqa: E402
from support.lifetime import Residents, assert_nothing_leaked, pool_buffers  # noqa: E402
from support.loops import Result, assert_close, open_engine, parameters_of, plain, plain_bf16, train  # noqa: E402
from support.models import Linears, seeded, vector_batches  # noqa: E402
from support.quantised import Adapted, Recomputed, adapted  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
WIDTH = 128
BATCHES = vector_batches(4, width=WIDTH)
KINDS = ("nf4", "nf4 twice", "fp4 in bf16", "int8", "int8 with outliers")


def quantised(kind: str, layer: type[Adapted] = Adapted, dtype: torch.dtype = torch.float32) -> Linears:
    """Return adapted layers over frozen layers of bitsandbytes. twice: the scales are quantised too."""
    model = adapted(lambda weight: weight, partial(layer, WIDTH), dtype=dtype)  # type: ignore[arg-type]
    for each in model.layers:
        base: Any = each.base
        weight, bias = base.weight.detach().clone(), base.bias
        if kind.startswith("int8"):
            made = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False, threshold=6.0 * kind.endswith("outliers"))
            made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            storage = torch.bfloat16 if kind.endswith("bf16") else torch.uint8
            made = bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=dtype, quant_storage=storage)
            options = {"quant_type": kind[:3], "compress_statistics": kind.endswith("twice"), "quant_storage": storage}
            made.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=made, **options)
        made.bias = bias
        each.base = made.to("cpu")
    return model


def trained_parts(result: Result) -> Result:
    return Result(result.losses, {name: v for name, v in result.parameters.items() if ".base." not in name})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [Adapted, Recomputed])
@pytest.mark.parametrize(
    "stage, param, optim",
    [
        *((3, param, optim) for param in ("none", "cpu", "nvme") for optim in ("none", "cpu", "nvme")),
        *((stage, "none", "cpu") for stage in (0, 1, 2)),
    ],
)
def test_trains_like_a_plain_loop(stage: int, param: str, optim: str, layer: type[Adapted], kind: str) -> None:
    """The first loss has the same bits, later ones differ by AdamW's rounding alone. Nothing keeps a buffer."""
    config = engine_config(param, optim, stage=stage, prefetch_bytes=0)
    make = partial(quantised, kind, layer)
    expected = plain(seeded(make), BATCHES, config)
    model = seeded(make)
    with open_engine(model, config) as engine:
        residents = Residents(engine)
        result = Result(train(engine, BATCHES), parameters_of(engine))
        assert not engine.parts.store.kept.warned
        if param == "nvme":
            assert residents.most <= pool_buffers(engine) < len(engine.units)
        assert_nothing_leaked(engine)
        engine.close(restore=True)
    assert result.losses[0] == expected.losses[0]
    assert_close(trained_parts(result), trained_parts(expected))
    reference = seeded(make)
    for mine, theirs in zip(model.layers, reference.layers, strict=True):
        assert torch.equal(mine.base(BATCHES[0][0]), theirs.base(BATCHES[0][0]))  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_places_have_the_same_bits(kind: str) -> None:
    """A late device, bf16 and other schedules, too."""
    batches = [tuple(each.bfloat16() for each in batch) for batch in BATCHES]
    make = partial(quantised, kind, dtype=torch.bfloat16)
    found = []
    for place, device in ((("none", "none"), None), (("cpu", "nvme"), None), (("nvme", "cpu"), LateDevice())):
        with open_engine(seeded(make), engine_config(*place, bf16=True, prefetch_bytes=0), device) as engine:
            found.append(Result(train(engine, batches), parameters_of(engine)))
    expected = plain_bf16(seeded(make), batches, engine_config(bf16=True))
    assert expected.losses[0] == found[0].losses[0]
    for other in found:
        assert other.losses == found[0].losses
        for name, value in other.parameters.items():  # as bytes: codes in bf16 may be NaN
            same = found[0].parameters[name].reshape(-1).view(torch.uint8)
            assert torch.equal(value.reshape(-1).view(torch.uint8), same), name
        assert_close(trained_parts(other), trained_parts(expected), loss=1e-2, parameters=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_stored_with_their_weight(kind: str, tmp_path: Path) -> None:
    """A checkpoint of one base loads over another one. A state_dict has the names of bitsandbytes."""
    model = seeded(partial(quantised, kind))
    with open_engine(model, engine_config(folder=tmp_path, prefetch_bytes=0)) as engine:
        expected: Any = seeded(partial(quantised, kind))
        if not kind.startswith("int8"):
            name = "layers.0.base.weight.absmax"
            assert torch.equal(engine.state_dict()[name], expected.layers[0].base.weight.quant_state.absmax)
        for name, value in model.state_dict().items():
            assert (
                torch.equal((value + 0).view(-1), (expected.state_dict()[name] + 0).view(-1))
                or value.is_floating_point()
            )
        engine.save_checkpoint(tmp_path / "saved")
    other: Any = seeded(partial(quantised, kind), 1)
    with open_engine(other, engine_config(folder=tmp_path)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        engine.close(restore=True)
    assert torch.equal(other.layers[0].base(BATCHES[0][0]), expected.layers[0].base(BATCHES[0][0]))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_and_weights_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    """They hold what bitsandbytes needs to build the layers again. Trained weights alone are written on request."""

    def alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
        def content(value: torch.Tensor) -> torch.Tensor:  # codes in bf16 may be NaN
            return value.contiguous().reshape(-1).view(torch.uint8)

        return found.keys() == expected.keys() and all(
            found[name].dtype == value.dtype and torch.equal(content(found[name]), content(value))
            for name, value in expected.items()
        )

    make = partial(quantised, kind)
    expected = seeded(make).state_dict()
    with open_engine(seeded(make), engine_config(folder=tmp_path, prefetch_bytes=0)) as engine:
        assert alike(engine.state_dict(), expected)
        engine.save_16bit_model(tmp_path, "all.safetensors")
        engine.save_16bit_model(tmp_path, "trained.safetensors", exclude_frozen_parameters=True)
        engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"base\.weight is a quantised weight .*save_16bit_model"):
        export(tmp_path / "saved", tmp_path / "out")
    assert alike(load_file(tmp_path / "all.safetensors"), expected)
    trained = {name: value for name, value in expected.items() if ".base." not in name}
    assert alike(load_file(tmp_path / "trained.safetensors"), trained)


def test_other_names_of_a_layers_tensors_and_its_buffers() -> None:
    """A state_dict has each name once."""

    def shared() -> Linears:
        model: Any = quantised("nf4")
        base = model.layers[0].base
        base.bias.requires_grad_(False)
        model.also = base.bias
        base.register_buffer("scale", torch.ones(2))
        return model  # type: ignore[no-any-return]

    with open_engine(seeded(shared), engine_config(prefetch_bytes=0)) as engine:
        found = [name for name, _ in engine.stream_state_dict()]
        assert sorted(found) == sorted(seeded(shared).state_dict())


def test_embeddings_in_4_bits_whose_class_writes_no_state_dict(tmp_path: Path) -> None:
    """Trained weights are written, and the engine yields codes and scales under its own names."""

    class Embedded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = bnb.nn.EmbeddingNF4(64, WIDTH).requires_grad_(False)
            self.head = torch.nn.Linear(WIDTH, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.emb(tokens).float()).square().mean()  # type: ignore[no-any-return]

    model = Embedded().to("cpu")
    with open_engine(model, engine_config(folder=tmp_path, prefetch_bytes=0)) as engine:
        engine.backward(engine(torch.arange(8)))
        engine.step()
        assert {"emb.weight", "emb.weight.absmax"} < engine.state_dict().keys()
        engine.save_16bit_model(tmp_path, "trained.safetensors", exclude_frozen_parameters=True)
    assert load_file(tmp_path / "trained.safetensors").keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_ctrl_c_in_a_layer_leaves_nothing_of_the_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks after a forward are not called then: the layer's bias and codes are its own again once it is closed."""
    model: Any = seeded(partial(quantised, kind))
    for each in model.layers:
        each.base.bias.requires_grad_(False)
    expected = seeded(partial(quantised, kind))(*BATCHES[0])
    engine = open_engine(model, engine_config("cpu", "cpu", prefetch_bytes=0))

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bnb, "matmul_4bit" if kind == "nf4" else "matmul", interrupted)
        engine(*BATCHES[0])
    engine.close(restore=True)
    base = model.layers[0].base
    assert "bias" not in vars(base) and base.bias is base._parameters["bias"]
    assert torch.equal(model(*BATCHES[0]), expected)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("format", ["8bit", "nf4"])
def test_codes_are_no_values_that_the_engine_rounds(format: str, storage: torch.dtype) -> None:
    """`infinity.frozen` codes 16-bit weights. Those of bitsandbytes are codes, also if they are stored as floats."""

    def mixed() -> Linears:
        model = seeded(partial(quantised, "nf4"))
        for each in model.layers:
            base: Any = each.base
            made = bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_storage=storage)
            made.weight = bnb.nn.Params4bit(
                torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=False, module=made, quant_storage=storage
            )
            made.bias = base.bias
            each.base = made.to("cpu")
        return model

    expected = seeded(mixed)(*BATCHES[0])
    with open_engine(seeded(mixed), engine_config(frozen=format)) as engine:
        assert torch.equal(engine(*BATCHES[0]), expected)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("computes", [torch.bfloat16, torch.float16])
def test_a_bias_of_another_dtype_is_cast_as_in_a_plain_loop(computes: torch.dtype, kind: str) -> None:
    """bitsandbytes assigns the bias, in the dtype of its input, to `bias.data`; the stored one keeps its values."""

    class Cast(Adapted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.base(x.to(computes)).to(x.dtype) + self.up(self.down(x))
            return out

    def biased() -> Linears:
        model = quantised(kind, Cast)
        for each in model.layers:
            base: Any = each.base
            base.bias = torch.nn.Parameter(torch.randn(WIDTH) / 8, requires_grad=False)
            base.compute_dtype, base.compute_type_is_set = computes, True
        return model

    config = engine_config(prefetch_bytes=0)
    expected = seeded(biased)(*BATCHES[0])
    with open_engine(seeded(biased), config) as engine:
        for _ in range(2):
            assert torch.equal(engine(*BATCHES[0]), expected)
        stored = engine.state_dict()["layers.0.base.bias"]
        assert stored.dtype == torch.float32
        assert torch.equal(stored, seeded(biased).layers[0].base.bias)  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_compiled_layers_with_a_frozen_bias(kind: str) -> None:
    def biased() -> Linears:
        model = quantised(kind)
        for each in model.layers:
            each.base.bias = torch.nn.Parameter(torch.randn(WIDTH) / 8, requires_grad=False)  # type: ignore[union-attr]
        return model

    expected = plain(seeded(biased), BATCHES, engine_config())
    model = seeded(biased)
    for number, each in enumerate(model.layers):
        model.layers[number] = torch.compile(each, backend="eager")  # type: ignore[assignment]
    with open_engine(model, engine_config(prefetch_bytes=0)) as engine:
        losses = train(engine, BATCHES)
    assert losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("packed", [False, True])
def test_runs_in_inference(packed: bool, kind: str, param: str) -> None:
    """Results are those of the layout in which weights are stored, also where a forward had packed them for the CPU.

    Packing rounds the scales, so a reference is packed and unpacked too (`state_dict` unpacks).
    """
    model, reference = (seeded(partial(quantised, kind)).eval() for _ in range(2))
    with torch.no_grad():
        if packed:
            model(*BATCHES[0])
            reference(*BATCHES[0])
            reference.state_dict()
        for each in reference.layers:
            each.base.support_avx512bf16_for_cpu = False  # type: ignore[union-attr]
        expected = reference(*BATCHES[0])
        with infinity.init_inference(model, engine_config(param, prefetch_bytes=0), device=CpuDevice()) as engine:
            for _ in range(2):
                assert torch.equal(engine(*BATCHES[0]), expected)
            assert_nothing_leaked(engine)  # type: ignore[arg-type]


def test_a_closed_engine_leaves_no_values() -> None:
    model: Any = quantised("int8")
    with open_engine(model, engine_config()) as engine:
        train(engine, BATCHES[:1])
    with pytest.raises(UsageError, match="engine is closed"):
        model(*BATCHES[0])


# -- Hugging Face ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure("bitsandbytes_script.py", tmp_path_factory.mktemp("bitsandbytes"), "nf4", "int8", "trl", "wide")[0]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_trainer_and_peft(kind: str, results: dict[str, Any]) -> None:
    """Stages 2 and 3 and nvme equal the plain Trainer; the saved adapter loads over a new base, and merges."""
    assert isinstance(results[kind], list), results[kind]
    plainly, *others = results[kind]
    assert len(others) == 3
    for ours in others:
        assert ours["loss"] == pytest.approx(plainly["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(plainly["grad_norm"], rel=1e-4)
        assert ours["final"] == pytest.approx(plainly["final"], rel=1e-4)
        assert not ours["kept"]
        assert ours["files"] == plainly["files"] and ours["distance"] < 1e-3 < ours["moved"]
        assert ours["moved"] == pytest.approx(plainly["moved"], rel=1e-2)
        assert ours["merged"] == pytest.approx(plainly["merged"], rel=0.1)  # rounded to codes once more


def test_trl(results: dict[str, Any]) -> None:
    """SFTTrainer's adapters are bf16 and have no master, which an engine adds."""
    assert isinstance(results["trl"], list), results["trl"]
    plainly, *others = results["trl"]
    assert others[0] == others[1]
    for ours in others:
        assert ours["loss"] == pytest.approx(plainly["loss"], rel=2e-3)
        assert ours["final"] == pytest.approx(plainly["final"], rel=2e-3)


def test_two_ranks(tmp_path: Path, results: dict[str, Any]) -> None:
    """Both kinds on two ranks have the losses of one rank with batches of twice the size."""
    for ranks in measure("bitsandbytes_script.py", tmp_path, "ranks", launcher=TWO_RANKS):
        assert isinstance(ranks["ranks"], list), ranks["ranks"]
        for plainly, ours in zip(results["wide"], ranks["ranks"], strict=True):
            for run in ours:
                assert run["loss"] == pytest.approx(plainly["loss"], rel=1e-4)
                assert run["final"] == pytest.approx(plainly["final"], rel=1e-4)
