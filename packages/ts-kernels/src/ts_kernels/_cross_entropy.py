"""Cross-entropy of an output layer without its logits: operators and the public function.

The gradients are computed in the forward pass, chunk by chunk, while the chunk's logits are there:
three matmuls in all (two when the weight is frozen) where recomputing in backward takes four
(three). They are kept unscaled, in place of `hidden`, which need not be saved; backward only
multiplies them by the upstream gradient. What it costs, from the forward to the backward of the
loss: N x D values of hidden's dtype, and V x D float32 values if the weight is trained (bf16 ones
if all rows fit in one chunk and the weight is bf16).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ts_kernels._checks import check_head, check_options, check_targets
from ts_kernels._chunks import Options, walk_chunks
from ts_kernels._heads import DenseHead, SubclassHead, Wanted, is_plain, weight_grad_dtype
from ts_kernels._library import define_op
from ts_kernels._precision import compute_dtype, scaled, without_autocast

_SCHEMA = (
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, "
    "int chunk_size, int ignore_index, float? softcap, ScalarType compute_dtype, "
    "bool want_hidden, bool want_weight, bool want_bias) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss sum, then its gradients by hidden, weight and bias; a size of 0 if not wanted)."""
    wanted = Wanted(want_hidden, want_weight, want_bias)
    with without_autocast(hidden):
        grad_dtype = weight_grad_dtype(compute_dtype, hidden.shape[0], chunk_size)
        head = DenseHead(weight, bias, compute_dtype, wanted, grad_dtype)
        rows = walk_chunks(
            hidden,
            head,
            weight.shape[0],
            targets,
            Options(chunk_size, ignore_index, softcap),
            wanted,
            compute_dtype,
        )
        none = hidden.new_empty(0)
        return (
            rows.losses.sum(),
            none if rows.hidden_grad is None else rows.hidden_grad,
            hidden.new_empty(0) if head.weight_grad is None else head.weight_grad,
            hidden.new_empty(0) if head.bias_grad is None else head.bias_grad,
        )


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
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = _sum_dtype(compute_dtype)
    grad_dtype = weight_grad_dtype(compute_dtype, hidden.shape[0], chunk_size)
    return (
        hidden.new_empty((), dtype=_sum_dtype(hidden.dtype)),
        hidden.new_empty(hidden.shape, dtype=compute_dtype) if want_hidden else hidden.new_empty(0),
        weight.new_empty(weight.shape, dtype=grad_dtype) if want_weight else hidden.new_empty(0),
        weight.new_empty(weight.shape[:1], dtype=sums) if want_bias else hidden.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias = inputs[:3]
    _, hidden_grad, weight_grad, bias_grad = output
    ctx.mark_non_differentiable(hidden_grad, weight_grad, bias_grad)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
    ctx.wanted = Wanted(*inputs[8:11])
    ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)


def _backward(ctx: Any, loss_grad: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    _refuse_second_derivative()
    results: list[Tensor | None] = [None] * 11
    if loss_grad is None:
        return tuple(results)
    for position, gradient in enumerate(ctx.saved_tensors):
        if not ctx.needs_input_grad[position]:
            continue
        if not ctx.wanted[position]:
            raise RuntimeError(
                "ts_kernels::linear_cross_entropy was called without asking for a gradient that "
                "is now needed. Call ts_kernels.chunked_cross_entropy, which asks for the right "
                "ones."
            )
        results[position] = scaled(gradient, loss_grad, ctx.dtypes[position])
    return tuple(results)


define_op(_SCHEMA, _implementation, _fake, _backward, _setup_context)


class _SubclassCrossEntropy(torch.autograd.Function):
    """The same for a weight that is a tensor subclass; returns the loss sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: Options,
        wanted: Wanted,
    ) -> Tensor:
        head = SubclassHead(weight, bias, wanted)
        rows = walk_chunks(hidden, head, weight.shape[0], targets, options, wanted, hidden.dtype)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(rows.hidden_grad, head.weight_grad, head.bias_grad)
        return rows.losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        (loss_grad,) = grads
        results = [
            None if gradient is None else scaled(gradient, loss_grad, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*results, None, None, None)


def _refuse_second_derivative() -> None:
    """Grad mode is on in a backward pass exactly under create_graph=True.

    Nothing links the stored gradients to what they were computed from, so a second derivative
    would silently lack a term.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "the gradient of chunked_cross_entropy cannot be differentiated again, so its "
            "backward does not run with create_graph=True. For second derivatives use "
            "ts_kernels.reference.chunked_cross_entropy, which is plain PyTorch."
        )


def wanted_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Wanted:
    """The gradients that autograd would ask for here and now."""
    if not torch.is_grad_enabled():
        return Wanted(False, False, False)
    return Wanted(
        hidden.requires_grad,
        weight.requires_grad,
        bias is not None and bias.requires_grad,
    )


def _loss_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: Options
) -> Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = targets.reshape(-1)
    wanted = wanted_gradients(hidden, weight, bias)
    if not is_plain(weight):
        apply: Any = _SubclassCrossEntropy.apply
        loss: Tensor = apply(rows, weight, bias, targets, options, wanted)
        return loss
    results = torch.ops.ts_kernels.linear_cross_entropy(
        rows, weight, bias, targets, *options, compute_dtype(hidden, weight), *wanted
    )
    total: Tensor = results[0]
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
    class and the loss are fp32; the logits' gradient is rounded once to the logits' dtype, hidden's
    gradient once after its matmul and once after scaling, the weight's is summed in fp32.
    Gradients are computed in the forward pass (only those that autograd will need) and scaled in
    backward, which may run more than once. A frozen weight costs no gradient work, and nothing
    refers to it after the forward pass.

    Args:
        hidden: [..., D], float32, bfloat16, float16 or float64; any strides; may be empty.
        weight: [V, D], the output layer's weight, or any tensor subclass that `F.linear` accepts
            (a quantized weight, say), which is then multiplied by `F.linear` alone.
        targets: [...], integer class of each row, or `ignore_index`.
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
        NotImplementedError: backward runs with create_graph=True.

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
        return total / _divisor(num_items, total.device)
    if reduction == "sum":
        return total
    return total / count_targets(targets, ignore_index=ignore_index).clamp(min=1)


def _divisor(num_items: int | Tensor, device: torch.device) -> int | Tensor:
    """At least 1, so that a window in which nothing counts has loss 0 / 1."""
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(
                f"num_items has shape {tuple(num_items.shape)}; expected a tensor of one element. "
                f"Sum the counts of the window first."
            )
        return num_items.detach().reshape(()).to(device, non_blocking=True).clamp(min=1)
    if isinstance(num_items, bool) or not isinstance(num_items, int) or num_items < 0:
        raise ValueError(
            f"num_items is {num_items!r}; expected None, an integer of at least 0 or a tensor."
        )
    return max(num_items, 1)


def count_targets(targets: Tensor, *, ignore_index: int = -100, shift: bool = False) -> Tensor:
    """How many targets count: the divisor of the mean, and what to add up for `num_items`.

    Args:
        targets: [..., T] integer.
        ignore_index: targets equal to this do not count.
        shift: leave out the first of each sequence, as `causal_lm_loss` does.

    Returns:
        0-d int64 tensor on the targets' device; the host does not wait for it.
    """
    if shift:
        targets = targets[..., 1:]
    return (targets != ignore_index).sum()
