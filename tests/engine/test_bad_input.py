"""Bad input raises one clear error, leaves no files or descriptors, and a new engine can be made in the process."""

from __future__ import annotations

import copy
import errno
import gc
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import (
    CheckpointError,
    ConfigError,
    InfinityError,
    ModelError,
    NonFiniteError,
    OutOfMemoryError,
    OutOfSpaceError,
    StorageError,
    UsageError,
)
from infinity.native import _aio
from infinity.tiers.device import CpuDevice
from support.configs import raw
from support.descriptors import open_files
from support.loops import train
from support.models import Stack, seeded, token_batches
from support.mounts import mount

HUGE = 1 << 21
"""Width of a linear layer of 4 Ti parameters: more than any disk or memory here holds."""


def make(model: nn.Module, config: dict[str, Any]) -> infinity.Engine:
    return infinity.initialize(model=model, config=config, device=CpuDevice())[0]


@pytest.fixture
def leaves_nothing(tmp_path: Path) -> Iterator[Path]:
    """A folder that is empty after the test, without open files or new threads, and in which an engine can be made."""
    folder = tmp_path / "states"
    folder.mkdir()
    with make(seeded(Stack), raw(folder)) as engine:  # whatever is started once per process is started now
        train(engine, token_batches(1))
    gc.collect()
    files, threads = open_files(), set(threading.enumerate())
    yield folder
    assert os.listdir(folder) == []
    gc.collect()
    assert open_files() == files
    assert {thread.name for thread in threading.enumerate() if thread not in threads} == set()
    with make(seeded(Stack), raw(folder)) as engine:
        assert train(engine, token_batches(2))[0] > 0
    assert os.listdir(folder) == []


def refused(kind: type[InfinityError], said: str, model: nn.Module, config: dict[str, Any]) -> InfinityError:
    """Assert that `initialize` raises `kind` with a text that matches `said`, and that the model keeps its values."""
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    with pytest.raises(kind, match=said) as caught:
        make(model, config)
    assert type(caught.value) is kind
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value)
    return caught.value


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist(leaves_nothing: Path) -> None:
    refused(StorageError, "does not exist; create it", seeded(Stack), raw(leaves_nothing / "missing"))


def test_a_file_instead_of_a_folder(leaves_nothing: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(StorageError, "is not a folder", seeded(Stack), raw(tmp_path / "file"))


def test_a_folder_that_takes_no_files(leaves_nothing: Path) -> None:
    refused(StorageError, "cannot create a file in /proc", seeded(Stack), raw("/proc"))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("missing", "missing does not exist; create it"),
        ("file", "is not a folder"),
        ("/proc", "cannot create a file in"),
    ],
)
def test_a_second_folder_that_takes_no_files(leaves_nothing: Path, tmp_path: Path, second: str, said: str) -> None:
    """Files in the first folder are removed; see `leaves_nothing`."""
    (tmp_path / "file").write_text("")
    refused(StorageError, said, seeded(Stack), raw([str(leaves_nothing), str(tmp_path / second)]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", r"missing does not exist; create it, or name another folder \(infinity.activations.nvme_path\)"),
        ("file", r"is not a folder; name one \(infinity.activations.nvme_path\)"),
        ("/proc", "cannot create a file in"),
    ],
)
def test_a_folder_of_activations_without_files(leaves_nothing: Path, tmp_path: Path, name: str, said: str) -> None:
    """It is refused by `initialize`, not by the first forward; see `leaves_nothing`."""
    (tmp_path / "file").write_text("")
    config = raw(leaves_nothing)
    activations = {"device": "nvme", "nvme_path": str(tmp_path / name)}
    config["infinity"] = {**config.get("infinity", {}), "activations": activations}
    refused(StorageError, said, seeded(Stack), config)


