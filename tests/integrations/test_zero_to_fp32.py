"""The functions of zero_to_fp32 give the results of DeepSpeed's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infinity.errors import CheckpointError, UsageError
from infinity.integrations.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from support.deepspeed_model import CASES, TinyModel

CHECKPOINTS = Path(__file__).parent / "deepspeed_checkpoints"
ZERO = [name for name, case in CASES.items() if case.stage > 0]


@pytest.mark.parametrize("name", ZERO)
def test_state_dict_equals_deepspeeds(name: str) -> None:
    expected = load_file(CHECKPOINTS / name / "fp32.safetensors")
    found = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / name)
    # DeepSpeed loses frozen parameters in stage 1.
    lost = {"blocks.0.up.weight", "blocks.0.up.bias"} if name == "stage1-frozen" else set()
    assert found.keys() == expected.keys() | lost
    for key, value in expected.items():
        assert value.dtype == found[key].dtype and torch.equal(value, found[key]), key


def test_frozen_parameters_are_left_out_on_request() -> None:
    for name in ("stage2-frozen", "stage3-frozen", "stage1-frozen"):
        found = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / name, exclude_frozen_parameters=True)
        every = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / name)
        assert every.keys() - found.keys() == {"blocks.0.up.weight", "blocks.0.up.bias"}


def test_shared_parameters_share_a_tensor() -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / "stage3-tied", "global_step3")
    assert found["head.weight"] is found["embedding.weight"]


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("limit", ["5GB", "500B", None])
def test_converted_files_hold_the_state_dict(safe: bool, limit: str | None, tmp_path: Path) -> None:
    source, out = CHECKPOINTS / "stage3-tied", tmp_path / "out"
    convert_zero_checkpoint_to_fp32_state_dict(source, out, max_shard_size=limit, safe_serialization=safe)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    if limit == "500B":
        index = json.loads((out / f"{stem}.{suffix}.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 2 and files[0] == f"{stem}-00001-of-{len(files):05d}.{suffix}"
    else:
        files = [f"{stem}.{suffix}"]
    assert sorted(path.name for path in out.glob(f"*.{suffix}")) == files
    read = load_file if safe else torch.load
    held = {name: value for file in files for name, value in read(out / file).items()}
    expected = get_fp32_state_dict_from_zero_checkpoint(source)
    assert held.keys() == expected.keys()
    assert all(torch.equal(value, held[name]) for name, value in expected.items())
    with pytest.raises(UsageError, match="already exists"):
        convert_zero_checkpoint_to_fp32_state_dict(source, out)


def test_a_model_is_loaded() -> None:
    model = TinyModel(tied=True)
    with torch.no_grad():
        model.shift.zero_()
    assert load_state_dict_from_zero_checkpoint(model, CHECKPOINTS / "stage2-tied") is model
    expected = load_file(CHECKPOINTS / "stage2-tied" / "fp32.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no file 'latest'"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
