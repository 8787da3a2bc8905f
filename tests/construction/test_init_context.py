"""`infinity.Init`: models are bit-identical to those built without it, and ordinary, with most values on disk."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as torch_module

import infinity
from infinity.config import Config
from infinity.construction.init_context import NotedParameters, Spill
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, ModelError, OutOfSpaceError, StorageError
from infinity.tiers.device import CpuDevice
from support.configs import PLACEMENTS, engine_config
from support.descriptors import open_files
from support.loops import train
from support.mapped import in_file, kept
from support.models import Stack, seeded, token_batches
from support.states import states_of

TINY = 4096
"""`unit_size`: a quarter of what may be in memory. One weight of `Stack` is as much as that."""


def tiny(folder: Path, **options: Any) -> Config:
    return engine_config(folder=folder, unit_size=TINY, **options)


def built(folder: Path, make: Callable[[], nn.Module] = Stack) -> nn.Module:
    """Return a model with most of its values on disk."""
    with infinity.Init(tiny(folder)):
        model = seeded(make)
    assert kept(model.parameters()) > 0.7
    return model


def spill_of(model: nn.Module) -> Spill:
    found = {m._parameters.spill for m in model.modules() if isinstance(m._parameters, NotedParameters)}
    assert len(found) == 1
    return found.pop()


def walk(model: nn.Module) -> None:
    """Use every parameter, so that those used before are evicted."""
    for _ in range(2):
        for parameter in model.parameters():
            assert parameter.numel()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(keep_vars=True), other.state_dict(keep_vars=True)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype and value.stride() == theirs[name].stride(), name
        assert value.requires_grad == theirs[name].requires_grad, name
        assert torch.equal(value, theirs[name]), name


def files_in_use() -> list[str]:
    """Return the paths of files that this process has open or mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [*open_files(), *(line.split(maxsplit=5)[-1] for line in maps)]


# -- values ------------------------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    """Changes values after construction from outside of their modules, as `post_init` does, and draws more random
    numbers.
    """

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.stack = Stack(tied=tied)
        self.apply(self._init_weights)
        for parameter in self.parameters():
            parameter.data.add_(torch.randn(()))
        self.scale = nn.Parameter(torch.rand(3))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.stack(tokens, targets) * self.scale.sum()
        return loss


def encoder() -> nn.Module:
    """Return an encoder, whose layers are deep copies of one."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "tied": lambda: Stack(tied=True),
    "shifted": Shifted,
    "shifted and tied": lambda: Shifted(tied=True),
    "copied": encoder,
    "recurrent": lambda: nn.LSTM(32, 64, num_layers=3),
    "convolutions": lambda: nn.Sequential(*(nn.Conv2d(32, 32, 3) for _ in range(3))).to(
        memory_format=torch.channels_last
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_ordinary_construction(name: str, tmp_path: Path) -> None:
    make = MODELS[name]
    expected = seeded(make)
    after = torch.rand(3)
    with infinity.Init(tiny(tmp_path)):
        model = seeded(make)
        assert torch.equal(torch.rand(3), after)
    assert_same(model, expected)
    walk(model)
    assert kept(model.parameters()) > 0.3
    assert_same(model, expected)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tied", "shifted", "copied"])
def test_engines_start_and_train_the_same(name: str, bf16: bool, tmp_path: Path) -> None:
    config = tiny(tmp_path, bf16=bf16)

    def outcome(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[float]]:
        with TrainingEngine(model, config, device=CpuDevice()) as engine:
            values = states_of(engine) | engine.state_dict()
            return values, train(engine, token_batches(2)) if name != "copied" else []

    expected, losses = outcome(seeded(MODELS[name]))
    with infinity.Init(config):
        model = seeded(MODELS[name])
    values, found = outcome(model)
    assert values.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in values.items())
    assert found == losses


@pytest.mark.parametrize(("param", "optim"), PLACEMENTS)
def test_every_placement(param: str, optim: str, tmp_path: Path) -> None:
    """Init builds in a folder only if a state is on nvme; otherwise it changes nothing."""
    config = tiny(tmp_path, param=param, optim=optim)
    with infinity.Init(config):
        model = seeded(Stack)
    somewhere = "nvme" in (param, optim)
    assert (kept(model.parameters()) > 0) == somewhere
    assert isinstance(model.head._parameters, NotedParameters) == somewhere
    with TrainingEngine(model, config, device=CpuDevice()) as engine:
        found = engine.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in seeded(Stack).state_dict().items())