def test_one_folder_twice(leaves_nothing: Path) -> None:
    folders = [str(leaves_nothing), f"{leaves_nothing}/../{leaves_nothing.name}"]
    refused(ConfigError, "nvme_path: lists one folder twice", seeded(Stack), raw(folders))


def test_no_folders(leaves_nothing: Path) -> None:
    refused(ConfigError, "nvme_path: must name at least one folder", seeded(Stack), raw([]))


def test_a_file_system_that_is_read_only(leaves_nothing: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    unmount = mount("-t", "tmpfs", "-o", "ro,size=64m", "tmpfs", str(folder))
    try:
        refused(StorageError, "cannot create a file in .*[Rr]ead-only", seeded(Stack), raw(folder))
    finally:
        unmount()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(leaves_nothing: Path, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    refused(StorageError, "cannot create a file in .*[Pp]ermission", seeded(Stack), raw(folder))


# -- too little --------------------------------------------------------------------------------------------------------


def test_a_file_system_that_is_too_small(leaves_nothing: Path, tmp_path: Path) -> None:
    """`initialize` raises an error with the missing bytes, and existing files stay."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    unmount = mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder))
    try:
        (folder / "mine").write_text("stays")
        error = refused(OutOfSpaceError, r"too little space in .* are missing; free", seeded(Stack), raw(folder))
        assert isinstance(error, OutOfSpaceError)
        assert error.needed > error.available
        assert os.listdir(folder) == ["mine"]
    finally:
        unmount()


@pytest.mark.parametrize("engine", ["auto", "libaio", "io_uring"])
def test_a_kernel_that_gives_no_queues(leaves_nothing: Path, engine: str) -> None:
    """Without AIO slots and io_uring, the reserved file is released."""
    _aio._inject([{"where": "setup", "error": errno.EPERM, "times": -1}])
    try:
        config = raw(leaves_nothing, aio={"engine": engine})
        refused(StorageError, r"(libaio|io_uring): .*(does not allow|io_uring)", seeded(Stack), config)
    finally:
        _aio._inject([])


def huge() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(HUGE, HUGE), nn.Linear(HUGE, HUGE))


@pytest.mark.parametrize(
    ("param", "optim", "kind", "said"),
    [
        ("nvme", "nvme", OutOfMemoryError, "too little host memory"),  # the buffer of a unit
        ("cpu", "cpu", OutOfMemoryError, "too little host memory"),
        ("none", "none", OutOfMemoryError, "too little host memory"),
        ("nvme", "cpu", OutOfMemoryError, "too little host memory"),
        ("cpu", "nvme", OutOfMemoryError, "too little host memory"),
        ("none", "nvme", OutOfMemoryError, "too little host memory"),
    ],
)
def test_a_model_larger_than_its_tiers(
    leaves_nothing: Path, param: str, optim: str, kind: type[InfinityError], said: str
) -> None:
    """A model of any size is rejected at once, with the missing bytes and the fix."""
    began = time.monotonic()
    error = refused(kind, said, huge(), raw(leaves_nothing, param, optim))
    assert "are missing; " in str(error)
    assert time.monotonic() - began < 5


# -- the model ---------------------------------------------------------------------------------------------------------


def test_no_trainable_parameters(leaves_nothing: Path) -> None:
    model = seeded(Stack)
    model.requires_grad_(False)
    refused(ModelError, "no trainable parameters: set requires_grad", model, raw(leaves_nothing))


def test_no_parameters(leaves_nothing: Path) -> None:
    refused(ModelError, "no parameters: call the model directly", nn.GELU(), raw(leaves_nothing))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_parameters_of_another_type(leaves_nothing: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    refused(ModelError, f"is {name}, .*bf16", seeded(Stack).to(dtype), raw(leaves_nothing))


def test_a_model_that_has_an_engine(leaves_nothing: Path) -> None:
    model = seeded(Stack)
    with make(model, raw(leaves_nothing)) as engine:
        losses = train(engine, token_batches(1))
        with pytest.raises(ModelError, match="already belongs to an engine"):
            make(model, raw(leaves_nothing))
        losses += train(engine, token_batches(1))
        assert losses[1] < losses[0]


def test_a_model_whose_engine_was_closed(leaves_nothing: Path) -> None:
    """The model holds placeholders, on which a new engine would train NaN, so it is rejected."""
    model = seeded(Stack)
    make(model, raw(leaves_nothing)).close()
    with pytest.raises(ModelError, match=r"holds no values.*checkpoint"):
        make(model, raw(leaves_nothing))


# -- the config --------------------------------------------------------------------------------------------------------


def test_nvme_without_a_folder(leaves_nothing: Path) -> None:
    refused(ConfigError, 'nvme_path.* is missing: device "nvme" needs a folder', seeded(Stack), raw(None))


def test_batch_sizes_that_do_not_multiply(leaves_nothing: Path) -> None:
    config = raw(leaves_nothing, train_batch_size=9, gradient_accumulation_steps=2)
    refused(ConfigError, "do not multiply.*4 × 2 = 8, and train_batch_size is 9", seeded(Stack), config)


def test_no_batch_size(leaves_nothing: Path) -> None:
    config = raw(leaves_nothing)
    del config["train_micro_batch_size_per_gpu"]
    missing = "neither train_micro_batch_size_per_gpu nor train_batch_size. Set "
    refused(ConfigError, f"^no batch size: the configuration has {missing}", seeded(Stack), config)


def test_an_unknown_key(leaves_nothing: Path) -> None:
    refused(ConfigError, "gradient_clipping", seeded(Stack), raw(leaves_nothing, gradient_cliping=1.0))


def test_a_config_that_is_not_there(leaves_nothing: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json"):
        infinity.initialize(model=seeded(Stack), config=leaves_nothing / "missing.json")


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_loss_that_is_not_finite(leaves_nothing: Path, value: float, clip: float) -> None:
    """The loss is checked before any change, so that the batch can be skipped."""
    with make(seeded(Stack), raw(leaves_nothing, gradient_clipping=clip)) as engine:
        batches = token_batches(4)
        losses = train(engine, batches[:2])
        with pytest.raises(NonFiniteError, match=r"the loss is (nan|inf) in step 3.*This step updated nothing"):
            engine.backward(engine(*batches[2]) * value)
        losses += train(engine, batches[2:])
    with make(seeded(Stack), raw(leaves_nothing, gradient_clipping=clip)) as engine:
        assert train(engine, batches) == losses


@pytest.mark.parametrize(
    ("clip", "update", "stops"),
    [(1.0, "auto", False), (0.0, "next_forward", False), (0.0, "after_backward", False), (0.0, "auto", True)],
)
def test_a_gradient_that_is_not_finite(leaves_nothing: Path, clip: float, update: str, stops: bool) -> None:
    """The step raises if all gradients are known before the first update; otherwise the engine stops."""
    config = raw(leaves_nothing, gradient_clipping=clip)
    config["infinity"]["update"] = update
    with make(seeded(Stack), config) as engine:
        batches = token_batches(5)
        train(engine, batches[:2])
        loss = engine(*batches[2])
        loss.register_hook(lambda gradient: gradient * math.nan)
        with pytest.raises(NonFiniteError):
            engine.backward(loss)
            engine.step()
            train(engine, batches[3:4])
        if stops:
            with pytest.raises(UsageError, match=r"the engine stopped.*load the last checkpoint"):
                engine(*batches[4])
        else:
            assert engine.global_steps == 2
            assert all(math.isfinite(loss) for loss in train(engine, batches[3:]))


def test_step_before_backward(leaves_nothing: Path) -> None:
    with make(seeded(Stack), raw(leaves_nothing)) as engine:
        with pytest.raises(UsageError, match=r"engine\.step\(\) was called without a backward"):
            engine.step()
        train(engine, token_batches(1))
        with pytest.raises(UsageError, match=r"engine\.step\(\) was called without a backward"):
            engine.step()
        train(engine, token_batches(1))


@pytest.mark.parametrize("loss", [1.0, None, torch.ones(3, requires_grad=True), torch.ones(())])
def test_a_loss_that_is_none(leaves_nothing: Path, loss: Any) -> None:
    with make(seeded(Stack), raw(leaves_nothing)) as engine:
        with pytest.raises(UsageError, match=r"engine\.backward\(loss\) needs a scalar tensor"):
            engine.backward(loss)
        train(engine, token_batches(1))


def test_backward_twice(leaves_nothing: Path) -> None:
    """A second backward before step exceeds the config's micro-batches."""
    with make(seeded(Stack), raw(leaves_nothing)) as engine:
        train(engine, token_batches(2))
        engine.backward(engine(*token_batches(1)[0]))
        with pytest.raises(UsageError, match=r"gradient_accumulation_steps"):
            engine.backward(engine(*token_batches(1)[0]))


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_backward_of_one_loss_twice(leaves_nothing: Path, update: str) -> None:
    """PyTorch frees the graph after the first backward; the step uses the gradients of that."""
    config = raw(leaves_nothing)
    config["infinity"]["update"] = update
    losses = []
    for again in (False, True):
        with make(seeded(Stack), config) as engine:
            train(engine, token_batches(2))
            loss = engine(*token_batches(1)[0])
            engine.backward(loss)
            if again:
                said = (
                    "gradient_accumulation_steps" if update == "during_backward" else "backward through the graph a s"
                )
                with pytest.raises(RuntimeError, match=said):
                    engine.backward(loss)
            engine.step()
            losses.append(train(engine, token_batches(3)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("shape", [(61, 16), (1,), (1, 32), (61 * 32,), (60, 32)])
@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "in forward"])
def test_data_of_another_shape(leaves_nothing: Path, shape: tuple[int, ...], inside: bool) -> None:
    """Data of another shape raise an error when the unit is released or updated, even if broadcastable or a view, and
    are dropped.
    """
    model = seeded(Stack)

    def change(*_: Any) -> None:
        old = model.head.weight.data
        model.head.weight.data = old[:60] if shape == (60, 32) else torch.zeros(shape)

    def change_inside() -> None:
        handle = model.head.register_forward_hook(change)
        try:
            engine.backward(engine(*token_batches(1)[0]))
        finally:
            handle.remove()

    said: list[str] = []
    with make(model, raw(leaves_nothing)) as engine:
        train(engine, token_batches(2))
        for call in (change_inside, engine.step, engine.settle) if inside else (change, engine.settle):
            try:
                call()
            except RuntimeError as error:  # in backward perhaps PyTorch's own, about a gradient
                said.append(str(error))
        where = "while an engine has the model, where its shape is [61, 32]: the data was dropped"
        assert any(f"head.weight was given data of shape {list(shape)} {where}" in text for text in said), said
        assert inside or len(said) == 1
        try:
            assert all(math.isfinite(loss) for loss in train(engine, token_batches(2)))
        except UsageError as error:  # other units were updated in that backward
            assert inside and "the engine stopped" in str(error)


def test_another_parameter(leaves_nothing: Path) -> None:
    model = seeded(Stack)
    with make(model, raw(leaves_nothing)) as engine:
        losses = train(engine, token_batches(2))
        with pytest.raises(UsageError, match="weight was given another parameter while an engine has the model"):
            model.head.weight = nn.Parameter(torch.zeros(7, 32))
        with pytest.raises(UsageError, match=r"assign to\s+weight\.data"):
            model.head.weight = nn.Parameter(torch.zeros(61, 32))
        losses += train(engine, token_batches(1))
        model.head.weight = model.head.weight
        losses += train(engine, token_batches(2))
    with make(seeded(Stack), raw(leaves_nothing)) as engine:
        assert (
            train(engine, token_batches(2)) + train(engine, token_batches(1)) + train(engine, token_batches(2))
            == losses
        )
    model.head.weight = nn.Parameter(torch.zeros(7, 32))


def test_parameters_of_another_model(leaves_nothing: Path) -> None:
    model, other = seeded(Stack), seeded(Stack)
    for given in (other.parameters(), other.named_parameters(), [{"params": other.parameters(), "lr": 0.1}]):
        with pytest.raises(ConfigError, match=r"model_parameters holds a parameter .* that is not the model's: pass"):
            infinity.initialize(model=model, config=raw(leaves_nothing), model_parameters=given, device=CpuDevice())


def test_calls_after_close(leaves_nothing: Path, tmp_path: Path) -> None:
    engine = make(seeded(Stack), raw(leaves_nothing))
    batch = token_batches(1)[0]
    train(engine, [batch])
    loss = engine(*batch)
    engine.close()
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: engine(*batch),
        lambda: engine.backward(loss),
        engine.step,
        lambda: engine.save_checkpoint(tmp_path / "saved"),
        lambda: engine.load_checkpoint(tmp_path / "saved"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="the engine is closed: make a new one"):
            call()
    assert not (tmp_path / "saved").exists()


def test_an_engine_that_is_dropped(leaves_nothing: Path) -> None:
    """An unclosed engine releases its resources when its last reference is dropped."""
    engine = make(seeded(Stack), raw(leaves_nothing))
    train(engine, token_batches(2))
    del engine
    gc.collect()


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------

LOOP = """
import itertools, math, sys
import torch
import infinity
from infinity.native import _aio
from infinity.errors import UsageError
from infinity.tiers.device import CpuDevice
from support.configs import raw
from support.models import Stack, seeded, token_batches

torch.set_num_threads(1)
folder, clip, rounds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
batches = token_batches(8, batch=16)
for number in itertools.count():
    engine = infinity.initialize(
        model=seeded(lambda: Stack(width=64, depth=8)), config=raw(folder, gradient_clipping=clip), device=CpuDevice()
    )[0]
    try:
        for step, batch in enumerate(itertools.cycle(batches)):
            engine.backward(engine(*batch))
            engine.step()
            if step == 3:
                print("training", flush=True)
    except KeyboardInterrupt:
        if number == rounds:
            raise
        try:
            if engine.micro_steps:  # interrupted after backward
                engine.step()
            loss = engine(*batches[0])
            engine.backward(loss)
            engine.step()
            assert math.isfinite(loss.item())
        except UsageError as error:  # interrupted when some units had their update already
            assert "the engine stopped" in str(error)
        engine.close()
        print("closed", flush=True)
"""


def start_loop(folder: Path, clip: float, rounds: int, errors: Path) -> subprocess.Popen[str]:
    """Start the process. errors: file for its stderr, since a full pipe would block it."""
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOOP, str(folder), str(clip), str(rounds)]
    with errors.open("w") as file:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)


