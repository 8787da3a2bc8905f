"""Attacks: files that somebody prepared, each with the reader that meets it, the error it ends in, and words of it.

A checkpoint's index has the right checksum in all of them: whoever alters a file can write that, too.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import crc32_of
from infinity.errors import CheckpointError, ConfigError, InfinityError, UsageError

DEEP = "[" * 100_000
NESTED = "[" * 500 + "]" * 500
UNIT = "unit-00000.safetensors"
"""A file of the valid checkpoint, in its folder STEP."""
STEP = "step"
SPARSE = 1 << 33
"""Bytes of a file that takes no space."""


@dataclass(frozen=True)
class Attack:
    """reader: name of a function of `hostile.readers`. make: alters the valid input at a path."""

    name: str
    reader: str
    make: Callable[[Path], object]
    error: type[InfinityError]
    says: str


# -- kinds of files ----------------------------------------------------------------------------------------------------


def _put(content: bytes | str) -> Callable[[Path], object]:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda path: path.write_bytes(data)


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE)


def _link_out(path: Path) -> None:
    """A link to a file elsewhere, with the right content."""
    elsewhere = path.parent.parent.parent / f"elsewhere-{path.name}"
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(elsewhere)


NO_FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("a pipe", _fifo, "egular"),
    ("a folder", _folder, ""),
    ("a device", _device, ""),
]

# -- the index of a checkpoint -----------------------------------------------------------------------------------------


def reindex(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter the index of the checkpoint in `folder`, and its checksum with it."""
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())
    change(content)
    path.unlink()  # it may be a link
    path.write_text(seal(content))


def seal(content: dict[str, Any]) -> str:
    """Return an index with the right checksum."""
    fields = {key: value for key, value in content.items() if key not in ("format", "version", "crc32")}
    return json.dumps(
        {"format": content.get("format"), "version": content.get("version"), "crc32": crc32_of(fields)} | fields
    )


def _in_index(name: str, change: Callable[[dict[str, Any]], object], says: str = "damaged") -> Attack:
    return Attack(f"index: {name}", "checkpoint", lambda top: reindex(top / STEP, change), CheckpointError, says)


def _entry(**values: Any) -> Callable[[dict[str, Any]], object]:
    """Change the first parameter's entry."""
    return lambda index: next(iter(index["parameters"].values())).update(values)


def _moved(name: str) -> Callable[[dict[str, Any]], object]:
    """Let the first parameter's file have another name, everywhere in the index."""

    def change(index: dict[str, Any]) -> None:
        entry = next(iter(index["parameters"].values()))
        for table in ("file_bytes", "file_crc32"):
            index[table][name] = index[table][entry["file"]]
        entry["file"] = name

    return change


