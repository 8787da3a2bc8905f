"""DeepSpeed's own unit tests, run against infinity.deepspeed on the CPU with gloo.

    git clone https://github.com/deepspeedai/DeepSpeed && git -C DeepSpeed checkout edaa722  # before 0.19.8
    python bench/deepspeed_unit_tests.py --deepspeed DeepSpeed
    python bench/deepspeed_unit_tests.py --deepspeed DeepSpeed --only v1/zero                # one folder

`deepspeed` is replaced by infinity.deepspeed, also in the ranks, which are forked processes (`deepspeed_ranks.py`).
Names that tests import and that are missing are stand-ins that fail when they are called. The selection has the tests
of training, checkpoints and optimizers that need neither a GPU nor pipeline, tensor or expert parallelism. --cases: how
many cases of each test function are run, evenly spread. Tests whose fixtures are classes need pytest below 8.4.

Prints the counts, and the tests that failed, by reason. --results: one line of JSON a test; a run continues with the
tests that the file lacks. The reasons are those of `deepspeed_reasons.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from deepspeed_reasons import reason_of

_BENCH = Path(__file__).resolve().parent
_TESTS = {
    "checkpoint": "convert_checkpoint latest_checkpoint lr_scheduler other_optimizer reshape_checkpoint shared_weights "
    "sparse tag_validation zero_optimizer",
    "comm": "dist",
    "monitor": "monitor",
    "ops/adagrad": "cpu_adagrad",
    "ops/adam": "adamw cpu_adam hybrid_adam zf_torch_adam",
    "ops/lion": "cpu_lion lion",
    "runtime": "autocast data ds_config_dict ds_config_model ds_initialize lr_schedulers multi_output_model "
    "multiple_models no_sync_ctxt precision_config_dynamic_scale precision_config_loss_scale runtime_utils",
    "runtime/activation_checkpointing": "activation_checkpointing activation_checkpointing_non_reentrant "
    "offload_activations",
    "runtime/half_precision": "dynamic_loss_scale fp16 zero_optim_overflow",
    "runtime/utils": "partition",
    "runtime/zero": "",
    "utils": "byte_cast get_optim_files groups init_on_device partition_balanced",
    "v1": "engine_log_level",
    "v1/accelerator": "",
    "v1/half_precision": "",
    "v1/nvme": "aio",
    "v1/zero": "",
}
"""Folder below tests/unit → names of its files, without `test_`; "" selects all."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", required=True, type=Path, help="checkout of DeepSpeed")
    parser.add_argument("--only", default="", help="part of the files' paths below tests/unit")
    parser.add_argument("--cases", type=int, default=2, help="cases of a test function; 0: all")
    parser.add_argument("--results", type=Path, help="file of results; by default a new one")
    parser.add_argument("--limit", type=int, default=30, help="seconds after which a test fails")
    parser.add_argument("--piece", type=int, default=240, help="seconds of one process of pytest")
    return parser.parse_args()


def selected(unit: Path, only: str) -> list[str]:
    """Return the files of the selection, relative to tests/unit."""
    found = []
    for folder, names in _TESTS.items():
        paths = [unit / folder / f"test_{name}.py" for name in names.split()] or (unit / folder).glob("test_*.py")
        found += [str(path.relative_to(unit)) for path in sorted(paths) if path.exists()]
    return [path for path in found if only in path]


def run_piece(tests: Path, files: list[str], results: Path, args: argparse.Namespace) -> None:
    """Run the tests of `files` without a result, until the piece's time is used up."""
    environment = {
        **os.environ,
        "DEEPSPEED_TESTS": str(tests),
        "DEEPSPEED_RESULTS": str(results),
        "DEEPSPEED_PIECE_S": str(args.piece),
        "DEEPSPEED_CASES": str(args.cases),
        "DS_UNITTEST_TIMEOUT": str(args.limit),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_BENCH), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    options = ["-p", "deepspeed_ranks", "-p", "no:cacheprovider", "-q", "--tb=short", "-o", "addopts="]
    options += ["--continue-on-collection-errors", f"--rootdir={tests}"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    subprocess.run(command, cwd=tests / "unit", env=environment, stdout=subprocess.DEVNULL, check=False)


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def show(results: Path) -> None:
    """Print the counts, and the failed tests by reason."""
    by_outcome, by_reason = defaultdict[str, int](int), defaultdict[str, list[str]](list)
    for line in read(results):
        by_outcome[line["outcome"]] += 1
        if line["outcome"] == "failed":
            by_reason[reason_of(line["test"], line["text"])].append(line["test"])
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(by_outcome.items())))
    for reason, tests in sorted(by_reason.items()):
        print(f"\n{len(tests)} {reason}:")
        print("\n".join(f"    {test}" for test in tests))


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"  # a copy, beside which there is no package deepspeed to import
        shutil.copytree(args.deepspeed / "tests", tests)
        results = args.results or Path(folder) / "results.jsonl"
        files = selected(tests / "unit", args.only)
        count = -1
        while count < (count := len(read(results))):
            run_piece(tests, files, results, args)
        show(results)


if __name__ == "__main__":
    main()
