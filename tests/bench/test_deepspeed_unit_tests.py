"""`bench/deepspeed_unit_tests.py` on a small folder of tests in place of DeepSpeed's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_reasons import ABSENT, DIFFERENT, INSIDE, MACHINE, OPEN, reason_of

BENCH = Path(__file__).resolve().parents[2] / "bench"
COMMON = """
class DistributedExec:
    def _dist_run(self, rank, world_size, port, init_method):
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method, rank=rank, world_size=world_size)
        self.run(rank)

    def _dist_destroy(self):
        import torch.distributed as dist
        dist.destroy_process_group()
"""
TESTS = """
import pytest
import deepspeed
from deepspeed.nowhere import Missing
from unit.common import DistributedExec

class Sum(DistributedExec):
    def run(self, rank):
        import torch, deepspeed.comm as dist
        total = torch.tensor([rank])
        dist.all_reduce(total)
        assert int(total) == 1

class Fails(DistributedExec):
    def run(self, rank):
        assert rank == 0, "rank 1 fails"

def test_ranks(request): Sum()._launch_with_file_store(request, 2)
def test_a_rank_that_fails(request): Fails()._launch_with_file_store(request, 2)
def test_a_missing_name(): Missing.made(1)
def test_a_skip(): pytest.skip("here")
@pytest.mark.parametrize("number", range(9))
def test_cases(number): assert deepspeed.__version__.endswith("+infinity")
"""


@pytest.mark.campaign
def test_a_selection_is_run_with_stand_ins_and_ranks(tmp_path: Path) -> None:
    """Ranks communicate, a rank's failure fails its test, missing names fail in calls, a second run adds nothing."""
    unit = tmp_path / "tests" / "unit"
    (unit / "runtime").mkdir(parents=True)
    for file, text in (("__init__.py", ""), ("common.py", COMMON), ("runtime/test_data.py", TESTS)):
        (unit / file).write_text(text)
    results = tmp_path / "results.jsonl"
    command = [sys.executable, BENCH / "deepspeed_unit_tests.py", "--deepspeed", tmp_path, "--results", results]
    shown = [subprocess.run(command, capture_output=True, text=True, timeout=300).stdout for _ in range(2)]
    assert shown[0] == shown[1] and shown[0].startswith("2 failed, 3 passed, 1 skipped\n")
    assert f"1 {INSIDE}:\n    unit/runtime/test_data.py::test_a_missing_name" in shown[0]
    assert f"1 {OPEN}:\n    unit/runtime/test_data.py::test_a_rank_that_fails" in shown[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("deepspeed_ranks.MissingName: missing name: deepspeed.moe.layer.MoE", ABSENT),
        ("AttributeError: 'Parameter' object has no attribute 'ds_tensor'", INSIDE),
        ("E   ConfigError: zero_optimization.zero_quantized_weights: true is not supported; remove it", DIFFERENT),
        ("ModuleNotFoundError: No module named 'datasets'", MACHINE),
        ("ValueError: 1\n  something else", OPEN),
    ],
)
def test_a_failure_has_a_reason(text: str, reason: str) -> None:
    assert reason_of("unit/test.py::test", f"Traceback\n{text}") == reason
