"""Hostile and damaged files: refused by name, and nothing of them is executed, allocated or read elsewhere."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.deepspeed.importer.convert import import_deepspeed
from infinity.deepspeed.importer.files import read_pickle
from infinity.errors import CheckpointError

CHECKPOINTS = Path(__file__).parent / "deepspeed_checkpoints"
MODEL = "mp_rank_00_model_states.pt"


def archive(path: Path, pickled: bytes, **records: bytes) -> Path:
    """A file as torch.save writes it."""
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("archive/data.pkl", pickled)
        for name, content in records.items():
            out.writestr(f"archive/data/{name}", content)
    return path


class Evil:
    """Runs a command when unpickled by Python's own pickle."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (eval, "builtins.eval|__builtin__.eval"),
        (bytearray, "builtins.bytearray|__builtin__.bytearray"),
        (torch.empty, r"torch\S*empty|\S*getattr"),
        (torch.load, "torch.serialization.load"),
        (zipfile.Path, "zipfile.*Path"),
    ],
)
def test_functions_are_refused_by_name(function: Any, name: str, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    evil = Evil(function, f"touch {trap}")
    for hidden in (evil, {"module": OrderedDict(a=[evil])}):
        file = archive(tmp_path / "evil.pt", pickle.dumps(hidden, protocol=2))
        with pytest.raises(CheckpointError, match=rf"evil.pt refers to ({name}),.*Nothing of the file was executed"):
            read_pickle(file)
    assert not trap.exists()


def test_classes_marked_as_safe_elsewhere_are_refused_too(tmp_path: Path) -> None:
    class Local:
        pass

    Local.__module__, Local.__qualname__ = "application", "Local"
    with torch.serialization.safe_globals([Local]):  # type: ignore[no-untyped-call]
        file = archive(tmp_path / "local.pt", b"\x80\x02capplication\nLocal\n)\x81.")
        with pytest.raises(CheckpointError, match=r"refers to application.Local"):
            read_pickle(file)
        assert Local in torch.serialization.get_safe_globals()


def test_real_classes_of_deepspeed_are_not_used(tmp_path: Path) -> None:
    """A class under a name of DeepSpeed's that the application marked as safe is replaced by the stand-in."""
    ran = []

    class LossScaler:
        def __setstate__(self, state: Any) -> None:
            ran.append(state)

    LossScaler.__module__, LossScaler.__qualname__ = "deepspeed.runtime.fp16.loss_scaler", "LossScaler"
    pickled = b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}X\x01\x00\x00\x00aK\x01sb."
    with torch.serialization.safe_globals([LossScaler]):  # type: ignore[no-untyped-call]
        found = read_pickle(archive(tmp_path / "scaler.pt", pickled)).content
    assert found.attributes == {"a": 1} and not ran


def storage(numel: int, name: str = "0") -> bytes:
    """The pickle of a tensor of one element, whose storage declares `numel` elements."""
    number = b"\x8a\x08" + numel.to_bytes(8, "little", signed=True)
    text = b"X" + len(name).to_bytes(4, "little") + name.encode()
    saved = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + text + b"X\x03\x00\x00\x00cpu" + number + b"tQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + saved + b"K\x00K\x01\x85K\x01\x85\x89}tR."


@pytest.mark.parametrize("numel", [1 << 50, 3, 0, -4])
def test_declared_storages_are_compared_with_the_file(numel: int, tmp_path: Path) -> None:
    file = archive(tmp_path / "huge.pt", storage(numel), **{"0": b"\0" * 8})
    with pytest.raises(CheckpointError, match=rf"declares a storage of {numel} elements .* 8 bytes are stored"):
        read_pickle(file)
    assert read_pickle(archive(tmp_path / "good.pt", storage(2), **{"0": b"\0" * 8})).content.shape == (1,)


def test_a_storage_that_is_not_in_the_file_is_refused(tmp_path: Path) -> None:
    for name in ("1", "../../../etc/passwd", "archive/data.pkl"):
        file = archive(tmp_path / "no.pt", storage(2, name), **{"0": b"\0" * 8})
        with pytest.raises(CheckpointError, match="none is stored"):
            read_pickle(file)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    pickled = storage(2).replace(b"K\x00K\x01\x85K\x01\x85", b"K\x00J\xff\xff\xff\x7f\x85K\x01\x85")
    file = read_pickle(archive(tmp_path / "large.pt", pickled, **{"0": b"\0" * 8}))
    with pytest.raises(CheckpointError, match=r"w has shape \[2147483647\], for which its storage of 8 bytes"):
        file.place(file.content, "w")


