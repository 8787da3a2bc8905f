"""Runs Python with infinity.deepspeed in place of deepspeed.

    python -m infinity.deepspeed train.py ARGS...
    python -m infinity.deepspeed -m package.train ARGS...
    python -m infinity.deepspeed --no_python PROGRAM ARGS...
    python -m infinity.deepspeed --bind_cores_to_rank[=0,2-5] train.py ARGS...    # before the other options

Replaces this process: `python ARGS...` runs with the same process id, the same options of the interpreter, and a
PYTHONPATH that its children inherit. `infinity run` starts each rank in this way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from infinity.deepspeed.launcher.flags import BIND
from infinity.deepspeed.substitute import find_shadow, substituted_environment
from infinity.errors import InfinityError
from infinity.observe.without_engine import expecting_engine
from infinity.tiers.available import bind_rank

_MODULE = "infinity.deepspeed"
_USAGE, _NOT_EXECUTABLE = 2, 126
_RANK_VARIABLES = {"LOCAL_SIZE": "LOCAL_WORLD_SIZE", "CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE"}
"""Variable of DeepSpeed's launcher → torchrun's variable with the same value."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by Python, or by a program, with `arguments`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip(), file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else _USAGE)
    if sys.flags.ignore_environment:
        _fail("the options -E and -I make Python ignore PYTHONPATH, by which deepspeed is replaced: drop them")
    environ, options = dict(os.environ), sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    if arguments[0].partition("=")[0] == BIND:
        try:
            processors = bind_rank(arguments[0].partition("=")[2], environ)
        except InfinityError as error:
            _fail(str(error))
        environ["OMP_NUM_THREADS"] = str(len(processors))  # torchrun sets 1
        arguments = arguments[1:]
        if not arguments:
            _fail(f"{BIND} needs a script: pass its name after it")
    if arguments[0] == "--no_python":
        command = list(arguments[1:])
        if not command:
            _fail("--no_python needs a program: pass its name after it")
    else:
        _check_shadow(arguments[0])
        command = [sys.executable, *interpreter_options(options), *arguments]
    try:
        environment = with_rank_variables(substituted_environment(environ)) | expecting_engine()
    except InfinityError as error:
        _fail(str(error))
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        _fail(f"{command[0]} cannot be run: {error.strerror}", _NOT_EXECUTABLE)


def interpreter_options(before: Sequence[str]) -> list[str]:
    """Return the interpreter's options in a command line that ends with `-m infinity.deepspeed`, as in `-um …`."""
    *options, last = before or [""]
    last = options.pop() if last == _MODULE and options else last.removesuffix(_MODULE)
    if not (last.startswith("-") and last.endswith("m")):
        return []  # started in another way than by -m: the options are unknown
    last = last.removesuffix("m")
    return [*options, last] if last != "-" else options


def with_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the variables of DeepSpeed's launcher, if torchrun started this process."""
    added = {theirs: environ[torchs] for theirs, torchs in _RANK_VARIABLES.items() if torchs in environ}
    return {**environ, **added}


def _check_shadow(first: str) -> None:
    """Refuse a package deepspeed in the folder that Python searches before PYTHONPATH."""
    script = Path(first).resolve()
    folder = Path.cwd() if first.startswith("-") else script if script.is_dir() else script.parent
    shadow = find_shadow(folder)
    if shadow is not None:
        _fail(f"{shadow} would be imported as deepspeed, since Python searches its folder first: rename it")


def _fail(message: str, code: int = _USAGE) -> NoReturn:
    print(f"{_MODULE}: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
