"""Cross-entropy of an output layer without its logits: operators and the public function.

With a frozen output layer (a LoRA fine-tune) hidden's gradient is computed in the forward pass,
chunk by chunk, while the chunk's logits are there: two matmuls, where recomputing them in backward
takes three. It is kept unscaled, N x D values, instead of hidden and the weight, to which nothing
refers afterwards; backward multiplies it by the upstream gradient and rounds once.

With a trained output layer the logits are computed again in backward (`_logprobs`): four matmuls
instead of three, but no V x D gradient waits in memory, nor a scaled copy of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ts_kernels._checks import check_head, check_options, check_targets
from ts_kernels._chunks import Options, walk_chunks
from ts_kernels._heads import DenseHead, SubclassHead, Wanted, is_plain
from ts_kernels._library import define_op
from ts_kernels._logprobs import token_logprobs
from ts_kernels._precision import compute_dtype, matmul_dtype, scaled, without_autocast
from ts_kernels._targets import count_targets, divisor

_SCHEMA = (
    "frozen_head_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, "
    "int chunk_size, int ignore_index, float? softcap, ScalarType compute_dtype, "
    "bool want_hidden) -> (Tensor, Tensor)"
)


def _implementation(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk_size: int,
    ignore_index: int,
    softcap: float | None,
    compute_dtype: torch.dtype,
    want_hidden: bool,
) -> tuple[Tensor, Tensor]:
    """(loss sum, its gradient by hidden or a size of 0)."""
    wanted = Wanted(want_hidden, False, False)
    with without_autocast(hidden):
        rows = walk_chunks(
            hidden,
            DenseHead(weight, bias, compute_dtype, wanted),
            weight.shape[0],
            targets,
            Options(chunk_size, ignore_index, softcap),
            wanted,
            matmul_dtype(hidden, compute_dtype),
        )
        gradient = hidden.new_empty(0) if rows.hidden_grad is None else rows.hidden_grad
        return rows.losses.sum(), gradient


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk_size: int,
    ignore_index: int,
    softcap: float | None,
    compute_dtype: torch.dtype,
    want_hidden: bool,
) -> tuple[Tensor, Tensor]:
    loss_dtype = torch.promote_types(torch.float32, compute_dtype)
    if not want_hidden:
        return hidden.new_empty((), dtype=loss_dtype), hidden.new_empty(0)
    return (
        hidden.new_empty((), dtype=loss_dtype),
        hidden.new_empty(hidden.shape, dtype=matmul_dtype(hidden, compute_dtype)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, gradient = output
    ctx.mark_non_differentiable(gradient)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gradient)
    ctx.hidden_dtype = inputs[0].dtype
    ctx.wanted = inputs[8]


def _backward(ctx: Any, loss_grad: Tensor | None, unused: Any) -> tuple[Tensor | None, ...]:
    _refuse_second_derivative()
    nothing = (None,) * 8
    if loss_grad is None or not any(ctx.needs_input_grad):
        return (None, *nothing)
    if not ctx.wanted or any(ctx.needs_input_grad[1:3]):
        raise RuntimeError(
            "ts_kernels::frozen_head_cross_entropy cannot give the gradient that is now needed. "
            "Call ts_kernels.chunked_cross_entropy, which chooses the right operator."
        )
    (gradient,) = ctx.saved_tensors
    return (scaled(gradient, loss_grad, ctx.hidden_dtype), *nothing)


define_op(_SCHEMA, _implementation, _fake, _backward, _setup_context)


class _FrozenSubclassCrossEntropy(torch.autograd.Function):
    """The same for a weight that is a tensor subclass; returns the loss sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: Options,
        want_hidden: bool,
    ) -> Tensor:
        wanted = Wanted(want_hidden, False, False)
        head = SubclassHead(weight, bias, wanted)
        rows = walk_chunks(hidden, head, weight.shape[0], targets, options, wanted, hidden.dtype)
        ctx.hidden_dtype = hidden.dtype
        ctx.save_for_backward(rows.hidden_grad)
        return rows.losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        (gradient,) = ctx.saved_tensors
        return (scaled(gradient, grads[0], ctx.hidden_dtype), *(None,) * 5)


