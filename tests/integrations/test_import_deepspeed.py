"""Import of checkpoints that the real DeepSpeed wrote: values equal DeepSpeed's, and training continues as there."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import infinity
from infinity.checkpoint.format import read_index
from infinity.cli.main import app
from infinity.deepspeed.importer.convert import import_deepspeed, read_deepspeed
from infinity.deepspeed.importer.files import STAND_INS
from infinity.deepspeed.importer.optimizer import loss_scale_of, optimizer_of
from infinity.deepspeed.importer.states import StoredCheckpoint, StoredParameter
from infinity.errors import CheckpointError, UsageError
from infinity.rules import rule_of_type
from support.deepspeed_model import CASES, NEXT_STEPS, STEPS, Case, TinyModel, batch_of, param_groups

CHECKPOINTS = Path(__file__).parent / "deepspeed_checkpoints"
ADAM = ("AdamW", "Adam")


def truth_of(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = CHECKPOINTS / name
    return load_file(folder / "truth.safetensors"), json.loads((folder / "truth.json").read_text())


def open_engine(case: Case) -> Any:
    """An engine for the case's model. Its model starts with other values than the checkpoint's."""
    hyper = {"lr": case.hyper["lr"], "weight_decay": case.hyper["weight_decay"]}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": case.optimizer, "params": hyper},
        "zero_optimization": {"stage": 3},
        "infinity": {"unit_size": 100},
        **({case.dtype: {"enabled": True}} if case.dtype != "fp32" else {}),
        **{key: value for key, value in case.config.items() if key in ("scheduler", "fp16")},
    }
    model = TinyModel(**case.model)
    with torch.no_grad():
        for value in (*model.parameters(), model.shift):
            value.add_(1.0)
    engine, *_ = infinity.initialize(model=model, model_parameters=param_groups(model, case), config=config)
    return engine


@pytest.mark.parametrize("name", CASES)
def test_imported_states_equal_deepspeeds_bit_for_bit(name: str, tmp_path: Path) -> None:
    truth, facts = truth_of(name)
    folder = import_deepspeed(CHECKPOINTS / name, tmp_path / "out")
    index = read_index(folder)
    buffers = load_file(folder / "buffers.safetensors")
    written: dict[str, torch.Tensor] = {f"buffer/{key}": value for key, value in buffers.items()}
    for file in folder.glob("unit-*.safetensors"):
        written |= load_file(file)
    assert written.keys() == truth.keys()
    for key, value in truth.items():
        assert value.dtype == written[key].dtype and torch.equal(value, written[key]), key
    assert [group["lr"] for group in index.param_groups] == facts["lr"]
    assert index.optimizer == CASES[name].optimizer
    names = [own for own, _ in TinyModel(**CASES[name].model).named_parameters()]
    assert list(index.parameters) == names


@pytest.mark.parametrize("name", CASES)
def test_an_engine_continues_with_deepspeeds_losses(name: str, tmp_path: Path) -> None:
    case, (_, facts) = CASES[name], truth_of(name)
    import_deepspeed(CHECKPOINTS / name, tmp_path / "out")
    engine = open_engine(case)
    try:
        _, client_state = engine.load_checkpoint(tmp_path / "out")
        assert engine.global_steps == STEPS
        assert client_state == case.client_state
        losses = []
        for step in range(STEPS, STEPS + NEXT_STEPS):
            loss = engine(*batch_of(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    finally:
        engine.close()
    tolerance = 2e-6 if case.dtype == "fp32" else 4e-3
    assert losses == pytest.approx(facts["losses"], rel=tolerance)


def test_states_of_the_losses_matter(tmp_path: Path) -> None:
    """The loss of the second step differs by more than the tolerance if moments or the step count are lost."""
    case, (_, facts) = CASES["stage1-fp32"], truth_of("stage1-fp32")
    import_deepspeed(CHECKPOINTS / "stage1-fp32", tmp_path / "out")
    engine = open_engine(case)
    try:
        engine.load_checkpoint(tmp_path / "out")
        engine.optimizer.load_state_dict({**engine.optimizer.state_dict(), "state": {}})
        for step in range(STEPS, STEPS + NEXT_STEPS):
            loss = engine(*batch_of(step))
            engine.backward(loss)
            engine.step()
    finally:
        engine.close()
    assert loss.item() != pytest.approx(facts["losses"][-1], rel=1e-4)


def test_command_writes_a_checkpoint(tmp_path: Path) -> None:
    source, out = CHECKPOINTS / "stage2-tied", tmp_path / "out"
    result = CliRunner().invoke(app, ["import-deepspeed", str(source), str(out)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert (out / "latest").read_text() == "global_step3"
    assert read_index(out / "global_step3").parameters.keys() == dict(TinyModel(tied=True).named_parameters()).keys()
    again = CliRunner().invoke(app, ["import-deepspeed", str(source), str(out)])
    assert again.exit_code == 1 and "already exists" in again.output


def test_one_checkpoints_folder_is_read_without_latest(tmp_path: Path) -> None:
    folder = import_deepspeed(CHECKPOINTS / "stage2-adam" / "global_step3", tmp_path / "out")
    assert folder == tmp_path / "out" / "global_step3"
    with pytest.raises(UsageError, match="already exists"):
        import_deepspeed(CHECKPOINTS / "stage2-adam", tmp_path / "out")


def test_a_folder_of_several_checkpoints_or_runs_lists_them(tmp_path: Path) -> None:
    """Without `latest`, the error lists the tags in the folder, or else the folders of runs."""
    run = copied("stage2-adam", tmp_path / "run")
    shutil.copytree(run / "global_step3", run / "global_step12")
    said = r"the checkpoints are in its folders 'run'; pass one of these folders"
    with pytest.raises(CheckpointError, match=said):
        import_deepspeed(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'x' in .*'global_step3', 'global_step12'; pass"):
        import_deepspeed(run, tmp_path / "out", tag="x")
    (run / "latest").unlink()
    said = r"no \*_model_states.pt: it holds the checkpoints 'global_step3', 'global_step12'; pass one as the tag"
    with pytest.raises(CheckpointError, match=said):
        import_deepspeed(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match="absent does not exist: pass the folder given to DeepSpeed's"):
        import_deepspeed(tmp_path / "absent", tmp_path / "out")


def test_files_of_a_missing_rank_are_named(tmp_path: Path) -> None:
    for missing, message in {
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": "lacks the optimizer's file of rank 0",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt": "was saved by 2 ranks, and there are files of 1",
        "mp_rank_00_model_states.pt": "holds no .*_model_states.pt",
    }.items():
        copy = copied("stage2-frozen", tmp_path / missing)
        (copy / "global_step3" / missing).unlink()
        with pytest.raises(CheckpointError, match=message):
            import_deepspeed(copy, tmp_path / "out")
    copy = copied("stage3-frozen", tmp_path / "stage3")
    (copy / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="was saved by 2 ranks, and holds the model's files of 1"):
        import_deepspeed(copy, tmp_path / "out")
    copy = copied("universal-stage2", tmp_path / "universal")
    shutil.rmtree(copy / "global_step3_universal" / "zero" / "head.weight")
    with pytest.raises(CheckpointError, match=r"lacks the folder of parameter head.weight"):
        import_deepspeed(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    copy = copied("stage2-frozen", tmp_path / "copy")
    other = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(CHECKPOINTS / "stage2-tied" / "global_step3" / other, copy / "global_step3" / other)
    with pytest.raises(CheckpointError, match="elements, and the files of 2 ranks hold"):
        import_deepspeed(copy, tmp_path / "out")
    shutil.copy(CHECKPOINTS / "stage1-frozen" / "global_step3" / other, copy / "global_step3" / other)
    with pytest.raises(CheckpointError, match=r"differs from .* in stage, groups, steps or moments"):
        import_deepspeed(copy, tmp_path / "out")


def edited(name: str, file: str, tmp_path: Path, edit: Any) -> Path:
    """A copy of a checkpoint whose `file` was changed by `edit(content)`, without objects of DeepSpeed's classes."""
    copy = copied(name, tmp_path)
    path = copy / "global_step3" / file
    with torch.serialization.safe_globals(list(STAND_INS.values())):  # type: ignore[no-untyped-call]
        content = torch.load(path, weights_only=True)
    if "optimizer_state_dict" in content:
        content["optimizer_state_dict"] |= {"zero_stage": 2, "loss_scaler": None, "param_slice_mappings": []}
    edit(content)
    torch.save(content, path)
    return copy