def said(process: subprocess.Popen[str], line: str, errors: Path) -> None:
    """Assert that the next line of its output is `line`."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 30)
    got = process.stdout.readline().strip() if ready else "nothing in 30 s"
    assert got == line, errors.read_text()


@pytest.mark.campaign(few=1)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_control_c(tmp_path: Path, clip: float) -> None:
    """Ctrl-C at many moments of a step: the engine continues or raises the reason, closes, and another can be made."""
    rounds = 8
    folder, errors = tmp_path / "states", tmp_path / "errors"
    folder.mkdir()
    process = start_loop(folder, clip, rounds, errors)
    try:
        for number in range(rounds + 1):
            said(process, "training", errors)
            time.sleep(0.003 * number)
            process.send_signal(signal.SIGINT)
            if number < rounds:
                said(process, "closed", errors)
        process.wait(timeout=10)
    finally:
        process.kill()
        process.communicate()
    text = errors.read_text()
    assert process.returncode == -signal.SIGINT, text
    assert text.rstrip().endswith("KeyboardInterrupt")
    for word in ("terminate called", "Fatal", "Exception ignored", "Warning", "Error"):
        assert word not in text, text
    assert os.listdir(folder) == []


@pytest.mark.campaign(few=1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """Files are anonymous, so a killed process leaves none."""
    folder, errors = tmp_path / "states", tmp_path / "errors"
    folder.mkdir()
    process = start_loop(folder, 0.0, 0, errors)
    try:
        said(process, "training", errors)
        process.send_signal(number)
        process.wait(timeout=10)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -number
    assert os.listdir(folder) == []


# -- calls that PyTorch's own classes take -----------------------------------------------------------------------------


def test_a_device_by_name(leaves_nothing: Path) -> None:
    for device in ("cpu", torch.device("cpu")):
        with pytest.raises(UsageError, match=r"device is .*cpu.*: leave it out"):
            infinity.initialize(seeded(Stack), raw(leaves_nothing), device=device)  # type: ignore[arg-type]


def test_copies_of_the_optimizer(leaves_nothing: Path) -> None:
    with make(seeded(Stack), raw(leaves_nothing)) as engine:
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(UsageError, match=r"optimizer cannot be copied or pickled.*optimizer\.state_dict"):
                copied(engine.optimizer)
        train(engine, token_batches(1))


def test_optimizer_step_after_close(leaves_nothing: Path) -> None:
    engine = make(seeded(Stack), raw(leaves_nothing))
    engine.close()
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.optimizer.step()


def test_a_value_that_is_no_tensor(leaves_nothing: Path) -> None:
    said = r"the value for head\.weight is a float: pass a tensor of shape \[61, 32\]"
    with make(seeded(Stack), raw(leaves_nothing)) as engine, pytest.raises(UsageError, match=said):
        infinity.set_full_fp32_param(engine.module.head.weight, 0.5)  # type: ignore[arg-type]


def test_a_checkpoint_named_by_its_own_folder(leaves_nothing: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("saved")
    with make(seeded(Stack), raw(leaves_nothing)) as engine:
        saved = engine.save_checkpoint(folder)
        with pytest.raises(CheckpointError, match=rf"is a checkpoint itself: pass '{folder}' and tag='global_step0'"):
            engine.load_checkpoint(saved)
        engine.load_checkpoint(folder, tag="global_step0")


def test_a_missing_checkpoint_is_named_with_the_existing_ones(
    leaves_nothing: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A wrong tag, a folder of runs, an empty folder, a file and an absent folder each have their own fix."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "empty").mkdir()
    with make(seeded(Stack), raw(leaves_nothing)) as engine:
        for tag in ("step10", "step9"):
            saved = engine.save_checkpoint(runs / "first", tag, save_latest=False)
        engine.save_checkpoint(runs / "second", "step1")
        for folder, wrong, said in (
            (
                runs / "first",
                "step8",
                r"no checkpoint 'step8' in .*: it holds the checkpoints 'step9', 'step10'; pass",
            ),
            (
                runs / "first",
                None,
                r"no file 'latest': it holds the checkpoints 'step9', 'step10'; pass one as the tag",
            ),
            (runs, None, r"has no file 'latest': the checkpoints are in its folders 'second'; pass one of these"),
            (runs / "empty", None, r"has no file 'latest': no checkpoint was saved there; pass another folder"),
            (runs / "empty", "step1", r"there is no checkpoint 'step1' in .*: it holds no checkpoint"),
            (saved / "checkpoint.json", None, r"checkpoint\.json is not a folder: pass the folder given to"),
            (runs / "absent", None, r"absent does not exist: pass the folder given to save_checkpoint"),
        ):
            with pytest.raises(CheckpointError, match=said):
                engine.load_checkpoint(folder, wrong)
