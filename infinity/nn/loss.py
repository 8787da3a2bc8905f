"""Cross entropy of tokens, with little memory in addition to the logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Logits converted to fp32 at a time, 16 MiB on a CPU."""

ON_DEVICES = 16
"""Factor of `CHUNK_ELEMENTS` on other devices, where the launches of small chunks would take longer than their work."""


class _TokenCrossEntropy(torch.autograd.Function):
    """Saves the logits and one number per row; computes the fp32 copy and the softmax in chunks of rows.

    For bf16 logits of n bytes, `F.cross_entropy(logits.float(), ...)` allocates 7 n more at its peak (an fp32 copy, its
    log-softmax, the gradient in fp32 and in bf16). This allocates n, for the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        total = logits.new_zeros((), dtype=torch.float32)
        log_normalizer = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        ctx.rows = rows = _rows(logits)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            scores = logits[part].float()
            log_normalizer[part] = scores.logsumexp(-1)
            counted = targets[part] != ignore_index
            picked = scores.gather(1, _classes(targets[part], counted))[:, 0]
            # Ignored rows are filled, not multiplied by 0: their logits may be infinite.
            total += (log_normalizer[part] - picked).masked_fill_(~counted, 0.0).sum()
        count = (targets != ignore_index).sum()
        ctx.save_for_backward(logits, targets, log_normalizer, count)
        ctx.ignore_index = ignore_index
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_normalizer, count = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.rows):
            part = slice(start, start + ctx.rows)
            counted = targets[part] != ctx.ignore_index
            softmax = (logits[part].float() - log_normalizer[part, None]).exp_()
            softmax.scatter_add_(1, _classes(targets[part], counted), -torch.ones_like(softmax[:, :1]))
            grad[part] = softmax.mul_((grad_loss / count * counted)[:, None])  # NaN logits stay NaN, as in torch
        return grad, None, None


def _classes(targets: Tensor, counted: Tensor) -> Tensor:
    """Return (rows, 1) indices into the logits; 0 for rows that are not counted, whose targets may be any number."""
    return targets.masked_fill(~counted, 0)[:, None]


def _rows(logits: Tensor) -> int:
    elements = CHUNK_ELEMENTS if logits.is_cpu else CHUNK_ELEMENTS * ON_DEVICES
    return max(1, elements // logits.shape[-1])


def token_cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the mean cross entropy in nats, fp32 (), of `logits` (..., V) and int64 `targets` (...).

    `logits` may have any float dtype. Targets equal to `ignore_index` are not counted. The mean over
    no targets is NaN, as in torch. Raises ValueError for another number of targets than of rows of logits,
    and IndexError or RuntimeError for a target that is no class.
    """
    flat_logits, flat_targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    if len(flat_logits) != len(flat_targets):
        raise ValueError(
            f"logits {tuple(logits.shape)} have {len(flat_logits)} rows, and targets {tuple(targets.shape)} are "
            f"{len(flat_targets)}. Pass one target for each row."
        )
    if logits.dtype == torch.float32 and flat_logits.numel() <= CHUNK_ELEMENTS:  # one chunk
        return F.cross_entropy(flat_logits, flat_targets, ignore_index=ignore_index)
    loss: Tensor = _TokenCrossEntropy.apply(flat_logits, flat_targets, ignore_index)  # type: ignore[no-untyped-call]
    return loss
