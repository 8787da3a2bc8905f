"""Text as bytes: a corpus that every machine has, and random windows of it that can be drawn again.

A token is a byte, so there is no tokenizer to download and the vocabulary is 256.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from infinity.errors import InfinityError

VOCAB_SIZE = 256
SEPARATOR = b"\0"
"""Stands between two files; text has no zero byte of its own."""
HELD_OUT_EVERY = 10
"""One file in this many is held out; of a single file, the last part in this many."""

# Not the library but its tests, its bundled programs, installed packages, and tables with little to learn in them.
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo"}
_SKIPPED_FOLDERS |= {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}

Bytes = npt.NDArray[np.uint8]


class DataError(InfinityError, ValueError):
    """The text asked for is not there or is too short."""


@dataclass(frozen=True)
class Corpus:
    """Text to train on and text to measure on; no file is in both, except when there is one file only."""

    train: Bytes
    held_out: Bytes
    source: str
    """Where it came from, to print."""
    files: int


def load_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """The text of a file; of every file below a folder (hidden ones and those with a zero byte, which are not text, are
    left out); or, for None, the source of the running interpreter's standard library.

    Files are in sorted order and every tenth one is held out: a folder gives the same corpus on every run and rank.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        texts, nothing = (
            _read(_library_files(root)),
            "Python source, which is the default text. Name another with --data.",
        )
        source = f"the Python standard library in {root}"
    else:
        root, nothing = (
            Path(path),
            "text: every file is empty, hidden or contains zero bytes. Name another file or folder.",
        )
        source = str(root)
        if root.is_file() and root.stat().st_size:
            return _one_file(root)
        texts = _read(_text_files(root))
    if not texts:
        raise DataError(f"{root} has no {nothing}")
    if len(texts) == 1:
        return _split(np.frombuffer(texts[0], np.uint8), source)
    every = min(HELD_OUT_EVERY, len(texts))
    train = [text for index, text in enumerate(texts) if index % every != every - 1]
    return Corpus(_join(train), _join(texts[every - 1 :: every]), source, len(texts))


def _one_file(path: Path) -> Corpus:
    try:
        return _split(
            np.memmap(path, np.uint8, mode="r"), str(path)
        )  # as large as it likes: pages come when they are read
    except OSError as error:
        raise DataError(f"The text {path} cannot be read: {error.strerror}. Name another file or folder.") from error


def _split(text: Bytes, source: str) -> Corpus:
    cut = len(text) - len(text) // HELD_OUT_EVERY
    return Corpus(text[:cut], text[cut:], source, 1)


def _library_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _text_files(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    if not root.is_dir():
        yield root  # a pipe, an empty file, or nothing at all: reading it says which
        return
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _read(files: Iterator[Path]) -> list[bytes]:
    """The files' contents, without those that are empty or no text."""
    try:
        return [text for file in files if (text := file.read_bytes()) and SEPARATOR not in text]
    except OSError as error:
        raise DataError(
            f"The text {error.filename} cannot be read: {error.strerror}. Name another file or folder."
        ) from error


def _join(texts: list[bytes]) -> Bytes:
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `seq_length` tokens at random places. Sample i is a function of (seed, i) alone.

    So nothing needs saving to resume: step s of a batch of n is samples s * n to s * n + n - 1; a rank takes its slice.
    `len()` is the number of windows that there are; an index beyond it is as good as one below.
    """

    def __init__(self, tokens: Bytes, seq_length: int, seed: int = 0, what: str = "The text") -> None:
        if len(tokens) <= seq_length:
            raise DataError(
                f"{what} has {len(tokens)} bytes, but a sequence of {seq_length} needs {seq_length + 1}. "
                "Give more text or a smaller seq_length."
            )
        self.tokens, self.seq_length, self.seed = tokens, seq_length, seed

    def __len__(self) -> int:
        return len(self.tokens) - self.seq_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs (T,) int64 and targets (T,) int64, the token after each input."""
        # Philox is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): no state.
        bits = int(np.random.Philox(key=self.seed, counter=index).random_raw())
        return self._window(bits % len(self))

    def _window(self, start: int) -> tuple[Tensor, Tensor]:
        window = torch.from_numpy(self.tokens[start : start + self.seq_length + 1].astype(np.int64))
        return window[:-1], window[1:]

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples `first` to `first + count - 1`: inputs and targets, each (count, T) int64."""
        inputs, targets = zip(*(self[index] for index in range(first, first + count)), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def spread(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` windows evenly spread over the text, the same for every seed: what held-out loss is measured on."""
        starts = np.linspace(0, len(self) - 1, count).astype(int)
        inputs, targets = zip(*(self._window(int(start)) for start in starts), strict=True)
        return torch.stack(inputs), torch.stack(targets)


def to_tokens(text: str | bytes) -> Tensor:
    """(1, T) int64."""
    data = text.encode() if isinstance(text, str) else text
    return torch.tensor([list(data)], dtype=torch.int64)


def to_text(tokens: Tensor) -> str:
    """The text of tokens (T,). What is not text shows as U+FFFD: control characters, broken UTF-8, tokens above 255."""
    text = b"".join(bytes([t]) if t < VOCAB_SIZE else b"\xff" for t in tokens.tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
