"""`load_pretrained`: the engine starts with the folder's values; mismatches are reported at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity.checkpoint.export import export
from infinity.checkpoint.tensors import Spec, write_tensors
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, UsageError
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

BATCHES = token_batches(4)


class Normed(nn.Module):
    """A model with persistent buffers, a non-persistent one, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.scale * x).square().mean()


class Wrapped(nn.Module):
    """A model that contains another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *batch: Any) -> Any:
        return self.inner(*batch)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def disturbed(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with parameters and buffers that no initialisation produces."""
    model = seeded(make, 3)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.add_(torch.rand_like(value))
    return model


def written(model: nn.Module, folder: Path, **others: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Save the state_dict to the folder, with changes or (None) without some entries; return the model's state_dict."""
    folder.mkdir(exist_ok=True)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    changed = {name.replace("__", "."): value for name, value in others.items()}
    kept = {name: value for name, value in (state | changed).items() if value is not None}
    save_file(kept, folder / "model.safetensors")
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def engine_of(model: nn.Module, **options: Any) -> TrainingEngine:
    return open_engine(model, engine_config(**options))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_model_on_meta_starts_as_one_that_holds_the_values(tmp_path: Path, bf16: bool, tied: bool) -> None:
    def make() -> nn.Module:
        return Stack(tied=tied)

    written(disturbed(make), tmp_path)
    with engine_of(disturbed(make), bf16=bf16) as engine:
        expected = states_of(engine)
        losses = train(engine, BATCHES)
    model = on_meta(make)
    assert infinity.load_pretrained(model, tmp_path) == ([], [])
    with engine_of(model, bf16=bf16, param="cpu", unit_size=20_000) as engine:
        assert same(states_of(engine), expected)
        assert train(engine, BATCHES) == losses


def test_a_model_with_values_gets_them_at_once(tmp_path: Path) -> None:
    expected = written(disturbed(Normed), tmp_path)
    model = seeded(Normed)
    infinity.load_pretrained(model, tmp_path)
    assert same(model.state_dict(), expected)


@pytest.mark.parametrize("make", [Normed, Stack])
def test_a_model_within_another(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    """Buffers and frozen parameters of the inner model are loaded, too."""
    expected = written(disturbed(make), tmp_path)
    inner = on_meta(make)
    if make is Normed:
        inner.scale = torch.ones(1)
    infinity.load_pretrained(inner, tmp_path)
    with engine_of(Wrapped(inner)) as engine:
        assert same(engine.state_dict(), {f"inner.{name}": value for name, value in expected.items()})


def test_what_was_exported_comes_back(tmp_path: Path) -> None:
    with engine_of(seeded(Stack), bf16=True) as engine:
        train(engine, BATCHES)
        engine.save_checkpoint(tmp_path / "saved")
        params, masters = engine.state_dict(), states_of(engine)
    for dtype, size in ((None, "20kB"), ("fp32", "5GB")):
        out = export(tmp_path / "saved", tmp_path / str(dtype), dtype=dtype, max_shard_size=size)
        model = on_meta(Stack)
        infinity.load_pretrained(model, out)
        with engine_of(model, bf16=True) as engine:
            assert same(engine.state_dict(), params)
            if dtype == "fp32":
                found = states_of(engine)
                assert all(torch.equal(found[name], masters[name]) for name in masters if name.endswith("/master"))


def test_a_shared_parameter_may_have_any_of_its_names(tmp_path: Path) -> None:
    full = written(disturbed(lambda: Stack(tied=True)), tmp_path, embedding__weight=None)
    model = on_meta(lambda: Stack(tied=True))
    infinity.load_pretrained(model, tmp_path)
    with engine_of(model) as engine:
        assert same(engine.state_dict(), full)
    written(disturbed(lambda: Stack(tied=True)), tmp_path, head__weight=torch.zeros_like(full["head.weight"]))
    with pytest.raises(
        CheckpointError, match=r"embedding\.weight and head\.weight differ, and are one parameter in the model"
    ):
        infinity.load_pretrained(on_meta(lambda: Stack(tied=True)), tmp_path)


class Sharing(nn.Module):
    """Two modules with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.second.register_buffer("scale", self.first.scale)


@pytest.mark.parametrize("stored", ["first.scale", "second.scale"])
def test_a_shared_buffer_is_loaded_under_any_name(tmp_path: Path, stored: str) -> None:
    """It stays shared, also where it was on the meta device."""
    save_file({stored: torch.tensor([5.0, 7.0])}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for model in (Sharing(), on_meta(Sharing)):
        infinity.load_pretrained(model, tmp_path)
        assert model.first.scale is model.second.scale and model.first.scale.tolist() == [5.0, 7.0]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"head__weight": None}, r"head\.weight is in the model only \(strict=False loads the rest\)"),
        ({"extra": torch.zeros(2)}, r"extra is in the folder only \(strict=False"),
        ({f"extra{n}": torch.zeros(2) for n in range(5)}, r"; and 2 more"),
        ({"head__weight": torch.zeros(3, 2)}, r"head\.weight has shape \[61, 32\] in the model and \[3, 2\] in the f"),
        ({"head__weight": torch.zeros(61, 32, dtype=torch.int8)}, r"head\.weight is torch\.float32 in the model and"),
    ],
    ids=["missing", "unexpected", "many", "shape", "kind"],
)
def test_what_does_not_fit_is_one_error_and_changes_nothing(tmp_path: Path, others: Any, said: str) -> None:
    written(disturbed(Stack), tmp_path, **others)
    model = seeded(Stack)
    with pytest.raises(CheckpointError, match=said):
        infinity.load_pretrained(model, tmp_path)
    assert same(model.state_dict(), seeded(Stack).state_dict())


def test_what_is_missing_is_initialised_as_usual_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Missing parameters get their usual initialisation; buffers and other parameters come from the folder."""
    names = ("blocks.0.0.weight", "blocks.2.1.bias")
    others = {name.replace(".", "__"): None for name in names}
    expected = written(disturbed(Normed), tmp_path, strange=torch.zeros(1), **others)

    def made(load: bool) -> dict[str, torch.Tensor]:
        model = on_meta(Normed)
        model.scale = torch.ones(1)
        if load:
            found = infinity.load_pretrained(model, tmp_path, strict=False)
            assert found == (list(names), ["strange"])
        torch.manual_seed(5)
        with engine_of(model) as engine:
            return engine.state_dict()

    usual, loaded = made(False), made(True)
    for name, value in loaded.items():
        assert torch.equal(value, usual[name] if name in names else expected[name]), name
    assert [record.getMessage() for record in caplog.records if "missing: blocks.0.0.weight" in record.getMessage()]
    with pytest.raises(CheckpointError, match="has shape"):
        written(disturbed(Normed), tmp_path, blocks__0__0__bias=torch.zeros(3))
        infinity.load_pretrained(on_meta(Normed), tmp_path, strict=False)


def test_values_are_cast_to_the_model(tmp_path: Path) -> None:
    """Values are cast from bf16 without loss, and an fp32 master gets the full precision of the folder."""
    exact = disturbed(Stack)
    written(exact.bfloat16(), tmp_path)
    model = on_meta(Stack)
    infinity.load_pretrained(model, tmp_path)
    with engine_of(model) as engine:
        assert all(torch.equal(v, exact.state_dict()[name].float()) for name, v in engine.state_dict().items())
    fine = written(disturbed(Stack), tmp_path)
    model = on_meta(lambda: Stack().bfloat16())
    infinity.load_pretrained(model, tmp_path)
    with engine_of(model, bf16=True) as engine:
        assert all(torch.equal(states_of(engine)[f"{name}/master"], value) for name, value in fine.items())


@pytest.mark.parametrize("what", ["no folder", "bin", "cut", "index", "outside", "lost", "gone"])
def test_damage(tmp_path: Path, what: str) -> None:
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    written(disturbed(Stack), tmp_path)
    if what in ("no folder", "bin"):
        file.unlink()
    elif what == "cut":
        os.truncate(file, 5000)
    else:
        file.rename(tmp_path / "a.safetensors")
        names = {"outside": {"head.weight": "../a"}, "lost": {"x": "a.safetensors"}, "gone": {"x": "b.safetensors"}}
        index.write_text("[]" if what == "index" else json.dumps({"weight_map": names[what]}))
    model = seeded(Stack)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        infinity.load_pretrained(model, tmp_path / "none" if what == "no folder" else tmp_path)
    assert same(model.state_dict(), seeded(Stack).state_dict())


def test_a_folder_that_is_gone_when_the_engine_is_made(tmp_path: Path) -> None:
    written(disturbed(Stack), tmp_path)
    model = on_meta(Stack)
    infinity.load_pretrained(model, tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match="cannot be read from"):
        engine_of(model)


def test_a_model_of_an_engine_is_refused(tmp_path: Path) -> None:
    model = seeded(Stack)
    written(model, tmp_path)
    with engine_of(model), pytest.raises(UsageError, match=r"before infinity\.initialize"):
        infinity.load_pretrained(model, tmp_path)


def peak_growth(work: Callable[[], Any]) -> int:
    """Return by how many bytes the process's memory peaked while `work` ran. Frees the result of `work`."""

    def memory(of: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(of))

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        pytest.skip("the system does not let a process forget its peak of memory")
    before = memory("VmRSS")
    kept = work()
    peak = memory("VmHWM") - before
    del kept
    return peak


def test_loading_takes_the_memory_of_a_few_units(tmp_path: Path) -> None:
    """300 MB of parameters in fp32, trained in bf16. Besides the engine's own buffers there are a unit's master and
    parameter, what is mapped of its file, and tiles.
    """
    width, depth = 1792, 24
    unit = 4 * width * width
    specs = {f"{number}.weight": Spec(torch.float32, (width, width)) for number in range(depth)}
    write_tensors(tmp_path / "model.safetensors", specs, lambda name: [torch.zeros(width, width)])

    def make() -> nn.Module:
        return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def work() -> TrainingEngine:
        model = on_meta(make)
        infinity.load_pretrained(model, tmp_path)
        return engine_of(model, folder=tmp_path, bf16=True, unit_size="64MiB", tile_size=1 << 20, debug=False)

    with engine_of(seeded(Stack)):
        pass  # what is loaded once per process is loaded
    engines: list[TrainingEngine] = []
    peak = peak_growth(lambda: engines.append(work()))
    held = engines[0].ledger.tier_bytes()
    engines[0].close()
    beside = peak - held["device"] - held["host"]
    assert beside < 6 * unit, f"{beside / unit:.1f} units of {depth}"
