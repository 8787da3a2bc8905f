"""Tests on an accelerator: CUDA, or the one that is emulated by tests/late if INFINITY_TEST_DEVICE is "late".

    python -m pytest -m gpu tests/gpu                              # on CUDA; -n 6 in processes that share the device
    INFINITY_TEST_DEVICE=late python -m pytest -m gpu tests/gpu    # anywhere; LATE_MODE and LATE_SEED give the order

Tests compare bits, so operations have to give the same bits each time: without TF32, and with cuBLAS in workspaces of a
fixed size, which it reads from its variable when CUDA is first used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if (wanted := os.environ.get("INFINITY_TEST_DEVICE", "")) == "late":
    import late

    late.load()
elif wanted not in ("", "cuda"):
    raise pytest.UsageError(f'INFINITY_TEST_DEVICE is {wanted!r}: give "late", or leave it out for CUDA')


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """An operation without a deterministic implementation raises, and names itself."""
    matmul, memory = torch.backends.cuda.matmul, torch.utils.deterministic
    before = matmul.allow_tf32, memory.fill_uninitialized_memory
    matmul.allow_tf32, memory.fill_uninitialized_memory = False, False  # memory is as in other runs
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    matmul.allow_tf32, memory.fill_uninitialized_memory = before
