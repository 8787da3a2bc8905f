"""The entry point `torch.backends` of this folder's distribution, which torch loads and calls at the end of its import.

An error here would fail `import torch`, and a child may run another Python, without Infinity.
"""

from contextlib import suppress


def watch() -> None:
    """Watch whether the script trains without an engine; see infinity.observe.without_engine."""
    with suppress(Exception):
        from infinity.observe import without_engine

        without_engine.watch()
