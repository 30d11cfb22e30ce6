"""Cross-entropy of a chunk of logits, with its gradient written over the chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ts_kernels._backend import on_device_of, use_triton
from ts_kernels._checks import TARGET_MESSAGE, out_of_range


def softmax_rows_(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    softcap: float | None,
    write_grad: bool,
    scale: Tensor | None = None,
) -> Tensor:
    """Loss of each row; `logits` is used up.

    Args:
        logits: [rows, classes], contiguous. Afterwards it holds the gradient of
            sum(scale * loss), rounded once to its dtype, if `write_grad`; otherwise anything.
        targets: [rows], integer, in range or `ignore_index`: asserted on the device if that is
            CUDA, else up to the caller.
        softcap: None, or logits become softcap * tanh(logits / softcap) first.
        scale: None, or [rows] float32, a factor for each row's gradient.

    Returns:
        [rows] float32 (float64 for float64 logits); 0 where the target is `ignore_index`.
    """
    if logits.shape[0] and use_triton(logits):
        return _launch(logits, targets, ignore_index, softcap, write_grad, scale)
    return _in_pytorch(logits, targets, ignore_index, softcap, write_grad, scale)


def _in_pytorch(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    softcap: float | None,
    write_grad: bool,
    scale: Tensor | None,
) -> Tensor:
    """The reference of the kernel; at most one temporary of the chunk's size per step."""
    if logits.is_cuda:
        bad = out_of_range(targets, logits.shape[1], ignore_index)
        torch._assert_async(~bad.any(), TARGET_MESSAGE)
    valid = targets != ignore_index
    column = torch.where(valid, targets, 0).to(torch.int64).unsqueeze(1)
    z = logits if logits.dtype == torch.float64 else logits.float()  # float(): a view of fp32
    if softcap is not None:
        z.div_(softcap).tanh_().mul_(softcap)
    slope = None
    if softcap is not None and write_grad:
        slope = 1 - (z / softcap).square_()
    true_logit = z.gather(1, column)
    peak = z.amax(dim=1, keepdim=True)
    z.sub_(peak).exp_()
    total = z.sum(dim=1, keepdim=True)
    losses = (total.log() + (peak - true_logit)).squeeze(1)
    losses = torch.where(valid, losses, torch.zeros_like(losses))
    if write_grad:
        z.div_(total)
        z.scatter_add_(1, column, torch.full_like(true_logit, -1.0))
        if slope is not None:
            z.mul_(slope)
        if scale is not None:
            z.mul_(scale.unsqueeze(1))
        z.masked_fill_(~valid.unsqueeze(1), 0.0)
        if z is not logits:
            logits.copy_(z)
    return losses


def _launch(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    softcap: float | None,
    write_grad: bool,
    scale: Tensor | None,
) -> Tensor:
    import triton

    from ts_kernels.triton_kernels.softmax_rows import softmax_rows_kernel

    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(classes), 8192)
    with on_device_of(logits):
        softmax_rows_kernel[(rows,)](
            logits,
            targets.contiguous(),
            losses if scale is None else scale.contiguous(),
            losses,
            logits.stride(0),
            classes,
            ignore_index,
            1.0 if softcap is None else float(softcap),
            WRITE_GRAD=write_grad,
            HAS_SCALE=scale is not None,
            HAS_CAP=softcap is not None,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
            debug=True,  # keeps the assertion about targets
            sanitize_overflow=False,  # but no checks of the kernel's own integers
        )
    return losses