def copied(name: str, to: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / name, to))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state["module"].pop("head.weight"), "parameter head.weight is missing in 'module'"),
        (lambda state: state["param_shapes"][0].pop("head.bias"), "names 14 parameters in group 0"),
        (lambda state: state["param_shapes"][0].update({"head.weight": torch.Size([5, 11])}), "has shape"),
        (lambda state: state.update(module=None), "'module' is NoneType"),
        (lambda state: state.update(mp_world_size=2), "model parallelism"),
        (lambda state: state.update(global_steps=-1), "global_steps is -1"),
        (lambda state: state.update(param_shapes=[{"a": (-1,)}]), "the shape of a is"),
        (lambda state: state["module"].update(extra=torch.ones(2), other=3), "holds 'other', which is no tensor"),
    ],
)
def test_inconsistent_models_are_refused(edit: Any, message: str, tmp_path: Path) -> None:
    copy = edited("stage2-adam", "mp_rank_00_model_states.pt", tmp_path / "copy", edit)
    with pytest.raises(CheckpointError, match=message):
        import_deepspeed(copy, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


ODD = (None, -1, "x", [3], torch.ones(2))


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("mp_rank_00_model_states.pt", ()),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", ("optimizer_state_dict",)),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", ("optimizer_state_dict", "base_optimizer_state")),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", ("optimizer_state_dict", "base_optimizer_state", "state", 0)),
        (
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            ("optimizer_state_dict", "base_optimizer_state", "param_groups", 0),
        ),
    ],
)
def test_odd_values_are_refused_or_do_not_matter(file: str, path: tuple[Any, ...], tmp_path: Path) -> None:
    """Every value of the files, replaced by others: the import raises CheckpointError, or writes a whole checkpoint."""
    keys: list[Any] = []

    def at(content: Any) -> Any:
        for key in path:
            content = content[key]
        return content

    edited("stage2-adam", file, tmp_path / "keys", lambda content: keys.extend(at(content)))
    refused = 0
    for key in keys:
        for number, odd in enumerate(ODD):
            shutil.rmtree(tmp_path / "again", ignore_errors=True)
            again = edited(
                "stage2-adam",
                file,
                tmp_path / "again",
                lambda content, key=key, odd=odd: at(content).update({key: odd}),
            )
            try:
                folder = import_deepspeed(again, tmp_path / "out")
            except CheckpointError:
                refused += 1
                assert not (tmp_path / "out").exists(), (key, number)
            else:
                assert read_index(folder).parameters
                shutil.rmtree(tmp_path / "out")
    assert refused > len(keys)


