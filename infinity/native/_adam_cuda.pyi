"""Optimizer steps over flat arrays in a CUDA device's memory (native, `csrc/adam/cuda/`). Built for a torch with CUDA.

The functions are those of `infinity.native._adam`, with the same arguments, definitions and bits, except: arrays are
passed as device addresses, `device` is the device's number, and `stream` is its cudaStream_t as an integer (0: the
default stream). Functions launch kernels and return without synchronization, so the memory must stay valid and
unchanged until the kernels are done. They allocate nothing, and do not check that addresses are on the device.

Invalid arguments raise ValueError before any launch. Errors of CUDA raise RuntimeError with CUDA's text. Importing the
module does not initialize CUDA, and works without a device, a driver and a toolkit.
"""

from collections.abc import Sequence

from infinity.native._adam import DType, Format, FrozenFormat, MomentFormat
from infinity.rules import RuleName

ARCHITECTURES: list[str]
"""Compiled architectures, oldest first: machine code ("sm_80", for 8.x devices from it on) and PTX ("compute_90", for
every later device)."""
TOOLKIT: str
"""Version of the nvcc that compiled the module."""
SUM_TILE: int
"""Elements per tile of a sum of squares: 4096."""

def device_count() -> int:
    """Return the number of devices of this process; 0 without a driver."""

def refusal() -> str:
    """Return CUDA's error if there is no device; "" otherwise."""

def compute_capability(device: int) -> int:
    """Return 10 * major + minor."""

def update(
    rule: RuleName,
    *,
    param: int,
    master: int,
    grad: int,
    moments: Sequence[int],
    scales: Sequence[int],
    n: int,
    format: Format,
    grad_dtype: DType,
    moment_format: MomentFormat,
    grad_scale: float = 1.0,
    step: int,
    key: int = 0,
    first: int = 0,
    device: int,
    stream: int,
    **constants: float,
) -> None:
    """Perform one step of `rule` on n elements, in place; see `_adam.update`.

    Fastest if all addresses except those of scales are aligned to four elements.
    """

def sum_of_squares(
    address: int,
    n: int,
    dtype: DType,
    *,
    out: int,
    tiles: int,
    scale: float = 1.0,
    initial: float = 0.0,
    initial_at: int | None = None,
    device: int,
    stream: int,
) -> None:
    """Write initial + sum of (scale * x)^2 to the double at `out`; see `_adam.sum_of_squares`.

    tiles: address of ceil(n / SUM_TILE) doubles of scratch memory. initial_at: address of a double used in place of
    `initial`; may be `out`.
    """

def sums_of_squares(
    address: int,
    n: int,
    dtype: DType,
    ranges: Sequence[tuple[int, int]],
    *,
    out: int,
    tiles: int,
    device: int,
    stream: int,
) -> None:
    """Write the sum of x^2 of each range [start, stop) of n elements to the doubles at `out`, as `sum_of_squares`.

    tiles: address of scratch memory, ceil((stop - start) / SUM_TILE) doubles for each range.
    """

def fingerprint(address: int, nbytes: int, *, out: int, device: int, stream: int) -> None:
    """Add the 64-bit hash of the bytes to the integer of 8 bytes at `out`, modulo 2^64; see `_adam.fingerprint`."""

def store(address: int, host: int, nbytes: int, *, device: int, stream: int) -> None:
    """Copy a few bytes of device memory to registered host memory by a kernel, since copy engines may be busy."""

def decode_frozen(
    records: int, values: int, n: int, *, code: FrozenFormat, dtype: DType, device: int, stream: int
) -> None:
    """See `_adam.decode_frozen`; returns nothing. Both addresses are aligned to 16 bytes. In place, it launches several
    kernels, each on records that no value of the launch reaches.
    """

def split(master: int, param: int, remainder: int, n: int, *, device: int, stream: int) -> None:
    """See `_adam.split`."""

def join(param: int, remainder: int, master: int, n: int, *, device: int, stream: int) -> None:
    """See `_adam.join`."""
