"""Log-probabilities of labels under an output layer: operators and the public function.

Each row's gradient is scaled by what comes from above, so the logits are computed again in
backward, chunk by chunk, and the scale is applied in fp32 where their gradient is formed. Kept in
between: hidden and the weight themselves, nothing of their size besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ts_kernels._adapted_head import (
    AdaptedHead,
    LoraAdapter,
    adapter_grad,
    beside,
    check_adapter,
)
from ts_kernels._checks import check_head, check_options, check_targets
from ts_kernels._chunks import Options, walk_chunks
from ts_kernels._heads import DenseHead, Head, SubclassHead, Wanted, is_plain, settled
from ts_kernels._library import define_op, not_twice_differentiable
from ts_kernels._precision import compute_dtype, without_autocast
from ts_kernels._targets import shifted

_NOTHING = Wanted(False, False, False)

_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_b, Tensor targets, int chunk_size, "
    "int ignore_index, float? softcap, ScalarType compute_dtype"
)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_b: Tensor | None,
    targets: Tensor,
    chunk_size: int,
    ignore_index: int,
    softcap: float | None,
    compute_dtype: torch.dtype,
) -> Tensor:
    with without_autocast(hidden):
        head = _adapted(DenseHead(weight, bias, compute_dtype, _NOTHING), lora_b, False)
        options = Options(chunk_size, ignore_index, softcap)
        rows = walk_chunks(hidden, head, weight.shape[0], targets, options, _NOTHING, compute_dtype)
        return rows.losses.neg_()


def _forward_fake(hidden: Tensor, *unused: Any) -> Tensor:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.new_empty(hidden.shape[:1], dtype=dtype)


def _backward_implementation(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_b: Tensor | None,
    targets: Tensor,
    chunk_size: int,
    ignore_index: int,
    softcap: float | None,
    compute_dtype: torch.dtype,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
    want_lora_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = Wanted(want_hidden, want_weight, want_bias, want_lora_b)
    with without_autocast(hidden):
        one_chunk = hidden.shape[0] <= chunk_size
        dense = DenseHead(weight, bias, compute_dtype, wanted, one_chunk)
        head = _adapted(dense, lora_b, want_lora_b)
        options = Options(chunk_size, ignore_index, softcap)
        rows = walk_chunks(
            hidden, head, weight.shape[0], targets, options, wanted, hidden.dtype, grad.neg()
        )
        nothing = hidden.new_empty(0)
        b_grad = adapter_grad(head, lora_b) if want_lora_b else None
        return (
            nothing if rows.hidden_grad is None else rows.hidden_grad,
            nothing.clone() if head.weight_grad is None else head.weight_grad.to(weight.dtype),
            nothing.clone()
            if head.bias_grad is None or bias is None
            else head.bias_grad.to(bias.dtype),
            nothing.clone() if b_grad is None or lora_b is None else b_grad.to(lora_b.dtype),
        )


def _adapted(head: Head, lora_b: Tensor | None, wants_b: bool) -> Head:
    return head if lora_b is None else AdaptedHead(head, lora_b, wants_b)


def _backward_fake(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_b: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want_hidden, want_weight, want_bias, want_lora_b = rest[-4:]
    return (
        hidden.new_empty(hidden.shape if want_hidden else 0),
        weight.new_empty(weight.shape) if want_weight else hidden.new_empty(0),
        bias.new_empty(bias.shape) if want_bias and bias is not None else hidden.new_empty(0),
        lora_b.new_empty(lora_b.shape)
        if want_lora_b and lora_b is not None
        else hidden.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = Wanted(*ctx.needs_input_grad[:4])
    grads = torch.ops.ts_kernels.token_logprobs_backward(
        grad, *ctx.saved_tensors, *ctx.options, *wanted
    )
    picked = [g if want else None for g, want in zip(grads, wanted, strict=True)]
    return (*picked, *([None] * 5))


define_op(
    f"token_logprobs_backward(Tensor grad, {_ARGUMENTS}, bool want_hidden, bool want_weight, "
    "bool want_bias, bool want_lora_b) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_implementation,
    _backward_fake,
    not_twice_differentiable("sequence_logprobs", "ts_kernels.reference.sequence_logprobs"),
)
define_op(
    f"token_logprobs({_ARGUMENTS}) -> Tensor",
    _forward,
    _forward_fake,
    _backward,
    _setup_context,
)


class _SubclassLogprobs(torch.autograd.Function):
    """The same for a weight that is a tensor subclass.

    The weight object itself is kept, and its buffers are read afresh in backward: they may have
    moved in between.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_b: Tensor | None,
        targets: Tensor,
        options: Options,
    ) -> Tensor:
        head = _adapted(SubclassHead(weight, bias, _NOTHING), lora_b, False)
        rows = walk_chunks(hidden, head, weight.shape[0], targets, options, _NOTHING, hidden.dtype)
        device_type = hidden.device.type
        ctx.autocast = (
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )
        ctx.save_for_backward(hidden, targets, lora_b)
        ctx.weight, ctx.bias, ctx.options = weight, bias, options
        return rows.losses.neg_()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, lora_b = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        enabled, dtype = ctx.autocast
        wanted = Wanted(*ctx.needs_input_grad[:4])
        head = _adapted(SubclassHead(weight, bias, Wanted(*wanted[:3])), lora_b, wanted.lora_b)
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=enabled):
            rows = walk_chunks(
                hidden,
                head,
                weight.shape[0],
                targets,
                ctx.options,
                wanted,
                hidden.dtype,
                grads[0].neg(),
            )
        weight_grad, bias_grad = head.weight_grad, head.bias_grad
        b_grad = adapter_grad(head, lora_b) if wanted.lora_b else None
        return (
            rows.hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None if b_grad is None else b_grad.to(lora_b.dtype),
            None,
            None,
        )


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: Options,
    lora: LoraAdapter | None,
) -> Tensor:
    """[N] log-probability of each target, 0 for those ignored; hidden [N, D], targets [N]."""
    weight = settled(weight)
    bias = None if bias is None else settled(bias)
    lora_b = None
    if lora is not None:
        hidden, lora_b = beside(hidden, lora), lora.b
    if is_plain(weight):
        tokens: Tensor = torch.ops.ts_kernels.token_logprobs(
            hidden, weight, bias, lora_b, targets, *options, compute_dtype(hidden, weight)
        )
        return tokens
    apply: Any = _SubclassLogprobs.apply
    tokens = apply(hidden, weight, bias, lora_b, targets, options)
    return tokens


