"""The package's public names stay what they are, and importing it costs next to nothing."""

import functools
import importlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import infinity

EXTRAS = {"accelerate", "lightning", "matplotlib", "peft", "transformers", "trl"}
COMMAND_LINE = {"psutil._common", "rich", "typer"}
COMPILERS = {"torch._dynamo", "torch._inductor", "triton"}
HEAVY = {
    "pydantic",
    "tensorboard",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.onnx",
    "torch.testing",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
}
"""Modules that take tens of milliseconds or more."""


@functools.cache
def imported_by(code: str) -> frozenset[str]:
    """Return the modules that `code` imports in a new interpreter."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return frozenset(result.stdout.split())


def test_initialize_is_a_function_every_time() -> None:
    importlib.import_module("infinity.engine.initialize")
    assert callable(infinity.initialize)
    assert infinity.initialize is infinity.initialize
    assert {infinity.Config.__name__, infinity.Engine.__name__} == {"Config", "TrainingEngine"}


def test_import_adds_one_module() -> None:
    """Figures: bench/results/import.md."""
    added = imported_by("import infinity") - imported_by("")
    assert {name for name in added if name.startswith("infinity")} == {"infinity"}
    assert not {name.partition(".")[0] for name in added} & {"numpy", "pydantic", "torch"}


@pytest.mark.parametrize(
    "code",
    [
        "import infinity; infinity.initialize, infinity.Init, infinity.load_pretrained, infinity.Engine",
        "import infinity.deepspeed as deepspeed; deepspeed.initialize, deepspeed.zero.Init, deepspeed.DeepSpeedEngine",
    ],
)
def test_the_engine_adds_only_its_own_modules_to_torch(code: str) -> None:
    """pydantic is imported when a configuration is read, the other modules when they are used."""
    added = imported_by(f"import torch\n{code}") - imported_by("import torch")
    assert "infinity.engine.training" in added
    assert not added & (HEAVY | COMPILERS)
    assert not {module.partition(".")[0] for module in added} & EXTRAS


def test_importing_the_configuration_builds_no_validator() -> None:
    """The first validation builds one for all sections, instead of one for each section at import."""
    code = """
from infinity.config import Config
from infinity.config.fields import Section
def sections(kind):
    return [kind, *(inner for below in kind.__subclasses__() for inner in sections(below))]
assert len(sections(Section)) > 20 and not any(each.__pydantic_complete__ for each in sections(Section))
assert Config.load({"train_batch_size": 4}).zero_optimization.stage == 3
"""
    assert "pydantic" in imported_by(code)


def test_public_names_import_no_compiler_and_no_extra() -> None:
    added = imported_by("import infinity\nfor name in infinity.__all__: getattr(infinity, name)")
    assert not added & COMPILERS
    assert not added & (COMMAND_LINE - {"psutil._common"})
    assert not {module.partition(".")[0] for module in added} & EXTRAS
    assert not {module for module in added if module.startswith(("infinity.cli", "infinity.sim"))}


@pytest.mark.parametrize("context", ["nullcontext()", "torch.device('meta')", "infinity.Init(config)"])
def test_training_imports_no_compiler(context: str, tmp_path: Path) -> None:
    """Dynamo takes a second and 60 MB, which no plan counts. torch imports it for some methods and dispatch modes."""
    code = f"""
from contextlib import nullcontext
import torch, infinity
nvme = {{"device": "nvme", "nvme_path": {str(tmp_path)!r}}}
config = {{
    "train_batch_size": 2,
    "gradient_clipping": 1.0,
    "optimizer": {{"type": "AdamW"}},
    "scheduler": {{"type": "WarmupLR"}},
    "zero_optimization": {{"offload_param": nvme, "offload_optimizer": nvme}},
}}
with {context}:
    model = torch.nn.Sequential(*(torch.nn.Linear(1025, 1025) for _ in range(3)))
with infinity.initialize(model=model, config=config)[0] as engine:
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 1025)).square().mean())
        engine.step()
    engine.save_checkpoint({str(tmp_path / "saved")!r})
    engine.load_checkpoint({str(tmp_path / "saved")!r})
"""
    assert not imported_by(code) & COMPILERS


@pytest.mark.campaign(few=1)  # builds a distribution
@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_a_distribution_has_the_metadata_that_stands_in_for_deepspeed(kind: str, tmp_path: Path) -> None:
    """Building tools leave folders *.dist-info out, and without metadata libraries do not find deepspeed."""
    pytest.importorskip("scikit_build_core")
    root = Path(__file__).parents[1]
    options = "" if kind == "sdist" else ", {'wheel.cmake': 'false'}"  # without compiled modules
    code = f"from scikit_build_core.build import build_{kind} as b; b({str(tmp_path)!r}{options})"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, timeout=120)
    (built,) = tmp_path.iterdir()
    if kind == "sdist":
        with tarfile.open(built) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
    else:
        with zipfile.ZipFile(built) as wheel:
            names = set(wheel.namelist())
    shim = {str(file.relative_to(root)) for file in (root / "infinity/deepspeed/shim").rglob("*") if file.is_file()}
    expected = {name for name in shim if "__pycache__" not in name}
    assert expected <= names and {name.rpartition("/")[2] for name in expected} >= {"PKG-INFO", "top_level.txt"}


def test_a_checkout_that_hides_the_installed_package_says_so(tmp_path: Path) -> None:
    """Python that starts in a clone imports its sources, which lack the compiled modules."""
    source = Path(infinity.__file__).parent
    shutil.copytree(source, tmp_path / "infinity", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    advice = f"ImportError: infinity in {tmp_path} has no compiled modules (_adam, _aio, _heartbeat): "
    # Without a site, so that no finder of an editable installation comes before the folder.
    paths = [str(tmp_path), *map(str, Path(pytest.__file__).parents[1:2])]
    for code in ("import infinity; infinity.initialize", "import infinity.native._adam_cuda"):
        done = in_python(f"import sys; sys.path[:0] = {paths}; {code}", tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(advice) and "`pip install .`" in done.stderr, done.stderr
    script = f"import sys; sys.path[:0] = {paths}; sys.argv = ['', 'report']; from infinity.cli.main import app; app()"
    done = in_python(script, tmp_path)
    reported = [line for line in done.stdout.splitlines() if advice in line]
    assert done.returncode == 1 and {"adam", "aio"} <= {line.split()[0] for line in reported}, done.stdout + done.stderr


def test_a_compiled_module_that_does_not_load_keeps_its_own_error(tmp_path: Path) -> None:
    package = tmp_path / "infinity" / "native"
    package.mkdir(parents=True)
    shutil.copy(Path(infinity.__file__).parent / "native" / "__init__.py", package)
    for name in ("_adam", "_aio", "_heartbeat"):
        (package / f"{name}{EXTENSION_SUFFIXES[0]}").write_text("no shared object")
    done = in_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from infinity.native import _aio", tmp_path)
    assert done.returncode == 1
    assert ("_aio" in (error := done.stderr.splitlines()[-1]) and "file too short" in error) or "invalid ELF" in error


def in_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, without the modules of an environment."""
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