def test_a_client_state_of_unsafe_kinds_becomes_plain(tmp_path: Path) -> None:
    """Namespaces and paths, which scripts leave in client_state, become dicts and strings."""
    import argparse

    def add(state: dict[str, Any]) -> None:
        state["args"] = argparse.Namespace(lr=0.5, folder=Path("/a/b"))
        state["random"] = torch.arange(5)

    copy = edited("stage2-adam", "mp_rank_00_model_states.pt", tmp_path / "copy", add)
    folder = import_deepspeed(copy, tmp_path / "out")
    state = torch.load(folder / "client_state.pt", weights_only=True)
    assert state["args"] == {"lr": 0.5, "folder": "/a/b"}
    assert torch.equal(state["random"], torch.arange(5))


@pytest.mark.parametrize(
    ("group", "config", "expected"),
    [
        ({"amsgrad": False, "decoupled_weight_decay": True}, None, "AdamW"),
        ({"amsgrad": False, "decoupled_weight_decay": False}, None, "Adam"),
        ({"bias_correction": True, "weight_decay": 0.1}, {"type": "Adam"}, "AdamW"),
        ({"bias_correction": True, "weight_decay": 0.1}, {"type": "Adam", "params": {"adam_w_mode": False}}, "Adam"),
        ({"bias_correction": True, "weight_decay": 0.1}, {"type": "adamw"}, "AdamW"),
        ({"bias_correction": True, "weight_decay": 0.1}, None, "does not record the optimizer"),
        ({"bias_correction": True, "weight_decay": 0.1}, {"type": "OneBitAdam"}, "has no counterpart"),
        ({"nesterov": False, "dampening": 0, "momentum": 0.9}, None, "SGD has momentum_buffer"),
    ],
)
def test_optimizer_is_found_or_asked_for(group: dict[str, Any], config: Any, expected: str) -> None:
    state = read_deepspeed(CHECKPOINTS / "stage2-adam").parameters["head.weight"]
    stored = checkpoint({"w": state}, [group], {"ds_config": {"optimizer": config}})
    if expected in ADAM:
        assert optimizer_of(stored, None) is optimizer_of(stored, expected) is rule_of_type(expected)
        with pytest.raises(CheckpointError, match="leave --optimizer out"):
            optimizer_of(checkpoint({"w": state}, [{"weight_decay": 0.1, **group}], stored.progress), "Lion")
    else:
        with pytest.raises(CheckpointError, match=expected):
            optimizer_of(stored, None)


