"""Copies, moves and pickles of a managed model, and uses in a forked child, are refused by name and harm nothing."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from conftest import OpenEngine
from infinity.errors import UsageError
from support.beside import MEMORY, NVME, EngineLoop, PlainLoop, assert_like, training
from support.configs import engine_config
from support.descriptors import open_files
from support.lifetime import assert_nothing_leaked
from support.loops import open_engine
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(6)
WHERE = pytest.mark.parametrize("place", [MEMORY, NVME], ids=["memory", "nvme"])


class Nested(Linears):
    """A model with a part without parameters of its own, one without any, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(self.layers[1], nn.Tanh())
        self.empty = nn.Sequential(nn.Tanh(), nn.Dropout(0.0))
        self.register_buffer("count", torch.zeros(3))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a part": lambda model: copy.deepcopy(model.layers[2]),
    "deepcopy of a part without parameters of its own": lambda model: copy.deepcopy(model.part),
    "deepcopy of a list": lambda model: copy.deepcopy([model.layers]),
    "deepcopy of a part without any": lambda model: copy.deepcopy(model.empty),
    "pickle of a part without any": lambda model: pickle.dumps(model.empty),
    "pickle": pickle.dumps,
    "pickle of a part": lambda model: pickle.dumps(model.layers[2]),
    "save": lambda model: torch.save(model, io.BytesIO()),
    "save of a part": lambda model: torch.save({"model": model.part}, io.BytesIO()),
    "averaged": AveragedModel,
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "to a dtype": lambda model: model.to(torch.bfloat16),
    "to meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="meta"),
    "half of a part": lambda model: model.layers[2].half(),
    "half of a part without parameters of its own": lambda model: model.part.half(),
    "script": torch.jit.script,
    "script of a part": lambda model: torch.jit.script(model.part),
    "trace": lambda model: torch.jit.trace(model, BATCHES[0], check_trace=False),
    "trace of a part": lambda model: torch.jit.trace(model.part, BATCHES[0][0], check_trace=False),
    "trace of a function": lambda model: torch.jit.trace(lambda x: model.layers[2](x), BATCHES[0][0]),
    "step of another optimizer": lambda model: torch.optim.SGD(model.parameters()).step(),
    "step of another optimizer of a part": lambda model: torch.optim.AdamW(model.layers[2].parameters()).step(),
    "a Parameter of a Parameter": lambda model: nn.Parameter(model.layers[2].weight),
    "an embedding of a parameter": lambda model: nn.Embedding.from_pretrained(model.layers[2].weight),
    "load": lambda model: model.load_state_dict(Nested().state_dict()),
    "load of a part": lambda model: model.layers[2].load_state_dict(nn.Linear(32, 32, bias=False).state_dict()),
}
ALLOWED: dict[str, Callable[[Any], Any]] = {
    "deepcopy of a parameter": lambda model: copy.deepcopy(model.layers[2].weight),
    "to the same": lambda model: model.to("cpu").to(torch.float32).float().cpu(),
    "train and eval": lambda model: model.eval().train(),
    "state_dict": lambda model: model.state_dict(),
    "apply": lambda model: model.apply(lambda module: None),
    "repr": repr,
    "trace of a function of a parameter": lambda model: torch.jit.trace(torch.sin, model.layers[2].weight.detach()),
    "step of another optimizer over other parameters": lambda model: torch.optim.SGD(
        [nn.Parameter(torch.ones(2))]
    ).step(),
    "zero_grad": lambda model: model.zero_grad(),
    "named": lambda model: [list(model.named_parameters()), list(model.named_buffers()), list(model.named_modules())],
}


