"""Saves in the background by several ranks: the same files as in the foreground, the same training, errors on all."""

from __future__ import annotations

from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch

from multirank import saving_cases as cases
from support.mounts import mount
from support.ranks import Group, RankFailed


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_saves_alike(group: Group, tmp_path: Path, **options: Any) -> None:
    outcomes = {}
    for how in ("", "foreground", "background"):
        directory = str(tmp_path / how)
        outcomes[how] = group.run(cases.saved, folder=str(tmp_path), directory=directory, how=how, **options)
        for found, expected in zip(outcomes[how], outcomes[""], strict=True):
            assert found["losses"] == expected["losses"]
            assert all(torch.equal(value, expected["values"][name]) for name, value in found["values"].items())
    files = content(tmp_path / "foreground" / "a")
    assert content(tmp_path / "background" / "a") == files
    units = sum(name.startswith("unit-") for name in files)
    first, *others = outcomes["background"]
    assert not first["overdue"]
    assert len(first["saved"]) == units
    assert first["waited"] == first["saved"][1:]  # the first is read at once
    for other in others:
        assert set(other["waited"]) <= set(first["saved"][1:])
    assert {path.name for path in (tmp_path / "background").iterdir()} == {"a", "latest"}


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "moments": "8bit", "update": "after_backward", "late": True},
        {"stage": 2, "param": "none", "optim": "cpu"},
        {"stage": 1, "param": "none", "optim": "nvme", "clip": 0.3},
        {"stage": 0, "param": "none", "optim": "none"},
        {"param": "cpu", "optim": "none", "update": "next_forward"},
    ],
    ids=str,
)
def test_the_same_files_and_the_same_training(pair: Group, options: dict[str, Any], tmp_path: Path) -> None:
    assert_saves_alike(pair, tmp_path, **options)


def test_a_group_of_one(single: Group, tmp_path: Path) -> None:
    assert_saves_alike(single, tmp_path, bf16=True)


def test_an_engine_that_is_collected_in_an_exchange_of_its_save(single: Group, tmp_path: Path) -> None:
    """Another thread closes it, since the save waits for the exchange."""
    assert single.run(cases.collected_in_an_exchange, folder=str(tmp_path)) == [[]]


@pytest.mark.parametrize("background", [[True, True, False], [False, True]], ids=str)
def test_closed_right_after(pair: Group, background: list[bool], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for names in pair.run(cases.closed_at_once, folder=str(tmp_path), directory=str(saved), background=background):
        assert names == ["latest", *(f"save {number}" for number in range(len(background)))]
    assert (saved / "latest").read_text() == f"save {len(background) - 1}"


@pytest.fixture(scope="module")
def undisturbed(pair: Group, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Results of both ranks with enough space."""
    return pair.run(cases.undisturbed, folder=str(tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.parametrize("where", ["wait", "step", "save", "wait on one"])
def test_a_full_disk(pair: Group, where: str, undisturbed: list[Any], tmp_path: Path) -> None:
    """All ranks are told, at the same point, once; nothing is left, and training goes on as if nothing had been."""
    small = tmp_path / "small"
    small.mkdir()
    unmount = mount("-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small))
    try:
        outcomes = pair.run(cases.without_space, folder=str(tmp_path), directory=str(small), where=where)
        assert list(small.iterdir()) == []
    finally:
        unmount()
    for found, expected in zip(outcomes, undisturbed, strict=True):
        assert len(found["told"]) == 1
        point, _, text = found["told"][0].partition(": ")
        assert point == outcomes[0]["told"][0].partition(": ")[0]
        assert point.startswith(where.split()[0]) or where in ("save", "wait on one")
        assert text.startswith(f"the checkpoint {small / 'b'} could not be written in the background: ")
        assert found["steps"] == 6
        assert all(a == b for a, b in zip(found["losses"], expected["losses"], strict=True) if a)
        assert all(torch.equal(value, expected["values"][name]) for name, value in found["values"].items())
    assert "No space left" in outcomes[0]["told"][0] and "rank 0 failed: OSError" in outcomes[1]["told"][0]


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """The others are told why there is no checkpoint; the former one is as it was."""
    group, saved = Group(2), tmp_path / "saved"
    try:
        with pytest.raises(RankFailed, match="the process ended"):
            group.run(cases.killed, timeout=120, folder=str(tmp_path), directory=str(saved))
    finally:
        group.stop()
    said, left = (saved / "said").read_text().splitlines()
    assert said.startswith(f"the checkpoint {saved / 'b'} could not be written in the background: ")
    assert left == str(["a", "latest"]) and (saved / "latest").read_text() == "a"


def test_ranks_that_save_differently(pair: Group, tmp_path: Path) -> None:
    for said in pair.run(cases.of_two_minds, folder=str(tmp_path), directory=str(tmp_path / "saved")):
        assert said.startswith("some ranks save in the background and others do not")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("what", ["tag", "directory", "bad tag"])
def test_ranks_that_name_different_checkpoints(pair: Group, what: str, tmp_path: Path) -> None:
    """All ranks raise the same error, which names each rank's checkpoint; nothing is written and training goes on."""
    here, there = str(tmp_path / "saved"), str(tmp_path / "elsewhere")
    first, second = {
        "tag": ([here, "a"], [here, "b"]),
        "directory": ([here, "right"], [there, "right"]),
        "bad tag": ([here, "right"], [here, "../right"]),
    }[what]
    told = pair.run(cases.of_several_minds, folder=str(tmp_path), saves=[first, second], loads=[first, second])
    assert told[0] == told[1]
    for said in told[0]:
        assert said.startswith("the ranks name different checkpoints. rank 0 ")
        assert f"tag {first[1]!r} in {first[0]}" in said and f"tag {second[1]!r} in {second[0]}" in said
    left = {path.name for path in (tmp_path / "saved").iterdir()}
    assert left == {"right", "after", "latest"} and not (tmp_path / "elsewhere").exists()


def test_one_folder_under_two_names(pair: Group, tmp_path: Path) -> None:
    """A symbolic link and its target count as the same folder."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "saved")
    both = [[str(tmp_path / "saved"), "a"], [str(tmp_path / "linked"), "a"]]
    for told in pair.run(cases.of_several_minds, folder=str(tmp_path), saves=both, loads=both):
        assert all(said.startswith("returned ") for said in told)


def test_machines_with_different_checkpoints_of_one_name(pair: Group, tmp_path: Path) -> None:
    for said in pair.run(cases.unlike, folder=str(tmp_path)):
        assert said.startswith("the ranks find different checkpoints at /machine, tag 'a': rank 0 crc32 ")


def test_client_state_of_one_rank_that_cannot_be_saved(pair: Group, tmp_path: Path) -> None:
    first, second = pair.run(cases.unfit, folder=str(tmp_path))
    assert first[0].startswith("rank 1 failed: CheckpointError: client_state cannot be saved") and first[1] == "False"
    where = PosixPath.__module__  # pathlib._local in Python 3.13
    assert f"(Unsupported global: GLOBAL {where}.PosixPath): use only tensors" in second[0] and second[1] == "False"
