"""The corpus is the same everywhere, and its windows are a function of seed and number."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2.data import Bytes, DataError, TokenDataset, load_corpus, to_text, to_tokens


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def numbers(count: int) -> Bytes:
    return (np.arange(count) % 251).astype(np.uint8)


def test_the_default_is_the_standard_library() -> None:
    corpus = load_corpus()
    assert len(corpus.train) > 2_000_000 and len(corpus.held_out) > 200_000
    assert b"class OrderedDict" in corpus.train.tobytes() + corpus.held_out.tobytes()
    assert b"\nimport unittest\n" not in corpus.train[:100_000].tobytes()  # no tests at the start (test/ is skipped)
    again = load_corpus()
    assert np.array_equal(corpus.train, again.train) and np.array_equal(corpus.held_out, again.held_out)


def test_a_folder_in_sorted_order_every_tenth_file_held_out(tmp_path: Path) -> None:
    names = [f"{folder}/{number}.txt" for folder, number in itertools.product("ba", range(10))]
    write(tmp_path, {name: name.encode() for name in names})
    write(tmp_path, {".git/x": b"hidden", "a/.x": b"hidden", "a/blob": b"\x7f\0\1", "b/empty": b""})
    corpus = load_corpus(tmp_path)
    ordered = sorted(names)
    assert corpus.held_out.tobytes().decode().split("\0") == [ordered[9], ordered[19]]
    assert corpus.train.tobytes().decode().split("\0") == [n for n in ordered if n not in (ordered[9], ordered[19])]
    assert corpus.files == 20


def test_the_last_tenth_of_one_file_is_held_out(tmp_path: Path) -> None:
    file = write(tmp_path, {"one.txt": bytes(range(1, 101))}) / "one.txt"
    for path in (file, str(file), tmp_path):
        corpus = load_corpus(path)
        assert corpus.train.tolist() == list(range(1, 91)) and corpus.held_out.tolist() == list(range(91, 101))


def test_of_two_files_one_is_held_out(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path, {"a": b"train", "b": b"held out"}))
    assert corpus.train.tobytes() == b"train" and corpus.held_out.tobytes() == b"held out"


def test_bad_paths_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"The text .*missing cannot be read: No such file or directory\."):
        load_corpus(tmp_path / "missing")
    with pytest.raises(DataError, match="has no text"):
        load_corpus(tmp_path)
    write(tmp_path, {"empty": b""})
    with pytest.raises(DataError, match="has no text"):
        load_corpus(tmp_path / "empty")


def test_text_shorter_than_a_sequence() -> None:
    with pytest.raises(DataError, match="The text has 16 bytes, but a sequence of 16 needs 17"):
        TokenDataset(numbers(16), 16)
    inputs, targets = TokenDataset(numbers(17), 16).batch(0, 3)  # the only window
    assert inputs.tolist() == [list(range(16))] * 3 and targets.tolist() == [list(range(1, 17))] * 3


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = TokenDataset(numbers(251), 9, seed=3).batch(5, 40)
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (40, 9)
    assert torch.equal(targets, inputs + 1)


def test_a_sample_depends_on_seed_and_number_only() -> None:
    data = TokenDataset(numbers(5000), 30, seed=7)
    whole = data.batch(0, 12)[0]
    halves = torch.cat([data.batch(0, 6)[0], data.batch(6, 6)[0]])  # two ranks, or two steps
    assert torch.equal(whole, halves) and torch.equal(whole[4], TokenDataset(numbers(5000), 30, seed=7)[4][0])
    assert not torch.equal(whole, TokenDataset(numbers(5000), 30, seed=8).batch(0, 12)[0])


def test_samples_cover_the_text_evenly() -> None:
    tokens = np.repeat(np.arange(10, dtype=np.uint8), 400)
    inputs, _ = TokenDataset(tokens, 1).batch(0, 4000)
    counts = torch.bincount(inputs.flatten(), minlength=10)
    assert counts.min() > 320 and counts.max() < 480  # 400 expected, 19 standard deviation


def test_spread_windows_reach_both_ends() -> None:
    inputs, targets = TokenDataset(numbers(200), 10).spread(4)
    assert inputs.shape == (4, 10) and inputs[0, 0] == 0 and targets[-1, -1] == 199


def test_text_and_tokens() -> None:
    assert to_tokens("né").tolist() == [[110, 195, 169]]
    assert to_text(to_tokens("né")[0]) == "né"
    assert to_text(torch.tensor([104, 105, 10, 27, 195, 8000])) == "hi\n\ufffd\ufffd\ufffd"