@WHERE
@pytest.mark.parametrize("name", [*REFUSED, *ALLOWED])
def test_refused_or_harmless(name: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """Each use is refused or harmless, three times, and training equals the plain loop."""
    config = engine_config(**place)
    expected = training(BATCHES)(PlainLoop(seeded(Nested), config))
    engine = make_engine(seeded(Nested), config)
    loop, model = EngineLoop(engine), engine.module
    seen = training(BATCHES[:3])(loop)
    for _ in range(3):
        if name in REFUSED:
            with pytest.raises(UsageError, match="engine"):
                REFUSED[name](model)
        else:
            ALLOWED[name](model)
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    seen += training(BATCHES[3:])(loop)
    assert_like(seen, expected)
    assert_nothing_leaked(engine)


STATES: dict[str, Callable[[Any], Any]] = {
    "read": lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]],
    "get": lambda optimizer: optimizer.state.get(optimizer.param_groups[0]["params"][0]),
    "in": lambda optimizer: optimizer.param_groups[0]["params"][0] in optimizer.state,
    "clear": lambda optimizer: optimizer.state.clear(),
    "delete": lambda optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][0], None),
    "set": lambda optimizer: optimizer.state.update({optimizer.param_groups[0]["params"][0]: {}}),
    "assign": lambda optimizer: setattr(optimizer, "state", {}),
}


