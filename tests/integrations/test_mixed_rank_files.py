"""Files of ranks that were swapped, or are of another step or run: the import refuses them by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.deepspeed.importer.convert import import_deepspeed, read_deepspeed
from infinity.deepspeed.importer.files import STAND_INS, FileTensor
from infinity.deepspeed.importer.states import Computed
from infinity.errors import CheckpointError
from infinity.integrations.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from support.deepspeed_model import CASES

CHECKPOINTS = Path(__file__).parent / "deepspeed_checkpoints"
TWO_RANKS = [name for name, case in CASES.items() if case.ranks == 2 and not case.universal]


def copied(name: str, tmp_path: Path) -> Path:
    """Copy a checkpoint, and return the folder with its files."""
    copy = Path(shutil.copytree(CHECKPOINTS / name, tmp_path / "copy"))
    (folder,) = (path for path in copy.iterdir() if path.is_dir())
    return folder


def rank_files(folder: Path, kind: str = "optim") -> list[Path]:
    return sorted(folder.glob(f"*zero_pp_rank_*_{kind}_states.pt"))


def content_of(path: Path) -> Any:
    """Return what a file holds, without objects of DeepSpeed's classes, so that it can be saved again."""
    with torch.serialization.safe_globals(list(STAND_INS.values())):  # type: ignore[no-untyped-call]
        content = torch.load(path, weights_only=True)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if state is not None:
        stage = 3 if "fp32_flat_groups" in state else 2
        state |= {"zero_stage": stage, "loss_scaler": None, "param_slice_mappings": []}
    return content


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = content_of(path)
    change(content)
    torch.save(content, path)


def check_refused(folder: Path, tmp_path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_deepspeed(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def swap(first: Path, second: Path) -> None:
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_renamed_files_of_ranks_are_refused(name: str, tmp_path: Path) -> None:
    """The optimizer's files of ranks 0 and 1, each under the name of the other."""
    folder = copied(name, tmp_path)
    swap(*rank_files(folder))
    check_refused(folder, tmp_path, r"rank_\d_mp_rank_00_optim_states.pt was saved as .*rank_\d_.*were swapped")


def test_renamed_model_files_of_stage_3_are_refused(tmp_path: Path) -> None:
    folder = copied("stage3-frozen", tmp_path)
    swap(*rank_files(folder, "model"))
    check_refused(folder, tmp_path, "rank_0_mp_rank_00_model_states.pt was saved as zero_pp_rank_1")


@pytest.mark.parametrize("name", [name for name in TWO_RANKS if CASES[name].stage < 3])
def test_masters_in_another_order_are_refused_below_stage_3(name: str, tmp_path: Path) -> None:
    """The contents of ranks 0 and 1 are exchanged, and the files have the names that they were saved under."""
    folder = copied(name, tmp_path)
    files = rank_files(folder)
    contents = [content_of(path) for path in files]
    for path, content in zip(files, reversed(contents), strict=True):
        torch.save(content, path)
    check_refused(folder, tmp_path, r"the masters of .* do not round to its values in .*|shape .*, and its masters")


def test_a_rank_of_another_run_is_refused_by_every_reader(tmp_path: Path) -> None:
    """One rank's masters are slightly off, by less than a training step."""

    def move(content: Any) -> None:
        (masters,) = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters.data[-1] += 1e-5

    folder = copied("stage2-frozen", tmp_path)
    edit(rank_files(folder)[1], move)
    edit(rank_files(folder)[0], lambda content: None)  # without the loss scaler, as the other
    message = "rank_1_.*: the masters of head.bias do not round to its values in .*mp_rank_00_model_states.pt"
    check_refused(folder, tmp_path, message)
    with pytest.raises(CheckpointError, match=message):
        get_fp32_state_dict_from_zero_checkpoint(folder)
    for safe in (False, True):
        with pytest.raises(CheckpointError, match=message):
            convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", safe_serialization=safe)
    assert not (tmp_path / "out").exists()


def constants(content: Any) -> Any:
    return content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]


def first_state(content: Any) -> Any:
    return content["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("optim", lambda content: first_state(content)["step"].add_(1), "in stage, groups, steps or moments"),
        ("optim", lambda content: constants(content).update(lr=0.02), "have different constants of param_groups"),
        ("optim", lambda content: content["optimizer_state_dict"].update(partition_count=4), "was saved by 4 ranks"),
        ("model", lambda content: content.update(global_steps=4), "has global_steps 4, and .* 3: files of several"),
        ("model", lambda content: content.update(skipped_steps=1), "has skipped_steps 1, and .* 0: files of several"),
    ],
)
def test_a_rank_of_another_step_is_refused_in_stage_3(kind: str, change: Any, message: str, tmp_path: Path) -> None:
    folder = copied("stage3-frozen", tmp_path)
    edit(rank_files(folder, kind)[1], change)
    if kind == "optim":
        edit(rank_files(folder)[0], lambda content: None)  # without the loss scaler, as the other
    check_refused(folder, tmp_path, message)


