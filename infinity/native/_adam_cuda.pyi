"""Optimizer steps over flat arrays in a CUDA device's memory (native, `csrc/adam/cuda/`). Built where nvcc is found.

The functions of `infinity.native._adam`, with the same arguments, definitions and bits, but: arrays are given by their
address on the device, `device` is its number and `stream` a cudaStream_t of it as an integer (0: the default stream).
Kernels are put on the stream and nothing is waited for, so the memory has to stay as it is until they are done;
whether an address is one of the device's is not checked. Nothing is allocated.

Arguments that cannot be right raise ValueError and touch nothing, what CUDA refuses raises RuntimeError in CUDA's
words. Importing asks nothing of CUDA and works without a device, a driver and a toolkit.
"""

from collections.abc import Sequence

from infinity.native._adam import DType, Format, MomentFormat, Rule

ARCHITECTURES: list[str]
"""What is in the file, oldest first: machine code ("sm_80", for every 8.x from it on) and PTX ("compute_90", for
every later device)."""
TOOLKIT: str
"""The version of nvcc that compiled it."""
SUM_TILE: int
"""Elements per tile of a sum of squares: 4096."""

def device_count() -> int:
    """Devices of this process; 0 without a driver."""

def refusal() -> str:
    """What CUDA says if there is no device, else nothing."""

def compute_capability(device: int) -> int:
    """10 * major + minor."""

def update(
    rule: Rule,
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
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    lr_decay: float = 0.0,
    nesterov: bool = False,
    grad_scale: float = 1.0,
    step: int,
    key: int = 0,
    first: int = 0,
    device: int,
    stream: int,
) -> None:
    """One step of `rule` on n elements, in place: see `_adam.update`.

    Fastest if all addresses but those of scales are multiples of four elements.
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
    """initial + sum of (scale * x)^2, to the double at `out`: see `_adam.sum_of_squares`.

    tiles: memory for ceil(n / SUM_TILE) doubles. initial_at: the address of a double that is taken for `initial`,
    which may be `out`.
    """

def split(master: int, param: int, remainder: int, n: int, *, device: int, stream: int) -> None:
    """See `_adam.split`."""

def join(param: int, remainder: int, master: int, n: int, *, device: int, stream: int) -> None:
    """See `_adam.join`."""
