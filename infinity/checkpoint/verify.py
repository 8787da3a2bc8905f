"""Whether the files of a checkpoint are what its index says, before anything is done with them."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from infinity.checkpoint.format import Index, key, shape_of
from infinity.errors import CheckpointError


def check_files(index: Index, folder: Path) -> None:
    """CheckpointError if a file is missing, has another size, or does not hold the tensors that it should."""
    for file, nbytes in index.file_bytes.items():
        path = folder / file
        found = path.stat().st_size if path.exists() else None
        if found != nbytes:
            state = "is missing" if found is None else f"has {found:,} bytes instead of {nbytes:,}"
            raise CheckpointError(f"{path} {state}: the checkpoint is damaged, use another one")
    by_file: dict[str, list[str]] = {}
    for name, entry in index.parameters.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                for name in names:
                    for kind in index.kinds(name):
                        shape = tuple(tensors.get_slice(key(kind.name, name)).get_shape())
                        if shape != shape_of(kind, index.parameters[name].shape):
                            raise CheckpointError(
                                f"{folder / file}: {kind.name} of {name} has shape {list(shape)}: the file is damaged"
                            )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder / file} cannot be read ({error}): the checkpoint is damaged, use another one"
            ) from None
