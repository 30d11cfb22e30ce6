"""The choice between Triton kernels and the PyTorch reference on a GPU.

Triton is imported at the first decode of a CUDA tensor, never before. Without it, or with
TS_QUANT_TRITON=0 in the environment when ts_quant is imported, the reference runs instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from ts_quant.codecs.base import QuantSpec
from ts_quant.errors import KernelError

DecodeOut = Callable[[Sequence[Tensor], QuantSpec, Tensor], None]

_USE_TRITON = os.environ.get("TS_QUANT_TRITON", "1") != "0"
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def use_triton() -> bool:
    """Whether Triton is installed and not turned off."""
    return _USE_TRITON and find_spec("triton") is not None


@cache
def cuda_decoder(module: str, dtype: torch.dtype) -> DecodeOut | None:
    """The Triton decoder to outputs of `dtype`, or None where there is none.

    Args:
        module: a module that imports triton and has `decode_out(buffers, spec, out)`.
        dtype: of the output.
    """
    if not use_triton() or dtype not in _TRITON_DTYPES:
        return None
    kernel: DecodeOut = import_module(module).decode_out
    return _explain_first_failure(kernel, module)


def _explain_first_failure(kernel: DecodeOut, module: str) -> DecodeOut:
    """`kernel`, with an error of its first call explained: that is when Triton compiles it."""
    worked = False

    def decode_out(buffers: Sequence[Tensor], spec: QuantSpec, out: Tensor) -> None:
        nonlocal worked
        try:
            kernel(buffers, spec, out)
        except Exception as error:
            if worked:
                raise
            raise KernelError(
                f"the Triton kernel of {module} did not run on {out.device} "
                f"({type(error).__name__}: {error}). Triton needs a C compiler at run time "
                f"(for example: apt-get install gcc) and a supported GPU; set TS_QUANT_TRITON=0 "
                f"to decode with plain PyTorch instead, more slowly"
            ) from error
        worked = True

    return decode_out
