"""Rotary position embedding: operator and the public function."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ts_kernels._backend import on_device_of, runs_eagerly, use_triton
from ts_kernels._library import define_op
from ts_kernels._rms_norm_plan import next_power_of_2
from ts_kernels._rotary_plan import rotary_plan


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions, both in one pass over memory.

        out = x * cos + turned(x) * sin         over the first R channels of each head

    Su et al., "RoFormer", 2021. `turned` maps (a, b) to (-b, a), where the pair is channels
    (i, i + R/2), as in Llama, Qwen, Mistral, Gemma and GPT-NeoX, or (2i, 2i + 1) if interleaved,
    as in GPT-J, GLM and Cohere. Channels from R on pass through (GPT-NeoX's partial rotation).

    Computed in fp32 (float64 for float64) and rounded once, where eager code rounds three times.
    Only cos and sin are kept for backward, in which they receive no gradient. Deterministic.
    Runs on the current stream.

    Args:
        q: [B, H, T, D] with `heads_dim=1`, or [B, T, H, D] with `heads_dim=2`; any strides.
            float32, bfloat16, float16 or float64.
        k: likewise, with its own number of heads; q's dtype and head size.
        cos, sin: [B, T, R], [1, T, R] or [T, R], any floating dtype; R even, at most D. Full
            tables: one value for each of the R channels, in their order.
        interleaved: which channels form a pair.
        heads_dim: where q and k have their heads.

    Returns:
        (q, k) rotated, in new tensors of q's and k's shape, dtype and (where dense) strides.

    Raises:
        ValueError: a shape, dtype or device does not fit, or cos or sin require a gradient.

    Example:
        >>> q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
        >>> angles = torch.randn(5, 4).repeat(1, 2)
        >>> q, k = rotary(q, k, angles.cos(), angles.sin())
    """
    if heads_dim not in (1, 2):
        raise ValueError(f"heads_dim is {heads_dim!r}; expected 1 or 2.")
    if heads_dim == 2 and q.dim() == 4 and k.dim() == 4:
        q, k = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)
    _check(q, k, cos, sin)
    cos, sin = (t if t.dim() == 3 else t.unsqueeze(0) for t in (cos, sin))
    if not torch.compiler.is_compiling() and runs_eagerly(q, k, cos, sin):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            apply: Any = _EagerRotary.apply
            pair: tuple[Tensor, Tensor] = apply(q, k, cos, sin, interleaved)
            return pair
        return _rotate(q, k, cos, sin, interleaved, False)
    pair = torch.ops.ts_kernels.rotary(q, k, cos, sin, interleaved, False)
    return pair


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; expected [B, H, T, D] and "
            f"[B, H', T, D] (with heads_dim=2: [B, T, H, D] and [B, T, H', D])."
        )
    if not q.is_floating_point() or q.dtype != k.dtype:
        raise ValueError(f"q is {q.dtype} and k {k.dtype}; expected one floating dtype.")
    batch, tokens, size = q.shape[0], q.shape[2], q.shape[3]
    if (
        cos.shape != sin.shape
        or cos.dim() not in (2, 3)
        or cos.shape[-2] != tokens
        or (cos.dim() == 3 and cos.shape[0] not in (1, batch))
        or cos.shape[-1] % 2
        or not 0 < cos.shape[-1] <= size
    ):
        raise ValueError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; expected [T, R], "
            f"[1, T, R] or [B, T, R] with B={batch}, T={tokens} and an even R of at most {size}."
        )
    if not (cos.is_floating_point() and sin.is_floating_point()):
        raise ValueError(f"cos is {cos.dtype} and sin {sin.dtype}; expected floating dtypes.")
    if not q.device == k.device == cos.device == sin.device:
        raise ValueError(
            f"q, k, cos, sin are on {q.device}, {k.device}, {cos.device}, {sin.device}; expected "
            f"one device."
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError(
            "cos or sin requires a gradient, which rotary does not give. Detach them, or call "
            "ts_kernels.reference.rotary."
        )


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    """The rotation, or (backward) its transpose, which is its gradient."""
    if (q.numel() or k.numel()) and use_triton(q, k, cos, sin):
        return _launch(q, k, cos, sin, interleaved, backward)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (
        _rotate_one(q, cos, sin, interleaved, backward),
        _rotate_one(k, cos, sin, interleaved, backward),
    )


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    size = cos.shape[-1]
    if interleaved:
        first, second = slice(0, size, 2), slice(1, size, 2)
    else:
        first, second = slice(0, size // 2), slice(size // 2, size)
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x[..., first].to(wide), x[..., second].to(wide)
    out = torch.empty_like(x)
    if backward:
        out[..., first] = (a * cos[..., first] + b * sin[..., second]).to(x.dtype)
        out[..., second] = (b * cos[..., second] - a * sin[..., first]).to(x.dtype)
    else:
        out[..., first] = (a * cos[..., first] - b * sin[..., first]).to(x.dtype)
        out[..., second] = (b * cos[..., second] + a * sin[..., second]).to(x.dtype)
    out[..., size:] = x[..., size:]
    return out


def _fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.transposed = inputs
    ctx.save_for_backward(cos, sin)


def _autograd(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.ts_kernels.rotary(
        dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.transposed
    )
    want_q, want_k = ctx.needs_input_grad[:2]
    return grads[0] if want_q else None, grads[1] if want_k else None, None, None, None, None


define_op(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool backward) "
    "-> (Tensor, Tensor)",
    _rotate,
    _fake,
    _autograd,  # linear in q and k, so it may be differentiated again
    _setup_context,
)


class _EagerRotary(torch.autograd.Function):
    """The operator's implementation and autograd, called without torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.transposed = interleaved, False
        return _rotate(q, k, cos, sin, interleaved, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not runs_eagerly(*grads):
            return _autograd(ctx, *grads)[:5]
        (dq, dk), (cos, sin) = grads, ctx.saved_tensors
        dq, dk = _rotate(dq, dk, cos, sin, ctx.interleaved, True)
        want_q, want_k = ctx.needs_input_grad[:2]
        return dq if want_q else None, dk if want_k else None, None, None, None


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    results = _fake(q, k, cos, sin, interleaved, backward)
    q, k, cos, sin = map(_unit_stride, (q, k, cos, sin))
    q_out, k_out = (t if t.stride(-1) == 1 else t.new_empty(t.shape) for t in results)
    batch, q_heads, tokens, size = q.shape
    k_heads, rotary_size = k.shape[1], cos.shape[-1]
    pairs = next_power_of_2(rotary_size // 2)
    whole_16_bit = q.itemsize == 2 and rotary_size == size
    plan = rotary_plan(q_heads, k_heads, pairs, whole_16_bit)
    q_groups, k_groups = -(-q_heads // plan.heads), -(-k_heads // plan.heads)
    cos_batch, sin_batch = (0 if t.shape[0] == 1 else t.stride(0) for t in (cos, sin))
    strides = (t.stride()[:3] for t in (q, k, q_out, k_out))
    arguments = (
        *(q, k, q_out, k_out, cos, sin),
        *chain.from_iterable(strides),
        *(cos_batch, cos.stride(1), sin_batch, sin.stride(1)),
        *(tokens, q_heads, k_heads),
    )
    options = {
        "ROTARY": rotary_size,
        "HEAD_SIZE": size,
        "TAIL": next_power_of_2(size - rotary_size) if size > rotary_size else 0,
        "PAIRS": pairs,
        "INTERLEAVED": interleaved,
        "BACKWARD": backward,
        "HEADS": plan.heads,
        "num_warps": plan.num_warps,
    }
    with on_device_of(q):
        if plan.per_token:
            from ts_kernels.triton_kernels.rotary_tokens import rotary_tokens_kernel

            whole = q_heads % plan.heads == 0 and k_heads % plan.heads == 0
            rotary_tokens_kernel[(batch * tokens,)](
                *arguments,
                Q_GROUPS=q_groups,
                K_GROUPS=k_groups,
                FULL=whole and rotary_size == 2 * pairs,
                **options,
            )
        else:
            from ts_kernels.triton_kernels.rotary import rotary_kernel

            rotary_kernel[(batch * tokens, q_groups + k_groups)](*arguments, **options)
    for result, out in zip(results, (q_out, k_out), strict=True):
        if out is not result:  # its channels are not neighbours in memory
            result.copy_(out)
    return results


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
