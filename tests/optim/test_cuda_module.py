"""The module of the CUDA kernels, if it was built, and the reasons given if it was not. Needs no GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import infinity.native
from infinity.cli.report import collect
from infinity.optim import cuda_adam

BUILT = importlib.util.find_spec("infinity.native._adam_cuda") is not None


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    cuda_adam.why_not.cache_clear()
    yield
    cuda_adam.why_not.cache_clear()


@pytest.mark.skipif(not BUILT, reason="this build has no CUDA kernels")
def test_the_module_loads_with_and_without_a_gpu() -> None:
    code = "import infinity.native._adam_cuda as m; print(m.device_count(), bool(m.refusal()), *m.ARCHITECTURES)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    count, refused, *architectures = done.stdout.split()
    assert (count == "0") == (refused == "True")
    assert architectures and all(name.startswith(("sm_", "compute_")) for name in architectures)


@pytest.mark.skipif(not BUILT or cuda_adam.available(), reason="this build has no CUDA kernels, or they can be used")
def test_without_a_gpu_a_call_is_an_error_in_cudas_words() -> None:
    import infinity.native._adam_cuda as native

    with pytest.raises(RuntimeError, match=r"cudaGetDevice: .+ \(cudaError"):
        native.split(4096, 8192, 16384, 4, device=0, stream=0)
    assert native.refusal() in collect()["cuda"]["own kernels"]
    assert "fused AdamW" in collect()["cuda"]["own kernels"]


def test_a_build_without_them_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "infinity.native._adam_cuda", None)
    monkeypatch.delattr(infinity.native, "_adam_cuda", raising=False)
    reason = "this build has no CUDA kernels (built without nvcc, without torch's CUDA, or with INFINITY_CUDA=OFF)"
    assert cuda_adam.why_not() == reason and not cuda_adam.available()
    assert collect()["cuda"]["own kernels"] == f"{reason}; torch's fused AdamW updates on CUDA devices"


def test_cpu_tensors_are_refused_with_or_without_them() -> None:
    with pytest.raises(ValueError, match="tensor is on cpu: pass a CUDA tensor"):
        cuda_adam.sum_of_squares(torch.zeros(3))