def test_tensors_are_constructed_by_torchs_own_functions_only(tmp_path: Path) -> None:
    """A call of torch.Tensor does not allocate, and a tensor with attributes is constructed as one without."""
    huge = b"\x8a\x08" + (1 << 50).to_bytes(8, "little")
    found = read_pickle(archive(tmp_path / "call.pt", b"\x80\x02ctorch\nTensor\n" + huge + b"\x85R."))
    with pytest.raises(CheckpointError, match="w is a AnyTensor, and a tensor is expected"):
        found.place(found.content, "w")
    rebuilt = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nSize\nctorch\nTensor\n)}tR."
    with pytest.raises(CheckpointError, match=r"a tensor with attributes is constructed by .*Size"):
        read_pickle(archive(tmp_path / "other.pt", rebuilt))
    tensor = torch.nn.Parameter(torch.arange(3.0))
    tensor.stride = 3  # type: ignore[assignment, method-assign]
    torch.save(tensor, tmp_path / "attributes.pt")
    found = read_pickle(tmp_path / "attributes.pt")
    assert torch.equal(found.place(found.content, "w").read(), tensor)


def test_truncated_files_are_refused_at_every_length(tmp_path: Path) -> None:
    whole = (CHECKPOINTS / "stage2-adam" / "global_step3" / MODEL).read_bytes()
    file = tmp_path / "cut.pt"
    for size in range(0, len(whole), 97):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut.pt"):
            read_pickle(file)


def test_altered_pickles_raise_one_kind_of_error(tmp_path: Path) -> None:
    """A flipped byte in the pickle is refused, or changes a value; no other error, and no other class."""
    source = CHECKPOINTS / "stage2-adam" / "global_step3" / MODEL
    with zipfile.ZipFile(source) as records:
        name = next(name for name in records.namelist() if name.endswith("data.pkl"))
        content = records.read(name)
        others = {key.rpartition("/")[2]: records.read(key) for key in records.namelist() if "/data/" in key}
    for at in range(0, len(content), 13):
        altered = bytearray(content)
        altered[at] ^= 0xFF
        try:
            read_pickle(archive(tmp_path / "altered.pt", bytes(altered), **others))
        except CheckpointError as error:
            assert "altered.pt" in str(error)


def test_compressed_and_foreign_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", b"\x80\x02}." * 100)
    with pytest.raises(CheckpointError, match="is compressed, encrypted or cut off"):
        read_pickle(file)
    torch.save({}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="is not a zip archive"):
        read_pickle(file)
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("other", b"")
    with pytest.raises(CheckpointError, match=r"holds no data.pkl"):
        read_pickle(file)


@pytest.mark.parametrize("tag", ["../other", "/etc", "..", ".", "", "a/b", "a\\b", "a\0b"])
def test_a_latest_that_leads_elsewhere_is_refused(tag: str, tmp_path: Path) -> None:
    copy = shutil.copytree(CHECKPOINTS / "stage2-adam", tmp_path / "copy")
    (tmp_path / "other").mkdir()
    (copy / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="is not the name of a folder in it"):
        import_deepspeed(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    copy = shutil.copytree(CHECKPOINTS / "stage2-adam", tmp_path / "copy")
    file = copy / "global_step3" / MODEL
    shutil.move(file, tmp_path / MODEL)
    file.symlink_to(tmp_path / MODEL)
    with pytest.raises(CheckpointError, match=f"leads to {tmp_path / MODEL}, outside of"):
        import_deepspeed(copy, tmp_path / "out")


def test_names_of_parameters_lead_nowhere_else(tmp_path: Path) -> None:
    """A parameter of a universal checkpoint is looked up among the folders there, not joined to a path."""
    copy = shutil.copytree(CHECKPOINTS / "universal-stage2", tmp_path / "copy")
    for path in copy.rglob(MODEL):
        with zipfile.ZipFile(path) as records:
            content = {name: records.read(name) for name in records.namelist()}
        with zipfile.ZipFile(path, "w") as out:
            for name, own in content.items():
                out.writestr(name, own.replace(b"embedding.weight", b"../../../secrets"))
    with pytest.raises(CheckpointError, match=r"lacks the folder of parameter \.\./\.\./\.\./secrets"):
        import_deepspeed(copy, tmp_path / "out")


def test_tensors_of_every_layout_are_read_from_their_place(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = [base, base.t(), base[1:3, 2:], base[:, 3], torch.tensor(5), torch.empty(0, 3), base[2, 2]]
    torch.save(tensors, tmp_path / "tensors.pt")
    file = read_pickle(tmp_path / "tensors.pt")
    for stored, expected in zip(file.content, tensors, strict=True):
        place = file.place(stored, "t")
        assert torch.equal(place.read().view(expected.shape), expected)
        middle = expected.numel() // 2
        assert torch.equal(place.read(middle, expected.numel()), expected.reshape(-1)[middle:])


def test_a_pickle_that_holds_itself_ends(tmp_path: Path) -> None:
    state = torch.load(CHECKPOINTS / "stage2-adam" / "global_step3" / MODEL, weights_only=True)
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    copy = shutil.copytree(CHECKPOINTS / "stage2-adam", tmp_path / "copy")
    torch.save({**state, "mine": cyclic}, copy / "global_step3" / MODEL)
    with pytest.raises(CheckpointError, match="nested too deeply, or contains itself"):
        import_deepspeed(copy, tmp_path / "out")
