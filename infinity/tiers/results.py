"""Results of a CUDA device for the host, a few bytes each.

A copy would queue behind gradients: copies to the host take turns in the order of all streams, and a unit's gradient
takes milliseconds. A kernel writes to registered memory at once.
"""

from __future__ import annotations

import torch


def store_on_host(host: torch.Tensor, result: torch.Tensor) -> None:
    """Write `result`, uint8 (n,) on a CUDA device, to `host`, uint8 (n,) in registered host memory.

    Runs on the device's current stream, by `infinity.native._adam_cuda`. Does not wait. Raises RuntimeError with CUDA's
    text if `host` is not registered.
    """
    import infinity.native._adam_cuda as native

    where = {"device": result.get_device(), "stream": torch.cuda.current_stream(result.device).cuda_stream}
    native.store(result.data_ptr(), host.data_ptr(), result.numel(), **where)
