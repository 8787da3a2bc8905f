"""Encodes and decodes frozen parameters (`infinity.plan.frozen`), by native kernels or by torch operations.

The results are the same bits: `infinity.optim.frozen` defines them.
"""

from __future__ import annotations

import torch

from infinity.native import _adam, cuda
from infinity.plan.frozen import CODED_DTYPES, GROUP, RECORD, FrozenCode
from infinity.tiers.memory import host_tensor

EIGHT_STEP = torch.tensor(1.0) / 127
"""Difference of two levels of 8 bits, fp32: 127 times it is 1."""

NF4_LEVELS = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
"""Levels of NormalFloat 4, fp32 (16,): Dettmers et al. 2023."""

_PIECE = 256
"""Records that torch operations decode at once, which bounds their temporary tensors."""


def encode(code: FrozenCode, values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bytes of an extent, in aligned host memory, uint8 (nbytes,), and the number of the first value that is
    not finite, or that of all elements. values: (numel,) of the code's dtype on the host, numel a multiple of `RECORD`.
    """
    numel = values.numel()
    stored = host_tensor(code.nbytes(numel))
    records = code.records_of(stored, numel)
    bad = _adam.encode_frozen(
        values.data_ptr(), records.data_ptr(), numel, code=code.format, dtype=CODED_DTYPES[code.dtype]
    )
    return stored, bad


def decode(code: FrozenCode, stored: torch.Tensor, memory: torch.Tensor) -> int:
    """Decode an extent's bytes into `memory`, uint8 (n,) on the host, and return its fingerprint. stored: elsewhere, or
    the end of `memory`.
    """
    numel = code.numel(memory)
    records = code.records_of(stored, numel)
    return _adam.decode_frozen(
        records.data_ptr(), memory.data_ptr(), numel, code=code.format, dtype=CODED_DTYPES[code.dtype]
    )


def decode_on_device(code: FrozenCode, memory: torch.Tensor) -> None:
    """Decode the extent's bytes at the end of `memory` in place, on its device, after the compute of the stream."""
    if memory.is_cuda and cuda.available():
        import infinity.native._adam_cuda as native

        numel = code.numel(memory)
        records = code.records_of(code.stored_in(memory), numel)
        native.decode_frozen(
            records.data_ptr(),
            memory.data_ptr(),
            numel,
            code=code.format,
            dtype=CODED_DTYPES[code.dtype],
            device=memory.get_device(),
            stream=torch.cuda.current_stream(memory.device).cuda_stream,
        )
    else:
        decode_by_torch(code, memory)


def decode_by_torch(code: FrozenCode, memory: torch.Tensor) -> None:
    """Decode the extent's bytes at the end of `memory` in place, by torch operations on its device."""
    numel = code.numel(memory)
    count, width = numel // RECORD, code.record_nbytes
    records = code.records_of(code.stored_in(memory), numel)
    values = memory.view(code.dtype)
    # From low to high addresses: values end where the records of the same elements end, or before. So they never reach
    # a record that was not taken.
    for start in range(0, count, _PIECE):
        stop = min(start + _PIECE, count)
        taken = records[start * width : stop * width].clone().view(stop - start, width)
        values[start * RECORD : stop * RECORD].copy_(_values(code, taken).flatten())


def _values(code: FrozenCode, records: torch.Tensor) -> torch.Tensor:
    """Return the values of records, uint8 (records, bytes): (records, groups, GROUP) of the code's dtype."""
    groups = RECORD // GROUP
    codes = records[:, : -groups * code.dtype.itemsize].reshape(len(records), groups, -1)
    scales = records[:, -groups * code.dtype.itemsize :].contiguous().view(code.dtype)
    return levels(code, codes).mul_(scales.float().unsqueeze(-1)).to(code.dtype)


def levels(code: FrozenCode, codes: torch.Tensor) -> torch.Tensor:
    """Return the levels of stored codes, fp32 (..., GROUP). codes: uint8, (..., GROUP) or half as many for nf4."""
    if code.format == "8bit":
        return codes.contiguous().view(torch.int8).float() * EIGHT_STEP.to(codes.device)
    halves = torch.cat([codes & 15, codes >> 4], dim=-1)
    return NF4_LEVELS.to(codes.device)[halves.int()]
