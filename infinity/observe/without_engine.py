"""One line at exit if a script that `infinity run` started took optimizer steps and never constructed an engine.

torch calls `watch` at the end of `import torch`, through an entry point in `infinity/deepspeed/shim`. Processes that
the script starts are watched too, since `accelerate launch` and other front ends construct the engine in a child.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from contextlib import suppress
from pathlib import Path

_EXPECTED = "INFINITY_EXPECTS_ENGINE"
"""Environment variable: `infinity run` started this process or an ancestor, and none of them has had an engine."""

_steps = 0


def expecting_engine() -> dict[str, str]:
    """Return the variable for the environment of a script whose steps an engine should take."""
    return {_EXPECTED: "1"}


def engine_constructed() -> None:
    """Watch neither this process nor children that it starts from now on. Idempotent."""
    os.environ.pop(_EXPECTED, None)


def watch() -> None:
    """Count this process's optimizer steps and arrange the line at its exit, if an engine is expected."""
    if _EXPECTED not in os.environ:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_count)
    atexit.register(_at_exit, os.getpid())


def _count(*_: object) -> None:
    """Runs after each step of any torch.optim.Optimizer. Dynamo traces it without another graph or a recompilation."""
    global _steps
    _steps += 1


def _at_exit(watched: int) -> None:
    with suppress(Exception):  # a note must not fail the script
        forked = os.getpid() != watched or multiprocessing.parent_process() is not None
        failed = getattr(sys, "last_value", None) is not None  # sys.exit leaves no trace of its status
        first = os.environ.get("LOCAL_RANK", "0") in ("0", "-1")
        if _steps and _EXPECTED in os.environ and first and not forked and not failed:
            print(_note(Path(sys.argv[0])), file=sys.stderr, flush=True)


def _note(script: Path) -> str:
    name = script.parent.name if script.name == "__main__.py" else script.name
    taken = f"{_steps:,} optimizer step{'s' * (_steps > 1)}"
    return (
        f"[infinity] {name} took {taken} without an engine: plain PyTorch trained. Call deepspeed.initialize, or pass "
        "the config to Trainer (--deepspeed CONFIG) or to Accelerator (DeepSpeedPlugin)."
    )