def test_a_loss_scale_of_another_step_is_refused(tmp_path: Path) -> None:
    """One rank's file has the loss scaler that DeepSpeed saved, the other has none."""
    folder = copied("stage3-bf16", tmp_path)
    edit(rank_files(folder)[1], lambda content: None)
    check_refused(folder, tmp_path, "have different loss scales")


@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_of_stage_3_is_refused(kind: str, rank: int, tmp_path: Path) -> None:
    folder = copied("stage3-bf16", tmp_path)
    rank_files(folder, kind)[rank].unlink()
    check_refused(
        folder, tmp_path, "was saved by 2 ranks|lacks the optimizer's file of rank 0|lacks a rank's model states"
    )


def test_mixed_universal_checkpoints_are_refused(tmp_path: Path) -> None:
    """A state under another's name, a master and a step of another run, a missing file of a rank."""
    folder = copied("universal-stage2", tmp_path)
    own = folder / "zero" / "head.weight"
    kept = shutil.copytree(own, tmp_path / "kept")

    def restore() -> None:
        shutil.copytree(kept, own, dirs_exist_ok=True)

    shutil.copy(own / "exp_avg.pt", own / "fp32.pt")
    check_refused(folder, tmp_path, r"fp32\.pt was saved as exp_avg\.pt")
    restore()
    edit(own / "fp32.pt", lambda content: content["param"].data[0, 0].add_(1e-5))
    check_refused(folder, tmp_path, "fp32.pt: the masters of head.weight do not round")
    restore()
    torch.save(content_of(own / "step.pt") + 1, own / "step.pt")
    check_refused(folder, tmp_path, "parameters of group 0 have different steps")
    restore()
    import_deepspeed(folder, tmp_path / "out")


def test_a_missing_rank_of_a_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = copied("universal-stage3", tmp_path)
    rank_files(folder, "model")[1].unlink()
    check_refused(folder, tmp_path, "was saved by 2 ranks, and holds the model's files of 1")


@pytest.mark.parametrize("name", CASES)
def test_masters_are_compared_wherever_the_model_is_saved(name: str) -> None:
    """All trained parameters of stages 1 and 2; in stage 3 the model's files hold no values."""
    trained = {key: each for key, each in read_deepspeed(CHECKPOINTS / name).parameters.items() if each.trained}
    compared = {key for key, each in trained.items() if each.states["master"].computed is not None}
    assert compared == (set(trained) if CASES[name].stage in (1, 2) else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_round_as_deepspeed_rounds(dtype: torch.dtype, tmp_path: Path) -> None:
    """To nearest, with ties to even; NaNs match NaNs only."""
    masters = torch.cat([torch.randn(1000), torch.tensor([1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 1e6, -0.0, torch.nan])])
    own = masters.to(dtype)
    for place in (None, 1000, 1001, 1005):
        other = own.clone()
        if place is not None:
            other[place] = torch.nextafter(other[place], torch.tensor(9, dtype=dtype)) if place < 1005 else 1.0
        (tmp_path / "values").write_bytes(other.view(torch.uint8).numpy().tobytes())
        computed = Computed("w", FileTensor(tmp_path / "values", 0, dtype, tuple(own.shape), (1,)))
        assert computed.matches(masters, 0) == (place is None)
        assert computed.matches(masters[:1000], 0)