@WHERE
@pytest.mark.parametrize("use", STATES)
def test_states_of_the_optimizer(use: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """`optimizer.state`, which is empty, is refused where a plain loop would read or change moments."""
    engine = make_engine(seeded(Linears), **place)
    expected = training(BATCHES)(PlainLoop(seeded(Linears), engine.config))
    loop, optimizer = EngineLoop(engine), engine.optimizer
    seen = training(BATCHES[:3])(loop)
    with pytest.raises(UsageError, match="get_full_optimizer_state"):
        STATES[use](optimizer)
    assert not optimizer.state and not list(optimizer.state.items())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    seen += training(BATCHES[3:])(loop)
    assert_like(seen, expected)


@WHERE
@pytest.mark.parametrize("dropped", [True, False], ids=["dropped", "kept"])
def test_edits_of_a_state_dict(dropped: bool, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """In a plain loop such edits change the model. The next forward raises an error, and then training continues."""
    engine = make_engine(seeded(Linears), **place)
    expected = training(BATCHES)(PlainLoop(seeded(Linears), engine.config))
    loop, model = EngineLoop(engine), engine.module
    seen = training(BATCHES[:3])(loop)
    state = model.state_dict()
    copied = {name: value.clone().mul_(2) for name, value in state.items()}
    seen += training(BATCHES[3:4])(loop)
    state["layers.3.weight"].mul_(2)
    if dropped:
        del state
    with pytest.raises(UsageError, match=r"layers\.3\.weight of the model's state_dict\(\) was edited"):
        model(*BATCHES[4])
    seen += training(BATCHES[4:])(loop)
    assert_like(seen, expected)
    assert copied and not engine.parts.store.kept.warned
    assert_nothing_leaked(engine)


@WHERE
def test_a_shallow_copy(place: dict[str, Any], make_engine: OpenEngine) -> None:
    """Shallow copies of a module share its parameters and compute what the model does, now and after steps."""
    engine = make_engine(seeded(Linears), **place)
    shallow = copy.copy(engine.module)
    part = copy.copy(engine.module.layers[2])
    x = BATCHES[0][0]
    for batch in BATCHES[:3]:
        training([batch])(EngineLoop(engine))
        with torch.no_grad():
            assert shallow(*batch).item() == engine(*batch).item()
            assert torch.equal(part(x), engine.module.layers[2](x))
    assert_nothing_leaked(engine)


def test_a_model_is_free_after_close(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Linears), **MEMORY)
    training(BATCHES[:2])(EngineLoop(engine))
    model = engine.module
    engine.close()
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert model.half().layers[0].weight.dtype == torch.float16


# -- fork ------------------------------------------------------------------------------------------------------------


def in_child(call: Callable[[], Any]) -> tuple[int, str]:
    """Run `call` in a forked child. Returns its exit status (negative: a signal) and its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 0
        try:
            signal.alarm(20)
            call()
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            status = 7
            os.write(write, f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), said


TOUCHES: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda engine, kept: engine(*BATCHES[0]),
    "model": lambda engine, kept: engine.module(*BATCHES[0]),
    "part": lambda engine, kept: engine.module.layers[1](BATCHES[0][0]),
    "step": lambda engine, kept: engine.step(),
    "train": lambda engine, kept: training(BATCHES[:1])(EngineLoop(engine)),
    "parameter": lambda engine, kept: engine.module.layers[3].weight.sum().item(),
    "kept parameter": lambda engine, kept: kept[0].sum().item(),
    "edit": lambda engine, kept: kept[0].data.zero_(),
    "state_dict": lambda engine, kept: engine.state_dict(),
    "module.state_dict": lambda engine, kept: engine.module.state_dict(),
    "settle": lambda engine, kept: engine.settle(),
    "save": lambda engine, kept: engine.save_checkpoint("/nonexistent/folder"),
    "gradient": lambda engine, kept: torch.autograd.grad((kept[0] ** 2).sum(), kept[0]),
}


@WHERE
@pytest.mark.parametrize("touch", list(TOUCHES))
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child(touch: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """A forked child gets an error by name, never a signal or wrong values; the parent trains on."""
    config = engine_config(**place)
    expected = training(BATCHES)(PlainLoop(seeded(Linears), config))
    engine = make_engine(seeded(Linears), config)
    loop = EngineLoop(engine)
    kept = [engine.module.layers[5].weight]
    seen = training(BATCHES[:3])(loop)
    code, said = in_child(lambda: TOUCHES[touch](engine, kept))
    assert code == 7, f"{code}: {said}"
    assert said.startswith("UsageError"), said
    assert "process" in said
    seen += training(BATCHES[3:])(loop)
    assert_like(seen, expected)
    assert_nothing_leaked(engine)


@WHERE
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_drops_the_engine(place: dict[str, Any], tmp_path: Path) -> None:
    """A child in which the engine is collected ends, and closes nothing that is open in the parent."""
    config = engine_config(folder=tmp_path, **place)
    expected = training(BATCHES)(PlainLoop(seeded(Linears), config))
    loops = [EngineLoop(open_engine(seeded(Linears), config))]
    seen = training(BATCHES[:3])(loops[0])

    def drop() -> None:
        engine, files = weakref.ref(loops[0].engine), open_files()
        loops.clear()
        gc.collect()
        assert engine() is None
        assert open_files() == files

    assert in_child(drop) == (0, "")
    seen += training(BATCHES[3:])(loops[0])
    assert_like(seen, expected)
    loops[0].engine.close()


@WHERE
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_closes_the_engine(place: dict[str, Any], make_engine: OpenEngine) -> None:
    """A child that closes the engine releases none of the parent's resources."""
    config = engine_config(**place)
    expected = training(BATCHES)(PlainLoop(seeded(Linears), config))
    engine = make_engine(seeded(Linears), config)
    loop = EngineLoop(engine)
    seen = training(BATCHES[:3])(loop)
    code, said = in_child(engine.close)
    assert code in (0, 7) and (code == 0 or said.startswith("UsageError")), f"{code}: {said}"
    seen += training(BATCHES[3:])(loop)
    assert_like(seen, expected)


@WHERE
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loaders_that_fork(place: dict[str, Any], make_engine: OpenEngine) -> None:
    """Data loaders may fork workers in the middle of training, for every epoch."""
    config = engine_config(**place)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*BATCHES, strict=True)))

    def story(loop: Any) -> list[Any]:
        seen: list[Any] = []
        for _ in range(2):
            loader = DataLoader(data, 4, num_workers=2, multiprocessing_context=multiprocessing.get_context("fork"))
            seen += training(loader)(loop)
        return seen

    expected = story(PlainLoop(seeded(Linears), config))
    engine = make_engine(seeded(Linears), config)
    assert_like(story(EngineLoop(engine)), expected)
    assert_nothing_leaked(engine)
