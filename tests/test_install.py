"""The build from source: one line says what is missing, and CUDA kernels are built for torches that have CUDA.

CMake runs for real, but compiles nothing except its own probes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the tools that `make install` pinned, first
CMAKE, NINJA = shutil.which("cmake", path=PATH), shutil.which("ninja", path=PATH)

needs_cmake = pytest.mark.skipif(not CMAKE or not NINJA, reason="needs cmake and ninja")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `command`, with stderr in stdout. environment: variables to replace; an empty CXX or CUDACXX is as none."""
    merged = {**os.environ, "CXX": "", "CUDACXX": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    merged.pop("INFINITY_CUDA", None)  # what `make test INFINITY_CUDA=OFF` exports
    return subprocess.run(
        command, cwd=ROOT, env=merged, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )


def configure(folder: Path, *definitions: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Configure a build in `folder`, which may have been configured, for the interpreter of the tests."""
    pybind11 = pytest.importorskip("pybind11")
    given = [f"pybind11_DIR={pybind11.get_cmake_dir()}", f"Python_EXECUTABLE={sys.executable}", "INFINITY_CUDA=OFF"]
    flags = [f"-D{each}" for each in (f"CMAKE_MAKE_PROGRAM={NINJA}", *given, *definitions)]
    return run(str(CMAKE), "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *flags, **environment)


def errors(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one text of a CMake error in the output, which has no more than a few other lines."""
    assert done.returncode != 0
    lines = [line.strip() for line in done.stdout.splitlines()]
    (at,) = (index for index, line in enumerate(lines) if line.startswith("CMake Error"))
    assert "Call Stack (most recent call first):" not in lines
    return lines[at + 1]


@needs_cmake
@pytest.mark.parametrize(("name", "named"), [("", ""), ("no-such-compiler", " (CXX is 'no-such-compiler')")])
def test_a_missing_compiler_is_one_line(name: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = configure(tmp_path / "build", CXX=name, PATH=str(tmp_path / "bin"))
    text = f"No C++ compiler works here{named}. Install one (Debian, Ubuntu: apt install g++), or set CXX to its name."
    assert errors(done) == text
    assert len([line for line in done.stdout.splitlines() if line.strip()]) <= 5, done.stdout


@needs_cmake
def test_pip_shows_that_line(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in (CMAKE, NINJA):
        (tools / Path(str(tool)).name).symlink_to(str(tool))
    where = ["--wheel-dir", str(tmp_path), f"--config-settings=build-dir={tmp_path / 'build'}"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", *where, "."]
    done = run(*command, CXX="g++", PATH=str(tools))
    assert errors(done).startswith("No C++ compiler works here (CXX is 'g++'). Install one")


@needs_cmake
def test_an_old_compiler_is_named_and_a_newer_one_is_taken_in_the_same_folder(tmp_path: Path) -> None:
    old = tmp_path / "old++"
    old.write_text('#!/bin/sh\ncase "$*" in *++20* | *++2a*) exit 1 ;; esac\nexec c++ "$@"\n')
    old.chmod(0o755)
    text = errors(configure(tmp_path / "build", CXX=str(old)))
    assert text.startswith(f"{old} (") and "does not compile C++20. Install a newer one" in text
    done = configure(tmp_path / "build")
    assert done.returncode == 0, done.stdout


@needs_cmake
def test_missing_headers_of_python_are_one_line(tmp_path: Path) -> None:
    """scikit-build-core names Python's folder of headers, which exists on Debian without the headers too."""
    text = errors(configure(tmp_path / "build", f"Python_INCLUDE_DIR={tmp_path}"))
    assert text.startswith(f"{sys.executable} has no Python.h. Install its headers")


@needs_cmake
def test_kernels_are_built_unless_the_torch_of_the_environment_has_no_cuda(tmp_path: Path) -> None:
    """AUTO reads torch's version without an import, and sees through pip's build environment. Without a torch it looks
    for nvcc, which does not work here."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    overlay, shadow = tmp_path / "overlay", tmp_path / "shadow"
    overlay.mkdir()
    hide = f"import sys\nsys.path[:] = [each for each in sys.path if each != {str(packages)!r}]\n"
    (overlay / "sitecustomize.py").write_text(hide)

    def chosen(value: str = "AUTO", **environment: str) -> str:
        definitions = [f"INFINITY_CUDA={value}", f"Python_EXECUTABLE={tmp_path / 'venv/bin/python'}"]
        done = configure(tmp_path / "build", *definitions, CUDACXX=str(tmp_path / "no-nvcc"), **environment)
        if done.returncode:
            return errors(done)
        (line,) = (line for line in done.stdout.splitlines() if "CUDA kernels" in line)
        return line.partition("not built: ")[2]

    def put_torch(folder: Path, cuda: str) -> str:
        (folder / "torch").mkdir(parents=True, exist_ok=True)
        (folder / "torch/__init__.py").write_text("raise AssertionError('imported')\n")
        (folder / "torch/version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda}\nhip = None\n")
        return f"{folder / 'torch'} has no CUDA (INFINITY_CUDA=ON builds them)"

    missing = "nvcc was not found or does not work (PATH, CUDACXX or CMAKE_CUDA_COMPILER says where it is)"
    assert chosen() == missing
    refused = put_torch(packages, "None")
    assert chosen() == refused
    assert chosen(PYTHONPATH=str(overlay)) == refused
    assert chosen("ON") == f"INFINITY_CUDA is ON, but {missing}."
    assert chosen("OFF") == "INFINITY_CUDA is OFF"
    put_torch(shadow, "'13.0'")
    assert chosen(PYTHONPATH=str(shadow)) == missing
    put_torch(packages, "'13.0'")
    assert chosen() == missing


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_builds_what_it_is_asked_for_and_keeps_kernels_of_tests(tmp_path: Path) -> None:
    def value(*arguments: str) -> str:
        done = run("make", "--dry-run", f"VENV={tmp_path}", "install", *arguments, MAKEFLAGS="")
        (line,) = (line for line in done.stdout.splitlines() if "INFINITY_CUDA=" in line)
        return line.partition("INFINITY_CUDA=")[2]

    on, off = "INFINITY_CUDA=ON", "INFINITY_CUDA=OFF"
    assert (value(), value(on), value(off)) == ("AUTO", "ON", "OFF")
    stamp = tmp_path / ".kernels"
    done = run("make", f"VENV={tmp_path}", f"--old-file={tmp_path}/.installed", str(stamp), off, MAKEFLAGS="")
    assert done.returncode == 0 and not stamp.exists()
    stamp.touch()
    assert (value(), value(off)) == ("ON", "OFF")


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_says_that_the_compiler_is_missing_before_it_installs(tmp_path: Path) -> None:
    done = run(
        "make",
        "install",
        f"VENV={tmp_path / 'venv'}",
        f"PYTHON={sys.executable}",
        MAKEFLAGS="--no-print-directory",
        CXX="no-such++",
    )
    assert done.stdout.splitlines()[0] == "no-such++ is missing: apt install g++"
    assert done.returncode and not (tmp_path / "venv").exists()
