"""Optimizer steps over flat arrays in host memory (native, `csrc/adam/`).

Arrays are passed as an address (`tensor.data_ptr()`, a Python int) and a number of elements. Functions allocate nothing
and release the GIL. The arrays of one call must not overlap. Results are bit-identical for every instruction set,
number of threads and alignment.

Invalid arguments raise ValueError before any write: null, misaligned or overlapping arrays; n < 0; an unknown rule,
format, dtype or isa; an isa that this machine lacks; too few moments; step < 1; a beta outside [0, 1); another
constant that is negative (dampening may be) or not finite; a non-finite scale of a sum; a `first` that is no multiple
of BLOCK.
n == 0 is a no-op for any addresses.

threads: 0 stands for `default_threads()`. The calling thread alone processes fewer than 65,536 elements.
isa: "auto" stands for `default_isa()`; otherwise one of `available_isas()`.
"""

from collections.abc import Sequence
from typing import Literal

from infinity.rules import RuleName

Format = Literal["fp32", "remainder", "master", "master_fp16"]
DType = Literal["fp32", "bf16", "fp16"]
MomentFormat = Literal["fp32", "bf16", "8bit"]
FrozenFormat = Literal["8bit", "nf4"]

BLOCK: int
"""Elements that share a scale in 8-bit moments: 256."""
FROZEN_GROUP: int
"""Elements of a frozen parameter that share a scale: 64."""
FROZEN_RECORD: int
"""Elements of a record of frozen parameters: 2048."""
RULES: tuple[tuple[RuleName, int, int, tuple[str, ...]], ...]
"""Each rule's name, number of moments, moment that is a sum or mean of squares (-1: none), and constants."""

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
    threads: int = 0,
    background: bool = False,
    isa: str = "auto",
    sources: Sequence[int] = (),
    **constants: float,
) -> None:
    """Perform one step of `rule` on n elements, in place.

    rule: as torch.optim's class of the name; Lion as Chen et al. (2023), AdEMAMix as Pagliardini et al. (2024).
        `infinity.rules` lists its moments and its constants.
    format: formats of `param` and `master`:
        "fp32"         param fp32; master is ignored (pass 0)
        "remainder"    param bf16, master int16: see `join`
        "master"       param bf16 (written only, rounded as in `split`), master fp32
        "master_fp16"  param fp16 (written only, rounded to nearest, ties to even), master fp32
    grad: (n,) of grad_dtype; first multiplied by grad_scale, which may be infinite or NaN.
    moment_format:
        "fp32"  fp32 (n,); scales is empty
        "bf16"  bf16 (n,), rounded stochastically; scales is empty
        "8bit"  codes uint8 (n,), rounded stochastically, and one array of scales, uint8 (ceil(n / BLOCK),), per moment.
                Sums and means of squares are encoded as their square roots. All-zero bytes decode to zero. A block with
                a non-finite value decodes to NaN. The code: csrc/adam/codec.h, `infinity.optim.moments`.
    step: number of this step, from 1.
    key, first: the stochastic rounding of element i is a function of key (64 bits), first + i and the value. An update
        split at multiples of BLOCK, each part with its own `first`, is therefore bit-identical to a single one. `first`
        is a multiple of BLOCK. Use another key in each step; otherwise rounding errors repeat.
    background: run on threads of a lower priority (nice 10 above the process), which take the time that other threads
        leave idle, while the calling thread sleeps. It takes part if they get too little time. On Linux only.
    sources: addresses of the values to start from, which may stay: of param, master (any in fp32), moments and scales.
        Empty: those of the arrays that the step writes. The result has the same bits.
    constants: all of the rule, as in `RULES`; those of other rules are ignored. TypeError for other names.
    A NaN is stored as 0x7FC00000, in bf16 as 0x7FC0, in fp16 as 0x7E00.
    """

class Update:
    """A validated update, by address: its arrays must live until `update_all` returns."""

class Group:
    """Hyper-parameters that several updates share, as of `update`."""

    def __init__(
        self,
        rule: RuleName,
        *,
        grad_scale: float = 1.0,
        **constants: float,
    ) -> None: ...
    def prepare(
        self,
        param: int,
        master: int,
        grad: int,
        moments: Sequence[int],
        scales: Sequence[int],
        n: int,
        format: Format,
        grad_dtype: DType,
        moment_format: MomentFormat,
        step: int,
        key: int,
        /,
    ) -> Update:
        """Validate the arguments of `update` and the hyper-parameters, for `update_all`. All are positional, since a
        call with names takes longer than a small update.
        """

