"""y = x @ W.T + bias on FP8 tensor cores.

    layout of W           operands                                             needs
    "tile" 1 x K (row)    x by row, W by row as stored                         sm_89, sm_90, ...
    "e8m0" (blocks of 32) x by row, W turned to row scales first               sm_89, sm_90, ...
    "tile" 128 x 128      x by 128 columns, W as stored (as DeepSeek trains)   sm_90, cuBLASLt 12.9

A weight in blocks of 32 is turned to one power-of-two scale per row, the largest of the row's
blocks; that costs one read and one write of a byte per weight, less than decoding to bf16, and
changes only values that are below e4m3's normal range of 2^-6 relative to that scale. The product
is summed in fp32 and rounded once to bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ts_quant.codecs import tables
from ts_quant.codecs.backend import use_triton
from ts_quant.codecs.base import QuantSpec
from ts_quant.codecs.lookup import e4m3_values
from ts_quant.codecs.operators import eager
from ts_quant.matmul.rows import GROUP

ROWS, GROUPS = "rows", "groups"
"""How a path wants its activations: see `ts_quant.matmul.rows`."""

GROUPS_PADDED = "groups padded"
"""What `supported` is asked for GROUPS where K / 128 is no multiple of 4, so that the weight's
scales are padded; it is tried by itself."""


def layout_kind(spec: QuantSpec, columns: int) -> tuple[str, int, int] | None:
    """How x is quantized for a weight of so many columns that is stored so, and what its rows and
    columns must be multiples of; None where no product takes that layout."""
    if spec.codec != "fp8":
        return None
    if spec.scales == "e8m0":
        return ROWS, 16, 32
    if (spec.rows, spec.block_size) == (1, columns):
        return ROWS, 16, 16
    return (GROUPS, GROUP, GROUP) if (spec.rows, spec.block_size) == (GROUP, GROUP) else None


def activation_kind(spec: QuantSpec, shape: Sequence[int], n_tokens: int) -> str | None:
    """How x must be quantized for a product with such a weight, or None where there is none."""
    n, k = shape
    found = layout_kind(spec, k)
    if found is None:
        return None
    kind, rows, columns = found
    if n % rows or k % columns or (kind == GROUPS and n_tokens % 4):
        return None
    return kind


_TRIED: dict[tuple[torch.device, str], bool] = {}


def supported(device: torch.device, kind: str) -> bool:
    """Whether this device and this build of torch have the product; tried once per device.

    False inside a CUDA graph capture if it has not been tried before, as a trial would end it.
    """
    found = _TRIED.get((device, kind))
    if found is not None:
        return found
    if device.type != "cuda" or torch.version.hip is not None or not use_triton():
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    oldest = (8, 9) if kind == ROWS else (9, 0)
    new_enough = torch.cuda.get_device_capability(device) >= oldest
    _TRIED[device, kind] = new_enough and _trial(device, kind)
    return _TRIED[device, kind]


def needed(kind: str, k: int) -> str:
    """What a product with that kind of activation and K columns needs of the device."""
    return GROUPS_PADDED if kind == GROUPS and k // GROUP % 4 else kind


def _trial(device: torch.device, kind: str) -> bool:
    m, n, k = (8, 256, 384) if kind == GROUPS_PADDED else (512, 512, 512)
    x = torch.zeros(m, k, dtype=torch.float8_e4m3fn, device=device)
    w = torch.zeros(n, k, dtype=torch.float8_e4m3fn, device=device)
    ones = torch.ones
    try:
        if kind == ROWS:
            scaled_mm_rows(x, w, ones(m, 1, device=device), ones(1, n, device=device), None)
        else:
            scales = ones(k // GROUP, m, device=device), ones(n // GROUP, k // GROUP, device=device)
            _scaled_mm_groups(x, w, *scales)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return False  # this build has no such kernel: decode instead
    return True


def scaled_mm_rows(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None
) -> Tensor:
    y: Tensor = torch._scaled_mm(
        x, w.t(), scale_a=x_scale, scale_b=w_scale, bias=bias, out_dtype=torch.bfloat16
    )
    return y


def _scaled_mm_groups(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """x_scale [K / 128, M]; w_scale [N / 128, K / 128], its rows padded to a multiple of 4."""
    functional: Any = torch.nn.functional
    pad = -w_scale.shape[1] % 4
    if pad:
        w_scale = functional.pad(w_scale, (0, pad))
    kinds = functional.ScalingType
    y: Tensor = functional.scaled_mm(
        x,
        w.t(),
        x_scale.t(),
        kinds.BlockWise1x128,
        w_scale.t(),
        kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return y


def blocks_to_rows(codes: Tensor, byte: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """A weight in blocks of 32 as e4m3 [N, K] with fp32 powers of two [1, N] as row scales."""
    if codes.is_cuda and use_triton():
        from ts_quant.matmul import rows_triton

        return rows_triton.blocks_to_rows(codes, byte, n, k)
    exponent = byte.view(n, k // 32).to(torch.int32)
    top = exponent.amax(dim=1, keepdim=True)
    down = (exponent - top).add_(127).clamp_(min=0)
    factor = torch.index_select(tables.e8m0(codes.device), 0, down.view(-1)).view(down.shape)
    values = e4m3_values(codes.view(n, k // 32, 32)) * factor[:, :, None]
    scale = torch.index_select(tables.e8m0(codes.device), 0, top.view(-1))
    return values.view(n, k).to(torch.float8_e4m3fn), scale.view(1, n)


def _linear(
    x: Tensor,
    x_scale: Tensor,
    codes: Tensor,
    scale: Tensor,
    blocks_of_32: bool,
    grouped: bool,
    bias: Tensor | None,
) -> Tensor:
    n, k = codes.numel() // x.shape[1], x.shape[1]
    x = x.view(torch.float8_e4m3fn)
    if grouped:
        w = codes.view(n, k).view(torch.float8_e4m3fn)
        y = _scaled_mm_groups(x, w, x_scale, scale.view(n // GROUP, k // GROUP))
        return y if bias is None else y + bias
    if blocks_of_32:
        w, w_scale = blocks_to_rows(codes, scale, n, k)
    else:
        w, w_scale = codes.view(n, k).view(torch.float8_e4m3fn), scale.view(1, n)
    return scaled_mm_rows(x, w, x_scale, w_scale, bias)


def linear_reference(
    x: Tensor,
    x_scale: Tensor,
    codes: Tensor,
    scale: Tensor,
    blocks_of_32: bool,
    grouped: bool,
    bias: Tensor | None,
) -> Tensor:
    """The same product in fp32 on any device, rounded once to bf16."""
    n, k = codes.numel() // x.shape[1], x.shape[1]
    if blocks_of_32:
        w, w_scale = blocks_to_rows(codes, scale, n, k)
        dense = w.float() * w_scale.view(n, 1)
    else:
        tiles = scale.view(n // GROUP, k // GROUP) if grouped else scale.view(n, 1)
        spread = tiles.repeat_interleave(n // tiles.shape[0], 0)
        dense = e4m3_values(codes.view(n, k)) * spread.repeat_interleave(k // tiles.shape[1], 1)
    rows = x_scale.t().repeat_interleave(GROUP, 1) if grouped else x_scale
    y = (e4m3_values(x) * rows) @ dense.t()
    return (y if bias is None else y + bias.float()).to(torch.bfloat16)


def _linear_fake(
    x: Tensor,
    x_scale: Tensor,
    codes: Tensor,
    scale: Tensor,
    blocks_of_32: bool,
    grouped: bool,
    bias: Tensor | None,
) -> Tensor:
    return x.new_empty((x.shape[0], codes.numel() // x.shape[1]), dtype=torch.bfloat16)


torch.library.define(
    "ts_quant::fp8_linear",
    "(Tensor x, Tensor x_scale, Tensor codes, Tensor scale, bool blocks_of_32, bool grouped, "
    "Tensor? bias) -> Tensor",
)
torch.library.impl("ts_quant::fp8_linear", "CompositeExplicitAutograd", linear_reference)
torch.library.impl("ts_quant::fp8_linear", "CUDA", _linear)
torch.library.register_fake("ts_quant::fp8_linear", _linear_fake)


def fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    buffers: Sequence[Tensor],
    spec: QuantSpec,
    kind: str,
    bias: Tensor | None,
) -> Tensor:
    """bf16 [M, N] of quantized activations and an fp8 weight's buffers."""
    codes, scale = buffers
    layout = spec.scales == "e8m0", kind == GROUPS
    if eager(x) and eager(codes) and not torch.is_grad_enabled():
        run = _linear if x.is_cuda else linear_reference
        return run(x, x_scale, codes, scale, *layout, bias)
    y: Tensor = torch.ops.ts_quant.fp8_linear(x, x_scale, codes, scale, *layout, bias)
    return y
