"""Optimizer steps over flat arrays in host memory (native, `csrc/adam/`).

Arrays are given by address (`tensor.data_ptr()`, a Python int) and a number of elements; nothing is allocated, all
functions release the GIL. The arrays of one call must share no memory. Results are the same, bit for bit, for every
instruction set, number of threads and alignment.

Arguments that cannot be right (null, misaligned or overlapping arrays, n < 0, an unknown rule, format, dtype or isa,
an isa that this machine lacks, too few moments, step < 1, a beta outside [0, 1), a negative or non-finite eps, lr,
momentum or weight_decay, a non-finite scale of a sum, a `first` that is not at a block) raise ValueError and touch
nothing.
n == 0 does nothing, whatever the addresses.

threads: 0 stands for `default_threads()`; fewer than 65,536 elements are always done by the calling thread.
isa: "auto" stands for `default_isa()`; otherwise one of `available_isas()`.
"""

from collections.abc import Sequence
from typing import Literal

Rule = Literal["adam", "adamw", "adagrad", "lion", "sgd"]
Format = Literal["fp32", "remainder", "master", "master_fp16"]
DType = Literal["fp32", "bf16", "fp16"]
MomentFormat = Literal["fp32", "bf16", "8bit"]

BLOCK: int
"""Elements that share a scale in 8-bit moments: 256."""

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
    threads: int = 0,
    isa: str = "auto",
) -> None:
    """One step of `rule` on n elements, in place.

    rule: with the moments it has, and the arguments it reads besides lr, weight_decay and grad_scale:
        "adam", "adamw"  exp_avg, exp_avg_sq   beta1, beta2, eps; as torch.optim.Adam (L2 decay) and AdamW
        "adagrad"        sum of squares        eps, lr_decay; as torch.optim.Adagrad
        "lion"           exp_avg               beta1, beta2; decoupled decay (Chen et al. 2023)
        "sgd"            momentum buffer       momentum, dampening, nesterov; as torch.optim.SGD
    format: what `param` and `master` are:
        "fp32"         param fp32; master is ignored (pass 0)
        "remainder"    param bf16, master int16: see `join`
        "master"       param bf16 (written only, rounded as `split` does), master fp32
        "master_fp16"  param fp16 (written only, rounded to nearest, ties to even), master fp32
    grad: of grad_dtype; multiplied by grad_scale first, which may be infinite or NaN.
    moment_format:
        "fp32"  fp32 (n,); scales is empty
        "bf16"  bf16 (n,), rounded stochastically; scales is empty
        "8bit"  codes uint8 (n,), rounded stochastically, and as many scales: uint8 (ceil(n / BLOCK),). Sums and means
                of squares are kept as codes of their square root. All zeros is zero. A block with a value that is not
                finite reads as NaN. The code: csrc/adam/codec.h, `infinity.optim.moments`.
    step: number of this step, from 1.
    key, first: stochastic rounding of element i is a function of key (64 bits), first + i and the value, so that an
        update cut at multiples of BLOCK, each part with its own `first`, gives the bits of the whole. `first` is a
        multiple of BLOCK. A key must not come again with another step, or errors repeat.
    A NaN is stored as 0x7FC00000, in bf16 as 0x7FC0, in fp16 as 0x7E00.
    """

def bare(streams: Sequence[tuple[int, int, bool]], threads: int = 0) -> None:
    """The time that memory sets: streams (address, bytes, is written), gone over by turns as `update` does.

    All are read with one addition for each 32-bit word, in the widest vectors there are; those that are written are
    written back, which spoils their data. Addresses are of words; the bytes after the last multiple of 64 are left out.
    """

def first_touch(address: int, nbytes: int, threads: int = 0) -> None:
    """Zero `nbytes` of fresh memory with several threads, each its share, as an update of fp32 arrays there divides it.

    The system puts a page where the thread runs that first writes to it: on a machine with several memory nodes, spread
    over those of the threads. (Tested on machines with one node only, where it merely is faster.)
    """

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

def receive(
    source: int,
    target: int,
    n: int,
    *,
    source_dtype: DType,
    target_dtype: DType,
    add: bool = False,
    threads: int = 0,
    isa: str = "auto",
) -> float:
    """target = source, or target += source with `add`; and `sum_of_squares` of the result, in one pass over memory.

    Added in fp32, then rounded to target_dtype, to nearest with ties to even. A NaN is stored as 0x7FC00000, in bf16 as
    0x7FC0, in fp16 as 0x7E00.
    """

def fingerprint(address: int, nbytes: int, threads: int = 0, isa: str = "auto") -> int:
    """A number of 64 bits that changes, but for a chance of 2^-64, when any of the bytes does.

    nbytes: a multiple of 8. Defined in csrc/adam/adam.h: a sum over words, whose order changes nothing.
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