def test_a_config_in_every_form(tmp_path: Path) -> None:
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "infinity": {"unit_size": TINY},
    }
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(raw))
    schedules = [{"total_num_steps": "auto", "warmup_num_steps": steps} for steps in ("auto", 5)]
    for_trainers = [
        {**raw, "train_micro_batch_size_per_gpu": "auto", "scheduler": {"type": "WarmupDecayLR", "params": schedule}}
        for schedule in schedules
    ]
    for config in (raw, path, str(path), Config.load(raw), *for_trainers):
        with infinity.Init(config=config):
            model = seeded(Stack)
        assert kept(model.parameters()) > 0.7
    with pytest.raises(ConfigError):
        infinity.Init({"zero_optimisation": {}})


# -- what people do to models ------------------------------------------------------------------------------------------


def held(model: nn.Module) -> list[nn.Parameter]:
    """All parameters, held while others are used: every one of them is in a file by then, or was."""
    parameters = list(model.parameters())
    walk(model)
    return parameters


@torch.no_grad()
def edit_held(model: nn.Module) -> None:
    for parameter in held(model):
        parameter.add_(1).mul_(2)


def edit_data(model: nn.Module) -> None:
    for parameter in held(model):
        parameter.data.mul_(3)


def assign_data(model: nn.Module) -> None:
    for number, parameter in enumerate(held(model)):
        parameter.data = torch.full_like(parameter, number, dtype=torch.bfloat16 if number % 2 else None)


def edit_state_dict(model: nn.Module) -> None:
    """Edit a state_dict, which consists of views."""
    state = model.state_dict()
    walk(model)
    for value in state.values():
        value.sub_(1)


def edit_views(model: nn.Module) -> None:
    views = [parameter.detach()[0] for parameter in model.parameters()]
    arrays = [parameter.detach().numpy() for parameter in model.parameters()]
    walk(model)
    for view, array in zip(views, arrays, strict=True):
        view.add_(1)
        array *= 2


def load(model: nn.Module) -> None:
    state = {name: torch.full_like(value, 0.5) for name, value in Stack().state_dict().items()}
    model.load_state_dict(state)
    walk(model)


def load_assigned(model: nn.Module) -> None:
    state = {name: torch.full_like(value, 0.5, dtype=torch.float64) for name, value in Stack().state_dict().items()}
    model.load_state_dict(state, assign=True)
    walk(model)


