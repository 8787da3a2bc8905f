"""Compiled modules: asynchronous file I/O, optimizer steps on CPU and CUDA, and heartbeats of a rank."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

if missing := [name for name in ("_adam", "_aio", "_heartbeat") if find_spec(f"{__name__}.{name}") is None]:
    _root = Path(__file__).parents[2]
    raise ImportError(
        f"infinity in {_root} has no compiled modules ({', '.join(missing)}): it is a source checkout, which hides an "
        "installed package from Python that starts in it. Start Python in another folder. If infinity is not "
        f"installed, run `pip install .` in {_root} first.",
        name=__name__,
        path=__file__,
    )
