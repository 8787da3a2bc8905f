"""Types of configuration values, and the base class of all sections.

JSON has few types, and pydantic's conversions are lax (true for 1, "3" for 3). Keys accept only values of their own
type, except that a whole number may be written as 5e8.
"""

from __future__ import annotations

import os
from numbers import Real
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

from infinity.inputs import show
from infinity.sizes import parse_size

_LARGEST_SHARE = 64


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, instances are frozen, docstrings under fields document them.

    The first use of a section as a validator builds it, which takes time, so the import builds none. Defaults that are
    sections are therefore made by `model_construct`, which validates nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"must be a number, not {show(value)}")
    return value


def _size(value: object) -> int:
    return parse_size(value)  # type: ignore[arg-type]  # raises for any other type


def _size_or_auto(value: object) -> int | Literal["auto"]:
    if not isinstance(value, str) or value.lower() != "auto":
        return _size(value)
    if value != "auto":
        raise ValueError(f'write "auto" in lower case, not {show(value)}')
    return "auto"


def _positive_size_or_auto(value: object) -> int | Literal["auto"]:
    size = _size_or_auto(value)
    if size == 0:
        raise ValueError("must be more than 0, not 0")
    return size


def _tile_or_auto(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value % 1:
        raise ValueError(f'must be a whole number of elements from 1, or "auto", not {show(value)}')
    return aligned(int(value), "elements")


def _dtype(value: object) -> object:
    """Return the short name of a dtype, of which DeepSpeed has several."""
    names = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
    return names.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


def _is_path(value: object) -> bool:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    return isinstance(text, str) and text != "" and "\0" not in text


def _folders(value: object) -> tuple[Path, ...]:
    """Validate one path or a list of paths of distinct folders."""
    if not isinstance(value, (list, tuple)):
        if not _is_path(value):
            raise ValueError(f"must be the path of a folder, or a list of such paths, not {show(value)}")
        value = [value]
    if not value:
        raise ValueError("must name at least one folder, not []")
    folders: dict[str, Path] = {}
    for number, item in enumerate(value, 1):
        if not _is_path(item):
            raise ValueError(f"number {number} of the list must be the path of a folder, not {show(item)}")
        folder = Path(os.path.expanduser(item))
        before = folders.setdefault(os.path.realpath(folder), folder)
        if before is not folder:
            raise ValueError(
                f"lists one folder twice, as {show(str(before))} and {show(str(folder))}; list each drive's folder once"
            )
    return tuple(folders.values())


def _shares(value: object) -> object:
    if value in ("auto", "equal"):
        return value
    listed = value if isinstance(value, (list, tuple)) else [None]
    if not listed or any(type(each) is not int or not 0 < each <= _LARGEST_SHARE for each in listed):
        raise ValueError(
            f'must be "auto", "equal" or a list of whole numbers from 1 to {_LARGEST_SHARE}, one for each folder, not '
            f"{show(value)}"
        )
    return tuple(listed)


ALIGNMENT = 4096
"""Alignment of direct I/O in bytes, and of update tiles in elements."""


def aligned(value: int, of: str) -> int:
    """Return `value`. Raises ValueError if it is no multiple of `ALIGNMENT`. of: its unit."""
    if value % ALIGNMENT:
        below = value // ALIGNMENT * ALIGNMENT
        raise ValueError(f"must be a multiple of {ALIGNMENT} {of}, such as {below or ALIGNMENT}")
    return value


IN_BYTES = "in bytes"
"""Marks a field parsed by `parse_size`."""

Switch: TypeAlias = Annotated[bool, Strict()]
Count: TypeAlias = Annotated[int, BeforeValidator(_number), Field(ge=1)]
CountOrZero: TypeAlias = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Whole: TypeAlias = Annotated[int, BeforeValidator(_number)]
Depth: TypeAlias = Annotated[int, BeforeValidator(_number), Field(ge=-1)]
Number: TypeAlias = Annotated[float, BeforeValidator(_number), Field(ge=0)]
AnyNumber: TypeAlias = Annotated[float, BeforeValidator(_number)]
Positive: TypeAlias = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Share: TypeAlias = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Beta: TypeAlias = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
Threads: TypeAlias = Annotated[Count, Field(le=64)]
Size: TypeAlias = Annotated[int, BeforeValidator(_size), Field(gt=0), IN_BYTES]
SizeOrZero: TypeAlias = Annotated[int, BeforeValidator(_size), IN_BYTES]
# Validated outside of the union, so that an invalid value gives one problem instead of one for each member.
SizeOrAuto: TypeAlias = Annotated[Literal["auto"] | Size, BeforeValidator(_positive_size_or_auto)]
SizeOrZeroOrAuto: TypeAlias = Annotated[Literal["auto"] | SizeOrZero, BeforeValidator(_size_or_auto)]
TileOrAuto: TypeAlias = Annotated[Literal["auto"] | Count, BeforeValidator(_tile_or_auto)]
DType: TypeAlias = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_dtype)]
Folders: TypeAlias = Annotated[tuple[Path, ...], BeforeValidator(_folders)]
Shares: TypeAlias = Annotated[Literal["auto", "equal"] | tuple[int, ...], BeforeValidator(_shares)]
