"""The constant that scripts import from `deepspeed.runtime.swap_tensor`."""

MIN_SWAPPABLE_BYTES = 1 << 20
"""Size below which DeepSpeed keeps a tensor in memory. Here units of any size move to NVMe."""
