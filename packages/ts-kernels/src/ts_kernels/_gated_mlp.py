"""The gate of a gated MLP: operators and the public function."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ts_kernels._backend import on_device_of, runs_eagerly, use_triton
from ts_kernels._library import define_op, not_twice_differentiable
from ts_kernels._recipes import note

ACTIVATIONS = ("silu", "gelu_tanh")
_BLOCK = 2048


def gated_mlp(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up, the middle of a gated MLP, keeping only its two inputs for backward.

        down_proj(gated_mlp(gate_proj(x), up_proj(x)))

    Shazeer, "GLU variants improve transformer", 2020. Computed in fp32 (float64 for float64) and
    rounded once, forward and backward, where eager code rounds the activation first. Halves of
    one wider tensor (`a.chunk(2, -1)`) are read where they lie. Deterministic. Runs on the
    current stream.

    Args:
        gate, up: [..., F], same shape, dtype and device; any strides; may be empty. float32,
            bfloat16, float16 or float64.
        activation: "silu" (Llama, Qwen, Mistral), or "gelu_tanh" (Gemma), GELU's tanh form.

    Returns:
        Contiguous [..., F] of the inputs' dtype.

    Raises:
        ValueError: the two differ, are not floating, or the activation is unknown.
        NotImplementedError: the gradient is differentiated again.

    Example:
        >>> gate, up = torch.randn(2, 3, 8)
        >>> out = gated_mlp(gate, up)
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")
    if not gate.is_floating_point() or (gate.shape, gate.dtype, gate.device) != (
        up.shape,
        up.dtype,
        up.device,
    ):
        raise ValueError(
            f"gate is {tuple(gate.shape)}, {gate.dtype} on {gate.device} and up "
            f"{tuple(up.shape)}, {up.dtype} on {up.device}; expected the same shape, floating "
            f"dtype and device."
        )
    gelu = activation == "gelu_tanh"
    if not torch.compiler.is_compiling() and runs_eagerly(gate, up):
        if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
            apply: Any = _EagerGatedMLP.apply
            out: Tensor = apply(gate, up, gelu)
            return note(out, functools.partial(_forward, gelu=gelu), gate, up)
        return _forward(gate, up, gelu)
    out = torch.ops.ts_kernels.gated_mlp(gate, up, gelu)
    return out


def _forward(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    if gate.numel() and use_triton(gate, up):
        return _launch_forward(gate, up, gelu)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    active = F.gelu(wide, approximate="tanh") if gelu else F.silu(wide)
    return (active * up).to(gate.dtype).contiguous()


def _forward_fake(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    return gate.new_empty(gate.shape)


def _backward(dout: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    if gate.numel() and use_triton(gate, up, dout):
        return _launch_backward(dout, gate, up, gelu)
    wide_dtype = torch.promote_types(gate.dtype, torch.float32)
    g, d = gate.to(wide_dtype), dout.to(wide_dtype)
    if gelu:
        active = F.gelu(g, approximate="tanh")
        dgate = torch.ops.aten.gelu_backward(d * up, g, approximate="tanh")
    else:
        active = F.silu(g)
        dgate = torch.ops.aten.silu_backward(d * up, g)
    return dgate.to(gate.dtype).contiguous(), (d * active).to(up.dtype).contiguous()


def _backward_fake(dout: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.gelu = inputs
    ctx.save_for_backward(gate, up)


def _autograd(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dgate, dup = torch.ops.ts_kernels.gated_mlp_backward(dout, *ctx.saved_tensors, ctx.gelu)
    return _picked(ctx, dgate, dup)


def _picked(ctx: Any, dgate: Tensor, dup: Tensor) -> tuple[Tensor | None, ...]:
    want_gate, want_up, _ = ctx.needs_input_grad
    return dgate if want_gate else None, dup if want_up else None, None


define_op(
    "gated_mlp(Tensor gate, Tensor up, bool gelu) -> Tensor",
    _forward,
    _forward_fake,
    _autograd,
    _setup_context,
)
define_op(
    "gated_mlp_backward(Tensor dout, Tensor gate, Tensor up, bool gelu) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
    not_twice_differentiable("gated_mlp", "ts_kernels.reference.gated_mlp"),
)


class _EagerGatedMLP(torch.autograd.Function):
    """The operator's implementation and autograd, called without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return _forward(gate, up, gelu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not runs_eagerly(grads[0]):
            return _autograd(ctx, grads[0])  # its operator refuses a second derivative
        gate, up = ctx.saved_tensors
        return _picked(ctx, *_backward(grads[0], gate, up, ctx.gelu))


def _as_rows(*tensors: Tensor) -> tuple[list[Tensor], int, int]:
    """The tensors as [rows, columns] with unit column stride; one long row if all contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return list(tensors), 1, tensors[0].numel()
    columns = tensors[0].shape[-1]
    flat = [tensor.reshape(-1, columns) for tensor in tensors]
    rows = [t if t.stride(1) == 1 or columns == 1 else t.contiguous() for t in flat]
    return rows, rows[0].shape[0], columns


def _launch_forward(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    from ts_kernels.triton_kernels.gated_mlp import gated_mlp_forward_kernel

    out = _forward_fake(gate, up, gelu)
    (gate2, up2), rows, columns = _as_rows(gate, up)
    with on_device_of(gate):
        gated_mlp_forward_kernel[(rows * -(-columns // _BLOCK),)](
            gate2,
            up2,
            out,
            0 if rows == 1 else gate2.stride(0),
            0 if rows == 1 else up2.stride(0),
            columns,
            GELU=gelu,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return out


def _launch_backward(dout: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    from ts_kernels.triton_kernels.gated_mlp import gated_mlp_backward_kernel

    dgate, dup = _backward_fake(dout, gate, up, gelu)
    (dout2, gate2, up2), rows, columns = _as_rows(dout, gate, up)
    with on_device_of(gate):
        gated_mlp_backward_kernel[(rows * -(-columns // _BLOCK),)](
            dout2,
            gate2,
            up2,
            dgate,
            dup,
            *(0 if rows == 1 else tensor.stride(0) for tensor in (dout2, gate2, up2)),
            columns,
            GELU=gelu,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return dgate, dup
