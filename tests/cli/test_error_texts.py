"""Errors of commands are one line on stderr that names the value and the fix; no other test reaches these."""

from __future__ import annotations

from pathlib import Path

from infinity.native import _aio
from support.commands import refused


def test_more_folders_than_threads_are_refused(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(_aio.MOST_THREADS + 1)]
    for folder in folders:
        folder.mkdir()
    paths = [argument for folder in folders for argument in ("--path", folder)]
    refused(2, f"--path lists {len(folders)} folders, but an engine serves at most", "tune", *paths)
    refused(2, f"and an engine has at most {_aio.MOST_THREADS}: lower --threads", "aio-bench", *paths)


def test_one_file_for_two_outputs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "both.png"
    refused(2, "--out and --plot are both", "tune", "--path", tmp_path, "--out", file, "--plot", file)
    assert list(tmp_path.iterdir()) == []


def test_an_export_in_files_of_no_size_is_refused(tmp_path: Path) -> None:
    export = ("export", tmp_path, tmp_path / "out", "--max-shard-size", "0")
    refused(2, "--max-shard-size must be more than 0 bytes", *export)
    assert list(tmp_path.iterdir()) == []
