"""`import deepspeed` returns infinity.deepspeed: in a process, in its children, and for libraries that look for it.

Every case is a process of its own, since this one has imported much already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
from infinity.deepspeed.__main__ import interpreter_options, with_rank_variables
from infinity.deepspeed.substitute import SHIM, find_shadow, substituted_environment

ROOT = str(Path(infinity.__file__).parents[1])


def python(*arguments: str | Path, path: str = "", options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `python -m infinity.deepspeed ARGUMENTS` with `path` in PYTHONPATH."""
    command = [sys.executable, *options, "-m", "infinity.deepspeed", *map(str, arguments)]
    return launched(command, path)


def launched(command: list[str], path: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH"), ROOT]))}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    return file


def passes(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A folder with another package deepspeed and its metadata, as pip installs them."""
    folder = tmp_path / "installed"
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = '0.15.0'\n")
    (folder / "deepspeed-0.15.0.dist-info").mkdir()
    (folder / "deepspeed-0.15.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.15.0\n"
    )
    return folder


def test_deepspeed_is_the_module_and_a_distribution(tmp_path: Path) -> None:
    text = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
import deepspeed, infinity.deepspeed
assert deepspeed is infinity.deepspeed and deepspeed.__spec__.name == "infinity.deepspeed"
assert importlib.util.find_spec("deepspeed") is not None
version = importlib.metadata.version("deepspeed")
assert getattr(deepspeed, "__version__", version).partition("+")[0] == version.partition("+")[0]
print(version)
"""
    assert passes(python(script(tmp_path, text))).startswith("0.19.8")


def test_submodules_are_the_same_objects_and_run_once(tmp_path: Path) -> None:
    """The submodules of this test lie in a folder that is added to the package's path."""
    ops = tmp_path / "more" / "fake_ops"
    ops.mkdir(parents=True)
    (ops / "__init__.py").write_text("print('ops runs')\n")
    (ops / "adam.py").write_text("from . import other\nclass Adam: pass\n")
    (ops / "other.py").write_text("print('other runs', __name__)\n")
    (ops / "program.py").write_text("print('program runs', __name__)\n")
    text = f"""
import infinity.deepspeed
infinity.deepspeed.__path__.append({str(tmp_path / "more")!r})
from deepspeed.fake_ops.adam import Adam
import deepspeed.fake_ops.adam as named
import infinity.deepspeed.fake_ops.adam as ours
import deepspeed, importlib, importlib.util, inspect, pickle, sys
assert named is ours and ours.Adam is Adam and deepspeed.fake_ops.adam is ours
assert ours.__spec__.name == ours.__name__ == "infinity.deepspeed.fake_ops.adam"
assert ours.__package__ == "infinity.deepspeed.fake_ops" and "class Adam" in inspect.getsource(named)
assert importlib.import_module("deepspeed.fake_ops.other") is sys.modules["infinity.deepspeed.fake_ops.other"]
assert pickle.loads(pickle.dumps(Adam)) is Adam
assert importlib.util.find_spec("deepspeed.fake_ops.missing") is None
try:
    import deepspeed.fake_ops.missing
except ModuleNotFoundError as error:
    assert error.name == "deepspeed.fake_ops.missing"
else:
    raise AssertionError
import runpy
runpy.run_module("deepspeed.fake_ops.program", run_name="__main__", alter_sys=True)
"""
    said = passes(python(script(tmp_path, text))).splitlines()
    assert said == ["ops runs", "other runs infinity.deepspeed.fake_ops.other", "program runs __main__"]


def test_packages_without_a_counterpart_say_the_alternative(tmp_path: Path) -> None:
    text = """
for name in ("deepspeed.compression.compress", "deepspeed.monitor.monitor", "deepspeed.sequence"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error)
"""
    lines = passes(python(script(tmp_path, text))).splitlines()
    assert [line.partition(" has no counterpart in Infinity")[0] for line in lines] == [
        "deepspeed.compression", "deepspeed.monitor", "deepspeed.sequence"
    ]  # fmt: skip


def test_children_have_it_too(tmp_path: Path) -> None:
    text = """
import multiprocessing, subprocess, sys

def look(_):
    import deepspeed
    return deepspeed.__name__

if __name__ == "__main__":
    code = "import deepspeed, sys; sys.exit(deepspeed.__name__ != 'infinity.deepspeed')"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(look, [0]) == ["infinity.deepspeed"]
"""
    passes(python(script(tmp_path, text)))


def test_the_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    text = """
import os, sys
assert __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__))
assert sys.flags.optimize == 1 and sys.flags.unbuffered == 1 and sys.flags.dev_mode
print(sys.argv[1:])
sys.exit(3)
"""
    result = python(script(tmp_path, text), "--deepspeed", "--", "-m", "", options=("-O", "-Xdev", "-u"))
    assert (result.returncode, result.stdout) == (3, "['--deepspeed', '--', '-m', '']\n"), result.stderr


def test_modules_and_programs_run(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("import deepspeed, sys; print(deepspeed.__name__, sys.argv[1:])\n")
    assert passes(python("-m", "work", "--x", path=str(tmp_path))) == "infinity.deepspeed ['--x']\n"
    code = "import deepspeed; print(deepspeed.__name__)"
    assert passes(python("--no_python", sys.executable, "-c", code)) == "infinity.deepspeed\n"
    missing = python("--no_python", tmp_path / "none")
    assert missing.returncode == 126 and "none cannot be run: No such file" in missing.stderr


def test_an_installed_deepspeed_is_replaced(tmp_path: Path, real: Path) -> None:
    text = "import deepspeed, importlib.metadata as m; print(deepspeed.__name__, m.version('deepspeed'))"
    assert passes(python(script(tmp_path, text), path=str(real))).startswith("infinity.deepspeed 0.19.8")


def test_an_imported_deepspeed_is_not_replaced(real: Path) -> None:
    code = "import deepspeed; from infinity.deepspeed.substitute import substitute; substitute()"
    result = launched([sys.executable, "-c", code], path=str(real))
    assert result.returncode == 1
    assert f"deepspeed 0.15.0 is already imported, from {real}" in result.stderr and "infinity run" in result.stderr


def test_substitute_replaces_it_in_this_process_and_its_children(real: Path) -> None:
    code = """
import subprocess, sys
from infinity.deepspeed.substitute import substitute
substitute()
substitute()
import deepspeed, importlib.metadata
substitute()
assert deepspeed.__name__ == "infinity.deepspeed" and importlib.metadata.version("deepspeed").startswith("0.19.8")
child = "import deepspeed, sys; sys.exit(deepspeed.__name__ != 'infinity.deepspeed')"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""
    passes(launched([sys.executable, "-c", code], path=str(real)))


@pytest.mark.parametrize("name", ["deepspeed.py", "deepspeed/__init__.py"])
def test_a_deepspeed_beside_the_script_is_refused(tmp_path: Path, name: str) -> None:
    beside = tmp_path / name
    beside.parent.mkdir(exist_ok=True)
    beside.touch()
    file = script(tmp_path, "raise AssertionError")
    for started in (file, tmp_path):  # Python searches a folder that it runs too
        result = python(started)
        assert result.returncode == 2 and f"{beside} would be imported as deepspeed" in result.stderr


def test_a_folder_of_configs_beside_the_script_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero3.json").touch()
    assert passes(python(script(tmp_path, "import deepspeed; print(deepspeed.__name__)"))) == "infinity.deepspeed\n"
    assert find_shadow(tmp_path) is None and find_shadow(SHIM) is None


def test_a_python_that_ignores_pythonpath_is_refused(tmp_path: Path) -> None:
    """An isolated Python finds infinity in site-packages only, so the flag is set by hand where it is not there."""
    code = f"import sys; sys.path.insert(0, {ROOT!r}); sys.argv[1:] = ['x.py']; import runpy; "
    code += "runpy.run_module('infinity.deepspeed', run_name='__main__', alter_sys=True)"
    result = launched([sys.executable, "-E", "-c", code])
    assert result.returncode == 2 and "-E and -I make Python ignore PYTHONPATH" in result.stderr


def test_a_python_without_infinity_names_the_cause(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-S", "-c", "import deepspeed"],
        env={"PYTHONPATH": str(SHIM)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert "has no package infinity" in result.stderr and str(SHIM) in result.stderr


def test_without_arguments_the_usage_is_shown() -> None:
    assert (python().returncode, python("--help").returncode) == (2, 0)
    assert "train.py ARGS" in python().stderr and "train.py ARGS" in python("--help").stdout


def test_the_environment_keeps_other_folders_and_is_idempotent() -> None:
    once = substituted_environment({"PYTHONPATH": f"/a{os.pathsep}{os.pathsep}/b", "HOME": "/home"})
    assert once == {"PYTHONPATH": os.pathsep.join([str(SHIM), "/a", "", "/b"]), "HOME": "/home"}
    assert substituted_environment(once) == once
    assert substituted_environment({"PYTHONPATH": ""}) == {"PYTHONPATH": str(SHIM)}


@pytest.mark.parametrize(
    ("before", "options"),
    [
        (["-m", "infinity.deepspeed"], []),
        (["-u", "-m", "infinity.deepspeed"], ["-u"]),
        (["-X", "dev", "-um", "infinity.deepspeed"], ["-X", "dev", "-u"]),
        (["-minfinity.deepspeed"], []),
        (["-OOminfinity.deepspeed"], ["-OO"]),
        (["-c", "code"], []),
        ([], []),
    ],
)
def test_options_of_the_interpreter_are_kept(before: list[str], options: list[str]) -> None:
    assert interpreter_options(before) == options


def test_ranks_have_the_variables_of_deepspeeds_launcher() -> None:
    torchs = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "CROSS_RANK": "stale"}
    assert with_rank_variables(torchs) == {**torchs, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "3"}
    assert with_rank_variables({"HOME": "/"}) == {"HOME": "/"}


def test_transformers_finds_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = "from transformers.integrations.deepspeed import is_deepspeed_available as found; assert found()"
    passes(python(script(tmp_path, text)))


def test_accelerate_finds_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    text = """
from accelerate.utils import is_deepspeed_available
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
assert is_deepspeed_available()
"""
    passes(python(script(tmp_path, text)))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_rank_is_bound_before_its_program_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its affinity, OMP_NUM_THREADS, the optimizer's threads, and the options of the interpreter."""
    file = script(
        tmp_path,
        "import os, sys\nfrom infinity.native import _adam\nassert sys.flags.utf8_mode and sys.argv[1:] == ['--x']\n"
        "print(*os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'], _adam.default_threads())",
    )
    own = sorted(os.sched_getaffinity(0))[-2:]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    bind = f"--bind_cores_to_rank={own[0]},{own[1]}"
    for rank, processor in enumerate(own):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert passes(python(bind, file, "--x", options=("-X", "utf8"))).split() == [str(processor), "1", "1"]
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    *bound, threads, updating = passes(python("--bind_cores_to_rank", file, "--x", options=("-X", "utf8"))).split()
    assert set(map(int, bound)) <= os.sched_getaffinity(0) and int(threads) == int(updating) == len(bound)


def test_a_wrong_list_of_processors_is_an_error_of_one_line() -> None:
    run = python("--bind_cores_to_rank=9,3", "train.py")
    expected = "infinity.deepspeed: --bind_core_list: '9,3' is no ascending list of processors such as 0,2-4\n"
    assert (run.returncode, run.stderr) == (2, expected)
    assert python("--bind_cores_to_rank").stderr == (
        "infinity.deepspeed: --bind_cores_to_rank needs a script: pass its name after it\n"
    )
