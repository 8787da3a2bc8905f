"""Runs a script against another commit's Python sources, with this installation's compiled modules.

The interface of the compiled modules must be the same in both commits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import harness

REPOSITORY = Path(__file__).resolve().parent.parent


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the commit's sources and this installation's compiled modules."""
    from infinity.native import _adam

    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            native = tree / "infinity" / "native"
            # Commits from before that folder existed have the modules in the package itself.
            home = native if native.is_dir() else native.parent
            assert _adam.__file__ is not None
            built = Path(_adam.__file__)
            for compiled in built.parent.glob("_*" + built.name.removeprefix("_adam")):
                (home / compiled.name).symlink_to(compiled)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def run_with(tree: Path, script: str, arguments: Sequence[str]) -> harness.Result:
    """Run `script` in a child process that imports `infinity` from `tree`. The child calls `use` first."""
    return harness.run_child(script, arguments, environment={"PYTHONPATH": str(tree)})


def use(tree: Path) -> None:
    """Import `infinity` from `tree`, which PYTHONPATH names. Call it before anything imports `infinity`."""
    if tree != REPOSITORY:  # an editable installation would be found first
        sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    import infinity

    assert Path(infinity.__file__ or "").is_relative_to(tree), infinity.__file__