def step(model: nn.Module) -> None:
    """Step with an optimizer, and gradients, from before other parameters were used."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in held(model):
        parameter.grad = torch.ones_like(parameter)
    walk(model)
    optimizer.step()


def backward(model: nn.Module) -> None:
    for _ in range(2):
        loss = model(*token_batches(1)[0])
        walk(model)
        loss.backward()
    for parameter in held(model):
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad)


def freeze(model: nn.Module) -> None:
    for parameter in held(model)[::2]:
        parameter.requires_grad_(False)


def replace(model: Any) -> None:
    """Replace some parameters, and share others."""
    walk(model)
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach().clone() * 2)
        block.down.bias = None
    model.head.weight = model.embedding.weight
    walk(model)
    model.embedding.weight.data.add_(1)


def swap(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def vectors(model: nn.Module) -> None:
    parameters = held(model)
    vector = nn.utils.parameters_to_vector(parameters)
    walk(model)
    nn.utils.vector_to_parameters(vector * 2, parameters)


DEEDS: dict[str, Callable[[Any], object]] = {
    "edit held": edit_held,
    "edit data": edit_data,
    "assign data": assign_data,
    "edit state_dict": edit_state_dict,
    "edit views": edit_views,
    "apply": lambda model: model.apply(lambda m: [p.data.add_(1) for p in m.parameters(recurse=False)]),
    "half": lambda model: model.half(),
    "to bf16 and back": lambda model: model.to(torch.bfloat16).float(),
    "load": load,
    "load assigned": load_assigned,
    "step": step,
    "backward": backward,
    "freeze": freeze,
    "replace": replace,
    "swap": swap,
    "vectors": vectors,
    "share memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("name", DEEDS)
def test_it_is_an_ordinary_model(name: str, tmp_path: Path) -> None:
    model, expected = built(tmp_path), seeded(Stack)
    for each in (model, expected):
        DEEDS[name](each)
    assert_same(model, expected)
    walk(model)
    assert_same(model, expected)
    if name not in ("share memory", "vectors"):  # then parameters are views of what others see, or of one tensor
        assert kept(model.parameters()) > 0.5, "what was changed stays in memory"


def test_a_deep_copy(tmp_path: Path) -> None:
    model = built(tmp_path, lambda: Stack(tied=True))
    copied = copy.deepcopy(model)
    walk(copied)
    assert kept(copied.parameters()) > 0.5
    assert_same(copied, seeded(lambda: Stack(tied=True)))
    assert copied.get_parameter("head.weight") is copied.get_parameter("embedding.weight")
    copied.get_parameter("head.weight").data.zero_()
    assert_same(model, seeded(lambda: Stack(tied=True)))


def test_a_pickled_copy(tmp_path: Path) -> None:
    """A pickled copy is an ordinary model, since the file belongs to the process."""
    copied = pickle.loads(pickle.dumps(built(tmp_path, encoder)))
    assert_same(copied, seeded(encoder))
    assert not any(isinstance(module._parameters, NotedParameters) for module in copied.modules())


def test_shared_memory_stays_shared(tmp_path: Path) -> None:
    model = built(tmp_path).share_memory()
    walk(model)
    assert all(parameter.is_shared() for parameter in model.parameters())


def test_looking_at_shapes_needs_no_values(tmp_path: Path) -> None:
    parameters = held(built(tmp_path))
    assert sum(parameter.numel() for parameter in parameters) == sum(p.numel() for p in Stack().parameters())


# -- memory that others refer to ---------------------------------------------------------------------------------------


class Aliased(nn.Module):
    """Fills a tensor after it became a parameter and others were built."""

    def __init__(self) -> None:
        super().__init__()
        first, second = torch.zeros(64, 64), torch.zeros(64, 64)
        self.first = nn.Parameter(first)
        self.second = nn.Parameter(second.t())
        self.whole = nn.Parameter(torch.zeros(128, 64))
        self.part = nn.Parameter(self.whole.detach()[:64])
        self.third = nn.Parameter(torch.zeros(64, 64))
        storage = self.third.untyped_storage()
        self.body = Stack()
        first.fill_(1)
        second[0] = 2
        storage[2], storage[3] = 128, 63  # 1.0


def test_memory_that_something_else_refers_to(tmp_path: Path) -> None:
    model: Any = built(tmp_path, Aliased)
    assert_same(model, seeded(Aliased))
    assert model.third[0, 0] == 1
    walk(model)
    assert in_file(model.first) and in_file(model.second)  # nobody else does any more
    assert model.second.stride() == (1, 64)
    model.part.data.add_(1)
    walk(model)
    assert torch.equal(model.whole[:64], model.part)


class Twins(nn.Module):
    """Weights with their own data as an attribute, as bitsandbytes' Int8Params keep their codes, and another tensor."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(64, 64)
        self.kept = first.weight.data
        self.layers = nn.ModuleList([first, *(nn.Linear(64, 64) for _ in range(3))])
        for layer in self.layers:
            weight: Any = layer.weight
            weight.CB, weight.SCB = weight.data, torch.ones(64)
        self.body = Stack()


def test_an_attribute_that_is_the_parameters_data(tmp_path: Path) -> None:
    """It follows the parameter into the file; memory that something else holds as well stays."""
    model: Any = built(tmp_path, Twins)
    weights = [layer.weight for layer in model.layers]
    assert all(weight.CB.is_set_to(weight.data) and weight.SCB.shape == (64,) for weight in weights)
    assert [in_file(weight) for weight in weights] == [False, True, True, True]
    assert_same(model, seeded(Twins))


def test_a_thread_that_works_on_a_parameter(tmp_path: Path) -> None:
    """A thread may be writing to a parameter while another builds."""
    model = nn.Linear(64, 64)
    used, go_on = threading.Event(), threading.Event()

    def work() -> None:
        model.weight = nn.Parameter(torch.zeros(64, 64))
        used.set()
        go_on.wait(60)

    with infinity.Init(tiny(tmp_path)):
        thread = threading.Thread(target=work)
        thread.start()
        assert used.wait(60)
        weight: Any = dict.__getitem__(model._parameters, "weight")  # unnoticed
        seeded(Stack)
        assert not in_file(weight)
        go_on.set()
        thread.join()
        seeded(Stack)
        assert in_file(weight)


