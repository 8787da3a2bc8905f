"""Adam and AdamW over flat arrays in host memory (native, `csrc/adam/`).

Arrays are given by address (`tensor.data_ptr()`, a Python int) and a number of elements; nothing is allocated, all
functions release the GIL. The arrays of one call must share no memory. Results are the same, bit for bit, for every
instruction set, number of threads and alignment.

Arguments that cannot be right (null, misaligned or overlapping arrays, n < 0, an unknown format, dtype or isa, an isa
that this machine lacks, step < 1, a beta outside [0, 1), a negative or non-finite eps, lr or weight_decay, a
non-finite scale) raise ValueError and touch nothing. n == 0 does nothing, whatever the addresses.

threads: 0 stands for `default_threads()`; fewer than 65,536 elements are always done by the calling thread.
isa: "auto" stands for `default_isa()`; otherwise one of `available_isas()`.
"""

from typing import Literal

Format = Literal["fp32", "remainder", "master"]
DType = Literal["fp32", "bf16"]

def adam(
    param: int,
    master: int,
    grad: int,
    exp_avg: int,
    exp_avg_sq: int,
    n: int,
    *,
    format: Format,
    grad_dtype: DType,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    grad_scale: float = 1.0,
    threads: int = 0,
    isa: str = "auto",
) -> None:
    """One step of AdamW (decoupled) or Adam with L2 decay on n elements, in place, as `torch.optim` defines them.

    format: what `param` and `master` are:
        "fp32"       param fp32; master is ignored (pass 0)
        "remainder"  param bf16, master int16: see `join`
        "master"     param bf16 (written only), master fp32
    exp_avg, exp_avg_sq: fp32. grad: fp32 or bf16, multiplied by grad_scale first.
    step: number of this step, from 1. A NaN is stored as 0x7FC00000, in bf16 as 0x7FC0.
    """

def bare(
    param: int,
    master: int,
    grad: int,
    exp_avg: int,
    exp_avg_sq: int,
    n: int,
    *,
    format: Format,
    grad_dtype: DType,
    threads: int = 0,
    isa: str = "auto",
) -> None:
    """The reads and writes of `adam` with one addition each: the time that memory sets. Spoils the data."""

def sum_of_squares(
    address: int,
    n: int,
    dtype: DType,
    *,
    scale: float = 1.0,
    initial: float = 0.0,
    threads: int = 0,
    isa: str = "auto",
) -> float:
    """initial + sum over i of (scale * x[i])^2 in fp64; inf and NaN propagate.

    Defined as: tiles of 4096 elements counted from `address`, each summed in 32 lanes (element i in lane i mod 32,
    lanes added pairwise), times scale twice, added to `initial` in the order of the tiles. So the bits depend on the
    values, n, scale and initial only; and a range cut at multiples of 4096, each part's result being the next
    part's `initial`, gives the bits of the whole.
    """

def split(master: int, param: int, remainder: int, n: int, threads: int = 0, isa: str = "auto") -> None:
    """fp32 `master` to bf16 `param`, rounded half away from zero, and the int16 `remainder` that `join` needs.

    In integers: param = (bits + 0x8000) >> 16, remainder = the low 16 bits. A NaN is made 0x7FC00000 first.
    """

def join(param: int, remainder: int, master: int, n: int, threads: int = 0, isa: str = "auto") -> None:
    """The inverse of `split`, exact for every fp32 value: bits = (param << 16) + sign-extended remainder."""

def available_isas() -> list[str]:
    """Instruction sets of this build that this machine runs, fastest first: of "avx512", "avx2", "plain"."""

def default_isa() -> str: ...
def default_threads() -> int:
    """The number of processors that the calling thread may run on."""
