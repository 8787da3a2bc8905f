"""Folders of a job: refused before training, and removed after it if they were made for it and are empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2.outputs import joined, refuse_unwritable, working_folder
from infinity.errors import StorageError


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refuse_unwritable(tmp_path / "new" / "below")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="file is a file"):
            refuse_unwritable(path)
        with pytest.raises(StorageError, match="cannot be made"), working_folder(path):
            pass
    assert not (tmp_path / "new").exists()


def test_a_working_folder_is_removed_if_it_was_made_and_is_empty(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with working_folder(tmp_path / "old" / "new" / "nvme"):
        assert (tmp_path / "old" / "new" / "nvme").is_dir()
    assert not list((tmp_path / "old").iterdir())
    with working_folder(tmp_path / "old"):
        pass
    with working_folder(tmp_path / "old" / "new" / "nvme"):
        (tmp_path / "old" / "new" / "kept").touch()
    assert [path.name for path in (tmp_path / "old" / "new").iterdir()] == ["kept"]


def test_a_sample_has_an_empty_line_between_texts() -> None:
    assert joined(["    def f", "\n\nclass A\n"]) == "    def f\n\nclass A\n"