def _refuse_second_derivative() -> None:
    """Grad mode is on in a backward pass exactly under create_graph=True.

    Nothing links the stored gradient to what it was computed from, so a second derivative would
    silently lack a term.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "the gradient of chunked_cross_entropy cannot be differentiated again, so its "
            "backward does not run with create_graph=True. For second derivatives use "
            "ts_kernels.reference.chunked_cross_entropy, which is plain PyTorch."
        )


def _loss_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: Options
) -> Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = targets.reshape(-1)
    with_grad = torch.is_grad_enabled()
    if with_grad and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return -token_logprobs(rows, weight, bias, targets, options).sum()
    want_hidden = with_grad and hidden.requires_grad
    if is_plain(weight):
        total: Tensor = torch.ops.ts_kernels.frozen_head_cross_entropy(
            rows, weight, bias, targets, *options, compute_dtype(hidden, weight), want_hidden
        )[0]
        return total
    apply: Any = _FrozenSubclassCrossEntropy.apply
    total = apply(rows, weight, bias, targets, options, want_hidden)
    return total


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    logit_softcap: float | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` against `targets`, never building the logits.

    Rows are taken `chunk_size` at a time: [chunk_size, V] logits exist at once, in the dtype in
    which hidden and weight multiply (hidden's, or autocast's). The softmax, the term of the true
    class and the loss are fp32; the logits' gradient is rounded once to the logits' dtype, as are
    the gradients of hidden, weight and bias to theirs (on the CPU, and with a weight that is a
    tensor subclass, a 16-bit hidden's is rounded once more).

    With a frozen weight and bias the gradient is computed in the forward pass and only scaled in
    backward: no gradient work for the weight, and nothing refers to it afterwards. With a trained
    one the logits are computed again in backward. Either backward may run more than once. Runs on
    the current stream.

    Args:
        hidden: [..., D], float32, bfloat16, float16 or float64; any strides; may be empty.
        weight: [V, D], the output layer's weight, or any tensor subclass that `F.linear` accepts
            (a quantized weight, say), which is then multiplied by `F.linear` alone.
        targets: [...], int64 or int32, the class of each row, or `ignore_index`.
        bias: None or [V].
        chunk_size: rows of logits to hold at a time.
        ignore_index: rows with this target count for nothing.
        reduction: "mean" divides the sum by the number of rows that count; "sum" does not.
        num_items: divides the sum instead, whatever the reduction: the number of rows that count
            in a whole accumulation window (see `count_targets`), an int or a tensor of one
            element on any device. The loss of a window is then the sum of its parts' losses,
            however the rows are split.
        logit_softcap: None, or logits become cap * tanh(logits / cap) (Gemma).

    Returns:
        0-d float32 loss (float64 for float64 inputs). With every target ignored it is 0 and so
        are its gradients, whatever the divisor.

    Raises:
        ValueError: a shape, dtype, option or target is not acceptable. A target out of range on a
            CUDA device is caught there by a device assertion, without the host waiting; the error
            shows at the next synchronization.
        NotImplementedError: the gradient is differentiated again, or (with a frozen weight)
            backward runs with create_graph=True.

    Example:
        >>> hidden = torch.randn(2, 5, 8, requires_grad=True)
        >>> weight = torch.randn(11, 8)
        >>> loss = chunked_cross_entropy(hidden, weight, torch.randint(0, 11, (2, 5)))
        >>> loss.backward()
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean' or 'sum'.")
    check_head(hidden, weight, bias)
    check_targets(targets, hidden, "targets")
    check_options(chunk_size, logit_softcap)
    total = _loss_sum(
        hidden, weight, bias, targets, Options(chunk_size, ignore_index, logit_softcap)
    )
    if num_items is not None:
        return total / divisor(num_items, total.device)
    if reduction == "sum":
        return total
    return total / count_targets(targets, ignore_index=ignore_index).clamp(min=1)
