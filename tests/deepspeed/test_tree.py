"""Modules of DeepSpeed that have no file: each row of the table imports, under both names of the package."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import infinity.deepspeed as deepspeed
from infinity.deepspeed import mirror, tree

ROOT = "infinity.deepspeed"


@pytest.mark.parametrize("path", sorted(mirror._PATHS))
def test_module_has_the_names_of_its_row(path: str) -> None:
    """Names, placeholders and constants are there, in `dir` and for `import *`. Attributes of packages lead to it."""
    module = importlib.import_module(f"{ROOT}.{path}")
    assert importlib.util.find_spec(f"{ROOT}.{path}") is module.__spec__
    value: object = deepspeed
    for part in path.split("."):
        value = getattr(value, part)
    if path != "utils.z3_leaf_module":  # its package has a function of this name
        assert value is module
    if path in tree.WHOLE:
        assert module is importlib.import_module(f"{ROOT}.{tree.WHOLE[path]}") is sys.modules[module.__name__]
        return
    assert module.__name__ == f"{ROOT}.{path}"
    names = [*mirror._split(tree.NAMES.get(path, {})), *tree.CONSTANTS.get(path, {})]
    assert module.__all__ == names
    for name in (*names, *mirror._split(tree.PLACEHOLDERS.get(path, {}))):
        assert getattr(module, name, module) is not module and name in dir(module)
        assert name in vars(module) and (name == "logger" or not isinstance(vars(module)[name], ModuleType))
    with pytest.raises(AttributeError, match=f"module '{ROOT}.{path}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_missing_modules_and_names() -> None:
    for path, said in (
        ("runtime.nothing", "No module named 'infinity.deepspeed.runtime.nothing'"),
        ("nothing", "No module named 'infinity.deepspeed.nothing'"),
        ("runtime.utils.nothing", "'infinity.deepspeed.runtime.utils' is not a package"),
    ):
        with pytest.raises(ModuleNotFoundError, match=said):
            importlib.import_module(f"{ROOT}.{path}")
    assert importlib.util.find_spec(f"{ROOT}.runtime.nothing") is None
    with pytest.raises(AttributeError, match="TiledLinearReturnBias is not supported: tiles return no bias"):
        deepspeed.zero.TiledLinearReturnBias  # noqa: B018


def test_import_of_a_submodule_leaves_the_function_of_its_name() -> None:
    importlib.import_module(f"{ROOT}.utils.z3_leaf_module")
    assert callable(deepspeed.utils.z3_leaf_module)


def test_names_are_pickled_by_their_former_modules_and_by_their_homes() -> None:
    offload = importlib.import_module(f"{ROOT}.runtime.zero.offload_config")
    for home in ("offload_names", "runtime.zero.offload_config"):
        former = f"c{ROOT}.{home}\nOffloadDeviceEnum\n(Vcpu\ntR.".encode()
        assert pickle.loads(former) is offload.OffloadDeviceEnum.cpu
    assert pickle.loads(pickle.dumps(offload.OffloadDeviceEnum.cpu)) is offload.OffloadDeviceEnum.cpu


def test_a_program_imports_and_runs_modules_under_the_name_deepspeed() -> None:
    code = """
import importlib.util, runpy, sys
from infinity.deepspeed.substitute import substitute
substitute()
for name in ("deepspeed.runtime.zero.partition_parameters", "deepspeed.utils.logging", "deepspeed.moe"):
    assert importlib.util.find_spec(name) is not None, name
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
import deepspeed.runtime.zero.partition_parameters as same
import deepspeed.ops.adam, infinity.deepspeed.ops.adam, infinity.deepspeed.zero_init as home
assert deepspeed.ops.adam is infinity.deepspeed.ops.adam and same is home
assert home.__spec__.name == home.__name__ == "infinity.deepspeed.zero_init"
sys.argv = ["zero_to_fp32", "--help"]
runpy.run_module("deepspeed.utils.zero_to_fp32", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "checkpoint_dir" in result.stdout, result.stderr


def test_a_folder_that_an_earlier_version_left_hides_no_module(tmp_path: Path) -> None:
    """Such as one with `__pycache__` alone, after `git pull`."""
    (tmp_path / "runtime" / "__pycache__").mkdir(parents=True)
    code = (
        "import infinity.deepspeed as deepspeed\n"
        f"deepspeed.__path__.append({str(tmp_path)!r})\n"
        "assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
