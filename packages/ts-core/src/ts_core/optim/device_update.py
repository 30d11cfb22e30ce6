"""AdamW by a device kernel, with the bits of the host kernel.

On CUDA a Triton kernel works in place on the parameter and on moments in device memory or in
pinned host memory (which a GPU reads and writes over the link at the same addresses). On the host
device the native kernel takes its place.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from ts_core import _native
from ts_core.errors import NotAvailableError
from ts_core.optim.layout import Hyper

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
# Programs of a kernel that waits for the link, at most, each as wide as can be: enough bytes in
# flight to fill it. A processor that one occupies is lost to matrix products beside it, whose
# programs want all of its registers (docs/decisions/zero-copy.md).
LINK_PROGRAMS = 8
_LINK_BLOCK, _LINK_WARPS = 4096, 32
_BLOCK, _WARPS = 1024, 8


@dataclass(frozen=True)
class DeviceState:
    """fp32 state of some values: flat tensors that the device can address."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        """Those that are there."""
        found = [self.exp_avg, self.exp_avg_sq]
        return found if self.master is None else [*found, self.master]

    def slice(self, start: int, end: int) -> DeviceState:
        """Views of a range of values."""
        master = None if self.master is None else self.master[start:end]
        return DeviceState(self.exp_avg[start:end], self.exp_avg_sq[start:end], master)


def update_on_device(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: DeviceState,
    hyper: Hyper,
    step: int,
    scale: float,
    *,
    over_link: bool = False,
    device: torch.device | None = None,
) -> None:
    """One AdamW update (Loshchilov & Hutter, arXiv:1711.05101) in place, on the current stream.

    Args:
        param: flat, fp32, bf16 or fp16.
        grad: flat, same size; multiplied by `scale` in fp32.
        state: of the same size; with a master copy that one is updated and `param` written from it.
        hyper: hyper-parameters.
        step: 1 for the first update.
        scale: factor on the gradients (clipping).
        over_link: the state is in pinned host memory; uses few programs, so that the computation
            beside it goes on.
        device: that does it, when `param` is in pinned host memory too; else that of `param`.

    Raises:
        NotAvailableError: a CUDA device without Triton.
    """
    if param.numel() == 0:
        return
    device = device or param.device
    if device.type == "cpu":
        update_on_host(param, grad, state, hyper, step, scale, 0)
        return
    kernel = _kernel()
    s = scalars(hyper, step, scale)
    block, warps = (_LINK_BLOCK, _LINK_WARPS) if over_link else (_BLOCK, _WARPS)
    blocks = -(-param.numel() // block)
    programs = min(blocks, _link_programs(device) if over_link else 8192)
    master = param if state.master is None else state.master
    with torch.cuda.device(device):
        kernel[(programs,)](
            param,
            grad,
            state.exp_avg,
            state.exp_avg_sq,
            master,
            param.numel(),
            s.decay,
            s.grad_scale,
            s.lerp_factor,
            s.beta2,
            s.one_minus_beta2,
            s.correction2,
            s.eps,
            s.step_size,
            HAS_MASTER=state.master is not None,
            LERP_FROM_M=s.lerp_from_m,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=False,
        )


@dataclass(frozen=True)
class Scalars:
    """The factors of one update, rounded once to fp32 as the host kernel rounds them."""

    decay: float
    grad_scale: float
    lerp_factor: float
    lerp_from_m: bool
    beta2: float
    one_minus_beta2: float
    correction2: float
    eps: float
    step_size: float


@functools.lru_cache(maxsize=64)  # most buckets of a step have the same
def scalars(hyper: Hyper, step: int, scale: float) -> Scalars:
    """Factors of update number `step`, computed in double."""
    weight = 1.0 - hyper.beta1
    from_m = weight < 0.5
    return Scalars(
        decay=_fp32(1.0 - hyper.lr * hyper.weight_decay),
        grad_scale=_fp32(scale),
        lerp_factor=_fp32(_fp32(weight) - (0.0 if from_m else 1.0)),
        lerp_from_m=from_m,
        beta2=_fp32(hyper.beta2),
        one_minus_beta2=_fp32(1.0 - hyper.beta2),
        correction2=_fp32(math.sqrt(1.0 - math.pow(hyper.beta2, step))),
        eps=_fp32(hyper.eps),
        step_size=_fp32(hyper.lr / (1.0 - math.pow(hyper.beta1, step))),
    )


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value


def update_on_host(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: DeviceState,
    hyper: Hyper,
    step: int,
    scale: float,
    threads: int,
) -> None:
    """The same update on flat CPU tensors by `threads` host threads (0: all usable cores)."""
    _native.adamw_step(
        param.data_ptr(),
        DTYPE_NAMES[param.dtype],
        grad.data_ptr(),
        DTYPE_NAMES[grad.dtype],
        state.exp_avg.data_ptr(),
        state.exp_avg_sq.data_ptr(),
        0 if state.master is None else state.master.data_ptr(),
        param.numel(),
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        step=step,
        grad_scale=scale,
        threads=threads,
    )


@functools.cache
def _link_programs(device: torch.device) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(min(LINK_PROGRAMS, int(processors) // 2), 1)


@functools.cache
def _kernel() -> Any:
    try:
        from ts_core.optim.adamw_triton import adamw_kernel
    except ImportError as error:
        raise NotAvailableError(
            f"updates on a GPU (mode 'gpu' or 'hybrid') need Triton, which comes with torch for "
            f"CUDA and cannot be imported here: {error}. Use mode='cpu', or pip install triton."
        ) from error
    return adamw_kernel