def checkpoint(
    parameters: dict[str, StoredParameter], groups: list[dict[str, Any]], progress: Any, scale: Any = None
) -> StoredCheckpoint:
    return StoredCheckpoint(Path("c"), parameters, tuple(parameters), {}, {}, groups, progress, scale or {})


@pytest.mark.parametrize("overflows", [(), (0,), (3,), (2, 3), (5,)])
def test_imported_loss_scale_grows_at_deepspeeds_steps(overflows: tuple[int, ...]) -> None:
    """Without further overflows, the imported scale has DeepSpeed's values, whose first window is one step longer."""
    from infinity.engine.optimizer.loss_scale import LossScale

    window = 3

    def deepspeed(cur: dict[str, Any], overflow: bool) -> None:
        if overflow:
            cur["cur_scale"] = max(cur["cur_scale"] / 2, 1.0)
            cur["last_overflow_iter"] = cur["cur_iter"]
        else:
            stable = cur["cur_iter"] - cur["last_overflow_iter"] - 1
            if stable > 0 and stable % window == 0:
                cur["cur_scale"] *= 2
        cur["cur_iter"] += 1

    whole = read_deepspeed(CHECKPOINTS / "stage2-fp16")
    for saved in range(9):
        cur = {
            "cur_scale": 16.0,
            "cur_iter": 0,
            "last_overflow_iter": -1,
            "scale_window": window,
            "cur_hysteresis": 1,
        }
        for step in range(saved):
            deepspeed(cur, step in overflows)
        scale = LossScale(1.0, window=window)
        state = loss_scale_of(checkpoint(whole.parameters, [], {}, dict(cur)))
        assert state is not None
        scale.load_state_dict(state)
        for step in range(saved, 16):
            assert scale.value == cur["cur_scale"], (saved, step)
            deepspeed(cur, False)
            scale.passed()


@pytest.mark.parametrize("name", ["stage1-fp32", "stage3-bf16", "universal-stage2"])
def test_a_changed_byte_of_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    """Values that a disk or a copy changed, which torch.load reads without an error."""
    copied = tmp_path / "copied"
    shutil.copytree(CHECKPOINTS / name, copied)
    pattern = "zero/head.weight/fp32.pt" if name.startswith("universal") else "*rank_1*optim_states.pt"
    [file] = copied.glob(f"*/{pattern}")
    with zipfile.ZipFile(file) as archive:
        largest = max((info for info in archive.infolist() if "/data/" in info.filename), key=lambda i: i.file_size)
    content = bytearray(file.read_bytes())
    name_length, extra_length = struct.unpack_from("<HH", content, largest.header_offset + 26)
    content[largest.header_offset + 30 + name_length + extra_length] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checksum of .* is wrong"):
        import_deepspeed(copied, tmp_path / "out")
    assert not (tmp_path / "out").exists()