@pytest.mark.parametrize("mode", ["meta", "inference", "fake"])
def test_code_around_sets_other_defaults(mode: str, tmp_path: Path) -> None:
    """Parameters that leave memory under other default dtypes and devices keep the values they were built with."""
    model: Any = built(tmp_path)
    expected: Any = seeded(Stack)
    model.double(), expected.double()
    assert not in_file(dict.__getitem__(model.head._parameters, "weight"))  # the last one, unnoticed
    context = {"meta": torch.device("meta"), "inference": torch.inference_mode(), "fake": FakeTensorMode()}[mode]
    with context, infinity.Init(tiny(tmp_path)):
        walk(model)
        Stack()
    assert_same(model, expected)
    backward(model), backward(expected)
    assert_same(model, expected)


def test_lazy_modules(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(64), *(nn.LazyLinear(64) for _ in range(3)))
        torch.manual_seed(1)
        model(torch.ones(2, 64))
        return model

    model = built(tmp_path, make)
    assert_same(model, seeded(make))


def test_processes_that_are_forked(tmp_path: Path) -> None:
    """Forked processes share the file, which stays when they end."""
    model = built(tmp_path)
    gc.collect()  # else the child collects what earlier tests left, and joins threads that it does not have
    child = os.fork()
    if child == 0:
        del model
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert_same(model, seeded(Stack))


# -- beginning and end -------------------------------------------------------------------------------------------------


@pytest.fixture
def leaves_nothing(tmp_path: Path) -> Iterator[Path]:
    """A folder: after the test nothing is in it, nothing of it is open or mapped, and no hook is installed."""
    folder = tmp_path / "states"
    folder.mkdir()
    yield folder
    gc.collect()
    assert os.listdir(folder) == []
    assert [file for file in files_in_use() if file.startswith(str(folder))] == []
    assert not torch_module._global_parameter_registration_hooks


def test_a_model_that_is_never_trained(leaves_nothing: Path) -> None:
    model = built(leaves_nothing)
    assert [file for file in files_in_use() if file.startswith(str(leaves_nothing))]
    assert os.listdir(leaves_nothing) == []
    del model


def test_an_exception_in_the_block(leaves_nothing: Path) -> None:
    class Broken(Stack):
        def __init__(self) -> None:
            super().__init__()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"), infinity.Init(tiny(leaves_nothing)):
        Broken()
    plain = Stack()
    assert type(plain.head._parameters) is dict


def test_blocks_within_blocks(leaves_nothing: Path) -> None:
    init = infinity.Init(tiny(leaves_nothing))
    with init:
        before = seeded(Stack)
        with init, infinity.Init(engine_config(folder=leaves_nothing)):
            model = seeded(Stack)
        after = seeded(Stack)
    for each in (before, model, after):
        assert spill_of(each) is spill_of(before)
        assert_same(each, seeded(Stack))
    with init:
        assert spill_of(seeded(Stack)) is not spill_of(before)
    assert type(Stack().head._parameters) is dict


