"""The command that `make run` runs: the plain loop fails under the limit, Infinity trains under it, no file is left."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import demo
import memory_limit
import plain_gpt2
from infinity.sim.gpt2 import GPT2, GPT2Config

SCRIPT = Path(__file__).parents[2] / "bench" / "demo.py"
TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"]
TINY += ["--seq-length", "32", "--data", "text.txt", "--train-iters", "2"]
SHAPE = GPT2Config(vocab_size=256, seq_length=32, num_layers=3, hidden_size=32, num_attention_heads=2)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{n} is {n % 7} more than {n - n % 7}\n" for n in range(2000)))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits that would be set; this process goes on without one. The plain loop runs here, too."""
    asked: list[int] = []
    monkeypatch.setattr(memory_limit, "limit_memory", asked.append)
    monkeypatch.setattr(demo, "attempt_plain", lambda arguments: asked.append(-1))
    return asked


def left() -> set[str]:
    return {path.name for path in Path().iterdir()} - {"text.txt"}


def test_need_stands_in_progress_and_closing_table_and_no_file_is_left(
    limits: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(TINY) == 0
    out = capsys.readouterr().out
    (need,) = re.findall(r"a plain PyTorch loop needs (.*):\n", out)
    assert re.search(rf"step 2/2: loss .*; peak memory [\d.]+ [MG]B, a plain loop needs {re.escape(need)}\n", out)
    assert re.search(rf"a plain loop's need +{re.escape(need)} ", out)
    assert "16 bytes a parameter" in out and "left on disk" not in out
    assert limits[0] == -1  # the plain loop came first
    assert limits[1] > demo.MEMORY
    assert left() == set()


def test_plain_loop_trains_where_memory_suffices(limits: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*TINY, "--plain", "--memory-limit", "none"]) == 0
    out = capsys.readouterr().out
    assert "plain loop: step 2/2: loss " in out and "plain loop: done, peak memory " in out
    assert limits == [resource.RLIM_INFINITY]


def test_a_limit_above_the_need_is_said_to_show_nothing(limits: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*TINY, "--memory-limit", "900GB"]) == 0
    out = capsys.readouterr().out
    assert "memory limit of this process: 900 GB (RLIMIT_DATA, private memory)\nThe plain loop fits." in out
    assert limits == [-1, 900 * 10**9]


@pytest.mark.parametrize("step", ["construction", "backward"])
def test_lack_of_memory_is_one_line_that_says_where(
    step: str, limits: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."

    def fail(*args: object) -> None:
        raise RuntimeError(text)

    where = (plain_gpt2, "GPT2") if step == "construction" else (plain_gpt2.torch.Tensor, "backward")
    monkeypatch.setattr(*where, fail)
    assert demo.main([*TINY, "--plain"]) == demo.FAILED
    place = "the construction of the model" if step == "construction" else "the backward pass of step 1"
    assert f"plain loop: out of memory in {place}: DefaultCPUAllocator: can't allocate" in capsys.readouterr().out


def test_other_errors_are_not_taken_for_a_lack_of_memory(limits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(plain_gpt2, "GPT2", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        demo.main([*TINY, "--plain"])
    assert plain_gpt2.is_out_of_memory(MemoryError()) and plain_gpt2.is_out_of_memory(RuntimeError("std::bad_alloc"))


def test_a_drive_that_is_too_small_is_one_line_before_anything_runs(
    limits: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    huge = ["--num-layers", "40000", "--hidden-size", "4096", "--num-attention-heads", "32"]
    assert demo.main([*huge, "--data", "text.txt"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"The states take 129 TB in runs/states, and its drive has .* free\. Name a folder", error)
    assert error.count("\n") == 1 and limits == [] and left() == set()


@pytest.mark.parametrize("flags", [["--memory-limit", "much"], ["--batch-size", "0"]])
def test_flags_out_of_their_range_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(flags)
    assert f"argument {flags[0]}: " in capsys.readouterr().err


def test_default_model_needs_twice_its_memory() -> None:
    """101 M parameters: the states alone exceed what the limit leaves beside Python and torch."""
    shape = demo.SHAPE
    assert shape.num_parameters == 101_041_152
    need = plain_gpt2.need_of(shape, demo.BATCH_SIZE, 244_000_000)
    assert need.states == 16 * shape.num_parameters > 2 * demo.MEMORY
    assert need.total == need.states + need.activations + need.process
    assert need.activations < need.states / 4


def test_activations_are_those_that_autograd_saves() -> None:
    """The meta device and the CPU differ by what the CPU's attention saves."""
    import torch

    def saved(device: str) -> int:
        with torch.device(device):
            model, ids = GPT2(SHAPE), torch.zeros(2, 32, dtype=torch.int64)
        own = {parameter.data_ptr() for parameter in model.parameters()}
        kept = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids, ids)
        return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)

    assert plain_gpt2.activation_bytes(SHAPE, 2) == pytest.approx(saved("cpu"), rel=0.2)
    twice = plain_gpt2.need_of(SHAPE, 4, 0).activations
    assert twice == pytest.approx(2 * plain_gpt2.need_of(SHAPE, 2, 0).activations, rel=0.01)
    assert plain_gpt2.need_of(SHAPE, 2, 0).activations == plain_gpt2.activation_bytes(SHAPE, 2)


def test_limit_makes_allocations_fail() -> None:
    """In a process of its own, beyond the limit only: MemoryError of Python, RuntimeError of torch."""
    code = (
        "import memory_limit, plain_gpt2, torch\n"
        "memory_limit.limit_memory(memory_limit.private_bytes() + 200_000_000)\n"
        "small, failed = torch.ones(25_000_000), []\n"
        "for allocate in (lambda: bytearray(200_000_000), lambda: torch.ones(50_000_000)):\n"
        "    try:\n"
        "        allocate()\n"
        "    except Exception as error:\n"
        "        failed.append(plain_gpt2.is_out_of_memory(error))\n"
        "print(failed, memory_limit.private_bytes() >= 100_000_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[True, True] True\n", done.stderr


@pytest.mark.campaign
def test_plain_loop_fails_and_infinity_trains_under_one_limit() -> None:
    """50 M parameters need 1.2 GB in a plain loop; both run under 0.75 GB."""
    shape = ["--num-layers", "16", "--hidden-size", "512", "--num-attention-heads", "8", "--batch-size", "2"]
    run = [sys.executable, str(SCRIPT), *shape, "--data", "text.txt", "--train-iters", "2", "--memory-limit", "750MB"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "plain loop: out of memory in " in done.stdout and "step 2/2: loss " in done.stdout
    assert left() == set()
