"""Files and variables from outside are checked in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.errors import UsageError
from infinity.inputs import is_file_name, member, number_of, parse_json, read_input


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "9" * 5000, "2147483648", "1 2", "\u00b2"])
def test_a_variable_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", text)
    with pytest.raises(UsageError, match=r"LOCAL_RANK is .*whole number from 0") as refused:
        number_of("LOCAL_RANK", 0)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(("text", "number"), [("", 7), ("3", 3)])
def test_a_variable_that_is_empty_has_the_default(monkeypatch: pytest.MonkeyPatch, text: str, number: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", text)
    assert number_of("LOCAL_RANK", 7) == number


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0", "a\n", "a\x1b[2J", "\ud800", "a\x7f", 3, None, []])
def test_names_that_are_no_entries_of_a_folder(name: object) -> None:
    assert not is_file_name(name)


def test_names_of_files_are_accepted() -> None:
    assert all(map(is_file_name, ("unit-00000.safetensors", ".hidden", "global step 3", "größe", "a..b")))


def test_links_within_a_folder_are_followed_and_links_out_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    (tmp_path / "outside").write_text("y")
    (folder / "in").symlink_to("file")
    (folder / "out").symlink_to("../outside")
    (folder / "chain").symlink_to("out")
    assert read_input(member(folder, "in")) == b"x"
    for name in ("out", "chain"):
        with pytest.raises(ValueError, match="outside of"):
            member(folder, name)


@pytest.mark.parametrize(("depth", "accepted"), [(100, True), (101, False), (900, False), (100_000, False)])
def test_json_has_a_largest_depth(depth: int, accepted: bool) -> None:
    text = "[" * depth + "]" * depth
    if accepted:
        parse_json(text)
        return
    with pytest.raises(ValueError, match="levels deep"):
        parse_json(text)