def test_space_is_given_back_as_units_are_taken_over(leaves_nothing: Path) -> None:
    """The engine's files exist already; both together never take more than the model's size plus a unit."""
    model = built(leaves_nothing)
    spill = spill_of(model)

    def on_disk() -> int:
        return sum(os.fstat(file._fd).st_blocks for file in spill._files) * 512

    begun = on_disk()
    seen = []
    write = infinity.units.states.UnitStates.write  # type: ignore[attr-defined]

    def watched(self: Any, layout: Any, flats: Any) -> None:
        write(self, layout, flats)
        seen.append(on_disk())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinity.units.states.UnitStates.write", watched)
        engine = TrainingEngine(model, tiny(leaves_nothing), device=CpuDevice())
    with engine:
        assert seen == sorted(seen, reverse=True)
        assert begun > seen[len(seen) // 2] > seen[-1]
        assert on_disk() == 0
        losses = train(engine, token_batches(2))
    assert all(loss > 0 for loss in losses)


def test_initialize_within_the_block(leaves_nothing: Path) -> None:
    config = tiny(leaves_nothing)
    with infinity.Init(config):
        engine, *_ = infinity.initialize(seeded(Stack), config, device=CpuDevice())
        with engine:
            found = train(engine, token_batches(2))
    with TrainingEngine(seeded(Stack), config, device=CpuDevice()) as engine:
        assert train(engine, token_batches(2)) == found


def test_a_model_that_did_not_fit_is_still_whole(leaves_nothing: Path) -> None:
    model = built(leaves_nothing)
    with pytest.raises(StorageError, match="does not exist"):
        TrainingEngine(model, tiny(leaves_nothing / "none"), device=CpuDevice())
    assert_same(model, seeded(Stack))
    with TrainingEngine(model, tiny(leaves_nothing), device=CpuDevice()) as engine:
        assert train(engine, token_batches(1))[0] > 0


def test_a_model_that_only_runs(leaves_nothing: Path) -> None:
    tokens, targets = token_batches(1)[0]
    expected = seeded(Stack)(tokens, targets)
    with infinity.init_inference(built(leaves_nothing), tiny(leaves_nothing), device=CpuDevice()) as engine:
        assert torch.equal(engine(tokens, targets), expected)


def test_a_model_on_another_device(leaves_nothing: Path) -> None:
    """One that such a device is not needed for: what is fake has its name."""
    with (
        FakeTensorMode(),
        pytest.raises(ModelError, match=r"weight of a Linear is built on cuda.*build the model on the cpu"),
        infinity.Init(tiny(leaves_nothing)),
    ):
        nn.Linear(4, 4, device="cuda")


# -- other ways to values ----------------------------------------------------------------------------------------------


def test_pretrained_weights(tmp_path: Path) -> None:
    """Weights are read at once into built models, and at construction of the engine into models on the meta device."""
    source = seeded(Stack, 1)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    for device in ("cpu", "meta"):
        with infinity.Init(tiny(tmp_path)), torch.device(device):
            model = seeded(Stack)
        infinity.load_pretrained(model, tmp_path)
        if device == "cpu":
            walk(model)
            assert kept(model.parameters()) > 0.7
            assert_same(model, source)
        with TrainingEngine(model, tiny(tmp_path), device=CpuDevice()) as engine:
            found = engine.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in source.state_dict().items())


def test_a_model_on_meta_is_initialised_as_ever(tmp_path: Path) -> None:
    config = tiny(tmp_path)

    def start(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with TrainingEngine(model, config, device=CpuDevice()) as engine:
            return engine.state_dict()

    with torch.device("meta"):
        plain = Stack()
        with infinity.Init(config):
            model = Stack()
    expected, found = start(plain), start(model)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


# -- too little --------------------------------------------------------------------------------------------------------


def test_a_quarter_of_the_available_memory_is_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with little memory would kill the process before `initialize` can say what is missing."""

    def held() -> int:
        with infinity.Init(engine_config(folder=tmp_path, unit_size=1 << 20)):
            model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20))
        return 4 * sum(param.numel() for param in model.parameters() if not in_file(param))

    assert held() == 20 * 64 * 64 * 4
    monkeypatch.setattr("infinity.construction.init_context.available_memory", lambda: 4 * 5 * 64 * 64 * 4)
    assert held() <= 5 * 64 * 64 * 4


LIMITED = """
import resource, sys
import torch, infinity
nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {"train_batch_size": 1, "zero_optimization": {"offload_param": nvme}, "infinity": {"unit_size": "1MiB"}}
size = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (size + (300 << 20), resource.RLIM_INFINITY))
with infinity.Init(config):
    torch.nn.Linear(10_000, 10_000)
"""


def test_memory_that_runs_out_in_the_block_is_explained(tmp_path: Path) -> None:
    """torch's error goes on."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert "can't allocate memory" in done.stderr.splitlines()[-1]
    (line,) = [line for line in done.stderr.splitlines() if "memory ran out in infinity.Init" in line]
    assert "up to 4.19 MB" in line and "torch.device('meta')" in line


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "none", "does not exist; create it"), (Path("/proc"), "cannot create a file in")):
        with pytest.raises(StorageError, match=said), infinity.Init(tiny(folder)):
            raise AssertionError("the block was entered")
    assert not torch_module._global_parameter_registration_hooks


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this machine does not let a test mount: {done.stderr.strip()}")
    try:
        with pytest.raises(OutOfSpaceError, match=r"too little space in .* are missing; .*larger disk \(nvme_path\)"):
            built(folder, lambda: Stack(depth=12))
        gc.collect()
        assert os.statvfs(folder).f_bfree == os.statvfs(folder).f_blocks
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_limit_on_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StorageError, match=r"ulimit -f.* does not allow it") as caught:
            built(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
