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
        texts = [text for name in _library_files(root) if (text := name.read_bytes())]
        source = f"the Python standard library in {root}"
        if not texts:
            raise DataError(
                f"there is no Python source in {root}, which is the default text; name another one with --data"
            )
    else:
        root = Path(path)
        texts, source = _texts(root), str(root)
        if not texts:
            raise DataError(f"there is no text in {root}: every file there is empty, hidden or has zero bytes in it")
    if len(texts) == 1:
        cut = len(texts[0]) - len(texts[0]) // HELD_OUT_EVERY
        train, held_out = [texts[0][:cut]], [texts[0][cut:]]
    else:
        every = min(HELD_OUT_EVERY, len(texts))
        held_out = texts[every - 1 :: every]
        train = [text for index, text in enumerate(texts) if index % every != every - 1]
    return Corpus(_join(train), _join(held_out), source, len(texts))


def _library_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _texts(root: Path) -> list[bytes]:
    try:
        if not root.is_dir():
            return [text for text in [root.read_bytes()] if text]
        files = [
            Path(folder, name)
            for folder, folders, names in _sorted_walk(root)
            for name in names
            if not name.startswith(".") and Path(folder, name).is_file()
        ]
        return [text for file in files if (text := file.read_bytes()) and SEPARATOR not in text]
    except OSError as error:
        raise DataError(f"cannot read the text {error.filename or root}: {error.strerror}") from error


def _sorted_walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield folder, folders, sorted(names)


def _join(texts: list[bytes]) -> Bytes:
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `seq_length` tokens at random places. Sample i is a function of (seed, i) alone.

    So nothing needs saving to resume: step s of a batch of n is samples s * n to s * n + n - 1; a rank takes its slice.
    `len()` is the number of windows that there are; an index beyond it is as good as one below.
    """

    def __init__(self, tokens: Bytes, seq_length: int, seed: int = 0, what: str = "the text") -> None:
        if len(tokens) <= seq_length:
            raise DataError(
                f"{what} has {len(tokens)} bytes, and a sequence of {seq_length} needs {seq_length + 1}: "
                "give more text or a smaller seq_length"
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
