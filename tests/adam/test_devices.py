"""What updates states on a device: our kernels where there are any, torch's fused AdamW for what it knows."""

from __future__ import annotations

import pytest

from infinity.errors import ConfigError
from infinity.optim import cuda_adam
from infinity.optim.kernels import check_on_device


def test_states_that_only_our_kernels_update_are_refused_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_adam, "why_not", lambda: "this build has none")
    check_on_device("adamw", "fp32")
    check_on_device("adam", "fp32")
    for rule, moments in (("adamw", "8bit"), ("adam", "bf16"), ("lion", "fp32"), ("sgd", "fp32"), ("adagrad", "fp32")):
        with pytest.raises(ConfigError, match=rf"states of {rule} .*{moments}.*this build has none.*cpu or nvme"):
            check_on_device(rule, moments)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda_adam, "why_not", lambda: "")
    check_on_device("lion", "8bit")