def _group(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["param_groups"][0].update(values)


def _without(table: str, file: str) -> Callable[[dict[str, Any]], object]:
    return lambda index: index[table].pop(file)


def _raw_index(name: str, make: Callable[[Path], object], says: str) -> Attack:
    return Attack(
        f"index: {name}", "checkpoint", lambda top: make(top / STEP / "checkpoint.json"), CheckpointError, says
    )


INDEX = [
    _raw_index("empty", _put(""), "cannot be read"),
    _raw_index("deep", _put(DEEP), "levels deep"),
    _raw_index("nested", _put(NESTED), "levels deep"),
    _raw_index("digits", _put('{"step": ' + "9" * 5000 + "}"), "digits"),
    _raw_index("no UTF-8", _put(b'{"a": "\xff"}'), "cannot be read"),
    _raw_index("duplicate key", _put('{"format": 1, "format": 2}'), "duplicated"),
    _raw_index("huge", _sparse, "Larger than"),
    _raw_index("a link out", _link_out, "outside of"),
    *(_raw_index(name, make, says) for name, make, says in NO_FILES),
    *(
        _in_index(f"file name {name!r}", _moved(name), "file name")
        for name in ("../../outside.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "a\nb", "a\x1b[2J")
    ),
    _in_index("surrogate in a file name", _moved("\ud800")),
    _in_index("shape of 2**62 rows", _entry(shape=[1 << 62, 4]), "shape"),
    _in_index("shape of 2**70", _entry(shape=[1 << 70])),
    _in_index("no elements and 2**62 columns", _entry(shape=[0, 1 << 62]), "shape"),
    _in_index("negative shape", _entry(shape=[-1, 8])),
    _in_index("shape of texts", _entry(shape=["8", "8"])),
    _in_index("shape of fractions", _entry(shape=[1.5])),
    _in_index("shape that is none", _entry(shape=8)),
    _in_index("dtype that is a function", _entry(dtype="load")),
    _in_index("dtype that is a module", _entry(dtype="os")),
    _in_index("dtype that is a list", _entry(dtype=["float32"])),
    _in_index("negative step", _entry(step=-1)),
    _in_index("step of 2**70", _entry(step=1 << 70)),
    _in_index("step of a truth value", _entry(step=True)),
    _in_index("trainable that is a number", _entry(trainable=1)),
    _in_index("group that is a text", _entry(group="0")),
    _in_index("another key of an entry", _entry(other=1)),
    _in_index("entry that is a list", lambda index: index["parameters"].update(x=[])),
    _in_index("parameters that are a list", lambda index: index.update(parameters=[])),
    _in_index("another key", lambda index: index.update(other=1)),
    _in_index("optimizer that is none", lambda index: index.update(optimizer="__class__")),
    _in_index("moments that are none", lambda index: index.update(moments="4bit")),
    _in_index("negative count of steps", lambda index: index.update(global_steps=-1)),
    _in_index("count of steps that is no number", lambda index: index.update(global_steps=float("nan"))),
    _in_index("size of 2**63", lambda index: index["file_bytes"].update({UNIT: 1 << 63})),
    _in_index("no size of a file", _without("file_bytes", UNIT)),
    _in_index("no checksum of a file", _without("file_crc32", UNIT)),
    _in_index("no checksum of client_state", _without("file_crc32", "client_state.pt")),
    _in_index("rate that is a text", _group(lr="fast"), "lr"),
    _in_index("rate that is no number", _group(lr=float("nan")), "lr"),
    _in_index("betas of texts", _group(betas=["a", "b"]), "betas"),
    _in_index("groups that are texts", lambda index: index.update(param_groups=["x"])),
    _in_index("schedule that is a list", lambda index: index.update(lr_scheduler=[1])),
    _in_index("version that is a list", lambda index: index.update(version=[4]), "version"),
]

# -- safetensors -------------------------------------------------------------------------------------------------------


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        header, data = _header(path)
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    return make


def _first(**values: Any) -> Callable[[Path], object]:
    """Change the first tensor of a file."""

    def change(header: dict[str, Any]) -> None:
        next(value for name, value in header.items() if name != "__metadata__").update(values)

    return _with_header(change)


def _overlapping(path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        (_, first), (_, second), *_ = (item for item in header.items() if item[0] != "__metadata__")
        second["data_offsets"] = first["data_offsets"]
        second["shape"], second["dtype"] = first["shape"], first["dtype"]

    _with_header(change)(path)


SAFETENSORS: list[tuple[str, Callable[[Path], object]]] = [
    ("empty", _put("")),
    ("cut", lambda path: path.write_bytes(path.read_bytes()[:-5])),
    ("header of 2**63", _put(struct.pack("<Q", 1 << 63) + b"{}")),
    ("header of 2**64 - 1", _put(b"\xff" * 8 + b"{}")),
    ("header longer than the file", _put(struct.pack("<Q", 99 << 20) + b"{}")),
    ("deep header", _put(struct.pack("<Q", len(DEEP)) + DEEP.encode())),
    ("header of no UTF-8", _put(struct.pack("<Q", 4) + b'{"\xff}')),
    ("overlapping tensors", _overlapping),
    ("negative offsets", _first(data_offsets=[-8, 8])),
    ("offsets beyond the file", _first(data_offsets=[0, 1 << 40])),
    ("offsets of 2**64", _first(data_offsets=[0, 1 << 64])),
    ("offsets in reverse", _first(data_offsets=[64, 0])),
    ("shape of 2**62", _first(shape=[1 << 62, 4])),
    ("shape that overflows to the right size", _first(shape=[1 << 32, 1 << 32])),
    ("another dtype", _first(dtype="I32")),
    ("dtype that is none", _first(dtype="F31")),
    *((name, make) for name, make, _ in NO_FILES),
]


def _resize(top: Path, file: str) -> None:
    """Write size and checksum of a file that was altered into the index."""
    path = top / STEP / file
    content = path.read_bytes() if path.is_file() and path.stat().st_size < SPARSE else b""

    def change(index: dict[str, Any]) -> None:
        index["file_bytes"][file], index["file_crc32"][file] = len(content), zlib.crc32(content)

    reindex(top / STEP, change)


def _in_file(file: str, name: str, make: Callable[[Path], object], says: str = "") -> Attack:
    def both(top: Path) -> None:
        make(top / STEP / file)
        _resize(top, file)

    return Attack(f"{file}: {name}", "checkpoint", both, CheckpointError, says or file)


# -- pickles -----------------------------------------------------------------------------------------------------------


def archive(
    path: Path,
    pickled: bytes,
    records: dict[str, bytes] | None = None,
    *,
    compression: int = zipfile.ZIP_STORED,
    again: bytes | None = None,
) -> None:
    """Write an archive as torch.save does. again: a second pickle of the same name."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        for name, content in (records or {}).items():
            file.writestr(f"archive/data/{name}", content)
        if again is not None:
            file.writestr("archive/data.pkl", again)


def _saved(value: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(value, path)


def calls(name: str, argument: bytes) -> bytes:
    """Return a pickle of {"x": name(argument)}. name: "module name"."""
    return b"\x80\x02}X\x01\x00\x00\x00xc" + name.replace(" ", "\n").encode() + b"\n" + argument + b"\x85Rs."


_TERABYTE = b"\x8a\x06\x00\x00\x00\x00\x00\x01"  # LONG1
_GIGABYTE = b"J\x00\x00\x00\x40"  # BININT


def _tensor_of(numel: int, stored: bytes, **options: Any) -> Callable[[Path], object]:
    """A tensor whose storage has `numel` elements, and `stored` for them."""
    storage = torch.UntypedStorage(4)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, torch.storage.TypedStorage):
                return ("storage", torch.FloatStorage, "0", "cpu", numel)
            return None

    tensor = torch.tensor([], dtype=torch.float32).set_(storage)
    content = io.BytesIO()
    Pickler(content, 2).dump({"x": tensor})
    pickled = content.getvalue().replace(b"K\x01\x85", b"J" + struct.pack("<i", min(numel, 2**31 - 1)) + b"\x85", 1)
    return lambda path: archive(path, pickled, {"0": stored}, **options)


def _nested_tuples(path: Path) -> None:
    archive(path, b"\x80\x02" + b"N" + b"\x85" * 200_000 + b".")


PICKLES: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty", _put(""), ""),
    ("no archive", _put(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R."), "not a zip"),
    ("os.system", lambda path: archive(path, calls("posix system", b"X\x02\x00\x00\x00id")), "system"),
    ("builtins.eval", lambda path: archive(path, calls("builtins eval", b"X\x01\x00\x00\x001")), "eval"),
    ("getattr", lambda path: archive(path, calls("builtins getattr", b"X\x01\x00\x00\x001")), "getattr"),
    ("torch.load itself", lambda path: archive(path, calls("torch.serialization load", b"X\x01\x00\x00\x001")), "load"),
    ("bytearray of a gigabyte", lambda path: archive(path, calls("builtins bytearray", _GIGABYTE)), "bytearray"),
    ("bytearray of a terabyte", lambda path: archive(path, calls("builtins bytearray", _TERABYTE)), "bytearray"),
    ("tensor of a terabyte", lambda path: archive(path, calls("torch Tensor", _TERABYTE)), "size"),
    ("tensor class of a gigabyte", lambda path: archive(path, calls("torch FloatTensor", _GIGABYTE)), "FloatTensor"),
    ("storage larger than its record", _tensor_of(1 << 20, b"1234"), "4 bytes are stored"),
    ("storage of 2**31", _tensor_of(2**31 - 1, b"1234"), "4 bytes are stored"),
    ("record that is compressed", _tensor_of(1 << 26, bytes(1 << 28), compression=zipfile.ZIP_DEFLATED), "compressed"),
    ("pickle twice", lambda path: archive(path, b"\x80\x02}.", again=b"\x80\x02N."), "twice"),
    ("a list", _saved([1]), ""),
    ("nested tuples", _nested_tuples, ""),
    *((name, make, says) for name, make, says in NO_FILES),
]


def _rng(**states: Any) -> Callable[[Path], object]:
    """Replace states of the first rank's generators."""

    def make(path: Path) -> None:
        own = torch.load(io.BytesIO(torch.load(path)[0].numpy().tobytes())) | states
        packed = io.BytesIO()
        torch.save(own, packed)
        torch.save([torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)], path)

    return make


_WORDS = torch.zeros(624, dtype=torch.int64)
RNG: list[tuple[str, Callable[[Path], object]]] = [
    ("numpy reads beyond its array", _rng(numpy=("MT19937", _WORDS, 1 << 30, 0, 0.0))),
    ("numpy reads before its array", _rng(numpy=("MT19937", _WORDS, -(1 << 30), 0, 0.0))),
    ("numpy of another kind", _rng(numpy=("PCG64", _WORDS, 0, 0, 0.0))),
    ("numpy of few words", _rng(numpy=("MT19937", _WORDS[:3], 0, 0, 0.0))),
    ("python beyond its array", _rng(python=(3, torch.full((625,), 1 << 20), None))),
    ("python of few words", _rng(python=(3, torch.zeros(3, dtype=torch.int64), None))),
    ("torch of few bytes", _rng(torch=torch.zeros(16, dtype=torch.uint8))),
    ("torch of 0xff", _rng(torch=torch.full((5056,), 255, dtype=torch.uint8))),
    ("cuda that is a text", _rng(cuda="x")),
    ("bytes that are an expanded tensor", _saved([torch.zeros(1, dtype=torch.uint8).expand(1 << 36)])),
    ("bytes that are numbers", _saved([torch.zeros(8)])),
    ("no list", _saved({"a": 1})),
]

# -- latest ------------------------------------------------------------------------------------------------------------

TAGS: list[tuple[str, bytes]] = [
    ("a path upwards", b"../../etc"),
    ("an absolute path", b"/etc"),
    ("two lines", b"step\nother"),
    ("NUL", b"step\0"),
    ("no UTF-8", b"\xff\xfe"),
    ("empty", b""),
    ("the folder itself", b"."),
    ("wildcards", b"*"),
]


def _latest(name: str, make: Callable[[Path], object], says: str = "latest") -> Attack:
    return Attack(f"latest: {name}", "checkpoint", lambda top: make(top / "latest"), CheckpointError, says)


LATEST = [
    *(_latest(name, _put(content), "") for name, content in TAGS),
    _latest("huge", _sparse),
    *(_latest(name, make) for name, make, _ in NO_FILES),
]

CHECKPOINTS = [
    *INDEX,
    *(_in_file(UNIT, name, make) for name, make in SAFETENSORS),
    *(
        _in_file("buffers.safetensors", name, make, "buffer")
        for name, make in SAFETENSORS
        if name not in ("overlapping tensors",)
    ),
    _in_file(UNIT, "a link out", _link_out, "outside of"),
    *(_in_file("client_state.pt", name, make, says) for name, make, says in PICKLES),
    *(_in_file("rng.pt", name, make, says) for name, make, says in PICKLES if name != "a list"),
    *(_in_file("rng.pt", name, make) for name, make in RNG),
    *LATEST,
]

# -- pretrained weights, DeepSpeed's checkpoints, and text files -------------------------------------------------------


def _map(file: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file}}))

    return make


