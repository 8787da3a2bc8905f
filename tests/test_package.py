"""The package's public names stay what they are, however often and in whatever order modules are imported."""

import importlib
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import infinity


def test_initialize_is_a_function_every_time() -> None:
    importlib.import_module("infinity.engine.initialize")
    assert callable(infinity.initialize)
    assert infinity.initialize is infinity.initialize
    assert {infinity.Config.__name__, infinity.Engine.__name__} == {"Config", "TrainingEngine"}


def test_a_source_distribution_has_the_metadata_that_stands_in_for_deepspeed(tmp_path: Path) -> None:
    """Building tools leave folders *.dist-info out of sources and wheels unless they are named."""
    pytest.importorskip("scikit_build_core")
    root = Path(__file__).parents[1]
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, timeout=120)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    shim = {str(file.relative_to(root)) for file in (root / "infinity/deepspeed/shim").rglob("*") if file.is_file()}
    expected = {name for name in shim if "__pycache__" not in name}
    assert expected <= names and {name.rpartition("/")[2] for name in expected} >= {"METADATA", "top_level.txt"}
