"""Availability of the CUDA kernels of `infinity.native._adam_cuda` in this process."""

from __future__ import annotations

import re
from functools import cache


def available() -> bool:
    """Return whether the kernels are built and this process has devices that run them."""
    return not why_not()


@cache
def why_not() -> str:
    """Return why the kernels cannot be used (the loader's error or CUDA's); empty if they can."""
    try:
        import infinity.native._adam_cuda as native
    except ModuleNotFoundError:
        return "this build has no CUDA kernels (built without nvcc, without torch's CUDA, or with INFINITY_CUDA=OFF)"
    except ImportError as error:
        return f"the CUDA kernels do not load: {error}"
    if reason := native.refusal():
        return reason
    # Names without digits (native, all) do not give the architecture; only a launch shows whether it fits.
    numbers = [int(digits.group()) for name in native.ARCHITECTURES if (digits := re.search(r"\d+", name))]
    for device in range(native.device_count()):
        if (found := native.compute_capability(device)) < min(numbers, default=0):
            return f"this build's CUDA kernels are for sm_{min(numbers)} and later, and device {device} is sm_{found}"
    return ""