def sequence_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    shift: bool = True,
    average: bool = False,
    logit_softcap: float | None = None,
    lora: LoraAdapter | None = None,
) -> Tensor:
    """Log-probability of each sequence's labels, without building the logits.

    Differentiable by hidden, weight, bias and adapter; each sequence may have its own upstream
    gradient. The logits are computed again in backward, [chunk_size, V] at a time.

    Args:
        hidden: [B, T, D], float32, bfloat16, float16 or float64.
        weight: [V, D], or a tensor subclass as in `chunked_cross_entropy`.
        labels: [B, T] integer; `ignore_index` counts for nothing.
        bias: None or [V].
        chunk_size: rows of logits to hold at a time.
        ignore_index: the label of positions to leave out.
        shift: the label at t + 1 is predicted at t (True), or the label at t (False).
        average: divide by the number of labels that count, per sequence.
        logit_softcap: None, or logits become cap * tanh(logits / cap).
        lora: None, or a LoRA adapter on the output layer as in `chunked_cross_entropy`.

    Returns:
        [B] float32 (float64 for float64 inputs); 0 for a sequence in which no label counts.

    Raises:
        ValueError: as for `chunked_cross_entropy`.
        NotImplementedError: the gradient is differentiated again.
    """
    check_head(hidden, weight, bias)
    if hidden.dim() != 3:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; expected [B, T, D].")
    check_targets(labels, hidden, "labels")
    check_options(chunk_size, logit_softcap)
    if lora is not None:
        check_adapter(lora, hidden, weight)
    targets = shifted(labels, ignore_index) if shift else labels
    options = Options(chunk_size, ignore_index, logit_softcap)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    tokens = token_logprobs(rows, weight, bias, flat, options, lora)
    sums = tokens.reshape(labels.shape).sum(dim=-1)
    if not average:
        return sums
    return sums / (targets != ignore_index).sum(dim=-1).clamp(min=1)