def update_all(updates: Sequence[Update], threads: int = 0, isa: str = "auto") -> None:
    """Perform `updates` as if one after another, on threads that are woken once. Those that share memory take turns."""

def bare(streams: Sequence[tuple[int, int, bool]], threads: int = 0) -> None:
    """Read and write `streams` with the access pattern of `update`, as a lower bound of its time.

    streams: (address, nbytes, is written). Reads all streams, with one addition per 32-bit word, in the widest vectors
    available. Written streams are overwritten, which destroys their data. Addresses are multiples of 4; the bytes after
    the last multiple of 64 are skipped.
    """

def first_touch(address: int, nbytes: int, threads: int = 0) -> None:
    """Zero `nbytes` of new memory with several threads, divided as in an update of fp32 arrays.

    Linux places a page on the NUMA node of the thread that first writes to it, so the pages are spread over the nodes
    of the threads. (Tested on machines with one node only, where it is merely faster.)
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
    """Return initial + sum over i of (scale * x[i])^2 in fp64; inf and NaN propagate.

    Definition: tiles of 4096 elements counted from `address` are each summed in 32 lanes (element i in lane i mod 32,
    lanes added pairwise), multiplied by scale twice, and added to `initial` in order. The bits therefore depend only on
    the values, n, scale and initial. A range split at multiples of 4096, with each part's result as the next part's
    `initial`, is bit-identical to a single call.
    """

def receive(
    source: int,
    target: int,
    n: int,
    *,
    source_dtype: DType,
    target_dtype: DType,
    add: bool = False,
    initial: float = 0.0,
    threads: int = 0,
    isa: str = "auto",
) -> float:
    """Set target = source, or target += source with `add`, and return `sum_of_squares` of the result from `initial` on,
    in one pass.

    Adds in fp32, then rounds to target_dtype, to nearest with ties to even. A NaN is stored as 0x7FC00000, in bf16 as
    0x7FC0, in fp16 as 0x7E00.
    """

def fingerprint(address: int, nbytes: int, threads: int = 0, isa: str = "auto") -> int:
    """Return a 64-bit hash of the bytes, with a collision probability of 2^-64.

    nbytes: a multiple of 8. Defined in csrc/adam/adam.h as a sum over words, independent of the order of summation.
    """

def copy(source: int, target: int, nbytes: int, threads: int = 0, isa: str = "auto") -> int:
    """Copy the bytes and return their `fingerprint`, in one pass over memory.

    nbytes: a multiple of 8. Copies of 4 MiB and more are written past the caches. Source and target may not overlap.
    """

def encode_frozen(
    values: int, records: int, n: int, *, code: FrozenFormat, dtype: DType, threads: int = 0, isa: str = "auto"
) -> int:
    """Encode n frozen parameters of `dtype`, a multiple of FROZEN_RECORD, as records: see csrc/adam/frozen.h.

    Returns the number of the first value that is not finite, of which no code is right; n without one.
    """

def decode_frozen(
    records: int, values: int, n: int, *, code: FrozenFormat, dtype: DType, threads: int = 0, isa: str = "auto"
) -> int:
    """Decode records to n values of `dtype`, and return the `fingerprint` of these. Records and values overlap nowhere,
    or end at the same address: values are then decoded over the records, in place.
    """

def split(master: int, param: int, remainder: int, n: int, threads: int = 0, isa: str = "auto") -> None:
    """Split fp32 `master` into bf16 `param`, rounded half away from zero, and int16 `remainder`, from which `join`
    restores it.

    On the bits: param = (bits + 0x8000) >> 16, remainder = the low 16 bits. A NaN becomes 0x7FC00000 first.
    """

def join(param: int, remainder: int, master: int, n: int, threads: int = 0, isa: str = "auto") -> None:
    """Invert `split`, exactly for every fp32 value: bits = (param << 16) + sign-extended remainder."""

def available_isas() -> list[str]:
    """Return the instruction sets of this build that this machine supports, fastest first: of "avx512", "avx2",
    "plain"."""

def default_isa() -> str: ...
def default_threads() -> int:
    """Return the number of processors that the calling thread may run on."""
