"""Coverage-guided fuzzing of readers that need no engine, by atheris, which is installed by hand:

    pip install atheris
    PYTHONPATH=tests python tests/hostile/fuzz_target.py json|values|archive -max_total_time=600 CORPUS

json: configs, bandwidths and traces. values: `client_state.pt`. archive: files of DeepSpeed. Ends with
a traceback at the first error that is not the project's own; the input is then in a file crash-*.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["infinity", "zipfile", "pickletools"]):
    from infinity.checkpoint.archive import load_values
    from infinity.cli.trace_file import read_trace
    from infinity.config.load import read_content
    from infinity.deepspeed.importer.files import read_pickle
    from infinity.errors import InfinityError
    from infinity.sim.machine import Links

READERS: dict[str, tuple[Any, ...]] = {
    "json": (read_trace, read_content, Links.read),
    "values": (load_values,),
    "archive": (read_pickle,),
}


def meet(readers: tuple[Any, ...], content: bytes) -> None:
    for reader in readers:
        with NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            try:
                reader(Path(file.name))
            except InfinityError as error:
                assert str(error)


if __name__ == "__main__":
    chosen = READERS[sys.argv.pop(1)]
    sys.stderr = io.TextIOWrapper(sys.stderr.buffer, line_buffering=True)
    atheris.Setup(sys.argv, lambda content: meet(chosen, content))
    atheris.Fuzz()