def _at(file: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: make(folder / file)


def _sharded(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def both(folder: Path) -> None:
        _map("part.safetensors")(folder)
        make(folder / "part.safetensors")

    return both


def _weights_index(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def both(folder: Path) -> None:
        _map("part.safetensors")(folder)
        make(folder / "model.safetensors.index.json")

    return both


PRETRAINED = [
    *(
        Attack(f"weights: {name}", "pretrained", _at("model.safetensors", make), CheckpointError, "")
        for name, make in SAFETENSORS
    ),
    *(
        Attack(f"weights: index names {file!r}", "pretrained", _map(file), CheckpointError, "not a file in the same")
        for file in ("../part.safetensors", "/etc/passwd", "..", ".", "", "a\0", "a\n", "\ud800")
    ),
    *(
        Attack(f"weights: part is {name}", "pretrained", _sharded(make), CheckpointError, says)
        for name, make, says in NO_FILES
    ),
    *(
        Attack(f"weights: index is {name}", "pretrained", _weights_index(make), CheckpointError, "")
        for name, make, _ in (*NO_FILES, ("deep", _put(DEEP), ""), ("huge", _sparse, ""), ("nested", _put(NESTED), ""))
    ),
]

DEEPSPEED = [
    *(
        Attack(f"deepspeed: latest is {name}", "deepspeed", _at("latest", _put(content)), CheckpointError, "")
        for name, content in TAGS
    ),
    Attack("deepspeed: latest is huge", "deepspeed", _at("latest", _sparse), CheckpointError, "Larger than"),
    *(
        Attack(
            f"deepspeed: model states are {name}",
            "deepspeed",
            _at("step/mp_rank_00_model_states.pt", make),
            CheckpointError,
            "",
        )
        for name, make, _ in PICKLES
    ),
]

TEXTS: list[tuple[str, Callable[[Path], object]]] = [
    ("empty", _put("")),
    ("deep", _put(DEEP)),
    ("deep objects", _put('{"a":' * 100_000)),
    ("nested", _put(NESTED)),
    ("nested objects", _put('{"a":' * 500 + "1" + "}" * 500)),
    ("digits", _put('{"a": ' + "9" * 5000 + "}")),
    ("no UTF-8", _put(b'{"a": "\xff"}')),
    ("UTF-16 cut off", _put(b"\xff\xfe{\x00")),
    ("NUL", _put("\0" * 1000)),
    ("duplicate key", _put('{"aio": 1, "aio": 2}')),
    ("a list", _put("[1, 2]")),
    ("huge", _sparse),
    *((name, make) for name, make, _ in NO_FILES),
]

CONFIGS: list[tuple[str, Callable[[Path], object]]] = [
    *TEXTS,
    ("comments without an end", _put("/*" * 500_000)),
    ("comments in an object", _put("{" + "/*" * 500_000)),
    ("nested Hjson", _put("{a: " * 900 + "}" * 900)),
    ("deep Hjson", _put("{a: [" * 20_000)),
    ("unknown keys", _put(json.dumps({f"key{number}": number for number in range(20_000)}))),
    ("a key of a megabyte", _put(json.dumps({"k" * 1_000_000: 1}))),
    ("a batch of infinity", _put('{"train_batch_size": 1e999}')),
    ("a rate that is no number", _put('{"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": NaN}}}')),
]

MODELS: list[tuple[str, Callable[[Path], object]]] = [
    *(text for text in TEXTS if text[0] != "a folder"),
    *(
        (f"{key} of {value}", _put(json.dumps({"model_type": "gpt2", key: value})))
        for key, value in (
            ("n_layer", 10**9),
            ("n_layer", "x"),
            ("n_embd", 1 << 62),
            ("n_embd", -8),
            ("n_embd", 0),
            ("vocab_size", 1 << 70),
            ("n_head", 0),
            ("activation_function", "os.system"),
        )
    ),
    ("model_type that is a list", _put('{"model_type": ["gpt2"]}')),
    ("model_type that is a path", _put('{"model_type": "../../x"}')),
]

READERS: list[Attack] = [
    *PRETRAINED,
    *DEEPSPEED,
    *(Attack(f"config: {name}", "config", make, ConfigError, "") for name, make in CONFIGS),
    *(Attack(f"bandwidths: {name}", "bandwidths", make, ConfigError, "") for name, make in TEXTS),
    *(Attack(f"trace: {name}", "trace", make, UsageError, "") for name, make in TEXTS),
    *(Attack(f"model: {name}", "model", make, ConfigError, "") for name, make in MODELS),
]

ATTACKS = [*CHECKPOINTS, *READERS]
