"""Cross-entropy of an output layer without its logits: operators and the public function.

The gradients are computed in the forward pass, chunk by chunk, while the chunk's logits are there:
computing the logits again in backward would take one matmul more. They are kept unscaled instead
of hidden and the weight, to which nothing refers afterwards; backward multiplies them by the
upstream gradient and rounds once.

If the weight is trained and all rows fit one chunk, the logits are computed again in backward
(`_logprobs`): then a gradient as large as the weight is made once, in the weight's dtype, instead
of waiting in float32 and being copied, which would take longer than the matmul.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ts_kernels._adapted_head import AdaptedHead, LoraAdapter, adapter_grad, beside, check_adapter
from ts_kernels._checks import check_head, check_options, check_targets
from ts_kernels._chunks import Options, walk_chunks
from ts_kernels._heads import DenseHead, Head, SubclassHead, Wanted, is_plain, settled
from ts_kernels._library import define_op
from ts_kernels._logprobs import token_logprobs
from ts_kernels._precision import compute_dtype, matmul_dtype, scaled, without_autocast
from ts_kernels._targets import count_targets, divisor

_SCHEMA = (
    "head_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_b, "
    "Tensor targets, int chunk_size, int ignore_index, float? softcap, ScalarType compute_dtype, "
    "bool[4] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _implementation(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_b: Tensor | None,
    targets: Tensor,
    chunk_size: int,
    ignore_index: int,
    softcap: float | None,
    compute_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    """(loss sum, its gradients by hidden, weight, bias and lora_b, or a size of 0)."""
    want = Wanted(*wanted)
    with without_autocast(hidden):
        head: Head = DenseHead(weight, bias, compute_dtype, want)
        if lora_b is not None:
            head = AdaptedHead(head, lora_b, want.lora_b)
        rows = walk_chunks(
            hidden,
            head,
            weight.shape[0],
            targets,
            Options(chunk_size, ignore_index, softcap),
            want,
            matmul_dtype(hidden, compute_dtype),
        )
        b_grad = adapter_grad(head, lora_b) if want.lora_b else None
        grads = (rows.hidden_grad, head.weight_grad, head.bias_grad, b_grad)
        return rows.losses.sum(), *(hidden.new_empty(0) if g is None else g for g in grads)


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_b: Tensor | None,
    targets: Tensor,
    chunk_size: int,
    ignore_index: int,
    softcap: float | None,
    compute_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    wide = torch.promote_types(torch.float32, compute_dtype)
    grads = [hidden.new_empty(0) for _ in range(4)]
    if wanted[0]:
        grads[0] = hidden.new_empty(hidden.shape, dtype=matmul_dtype(hidden, compute_dtype))
    if wanted[1]:
        grads[1] = hidden.new_empty(weight.shape, dtype=wide)
    if wanted[2]:
        grads[2] = hidden.new_empty(weight.shape[:1], dtype=wide)
    if wanted[3] and lora_b is not None:
        grads[3] = hidden.new_empty(lora_b.shape, dtype=wide)
    return hidden.new_empty((), dtype=wide), *grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:4]]
    ctx.wanted = inputs[9]


def _backward(ctx: Any, loss_grad: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    _refuse_second_derivative()
    if loss_grad is None:
        return (None,) * 10
    found: list[Tensor | None] = []
    for gradient, dtype, wanted, needed in zip(
        ctx.saved_tensors, ctx.dtypes, ctx.wanted, ctx.needs_input_grad[:4], strict=True
    ):
        if needed and not wanted:
            raise RuntimeError(
                "ts_kernels::head_cross_entropy cannot give the gradient that is now needed. "
                "Call ts_kernels.chunked_cross_entropy, which asks for the right ones."
            )
        found.append(scaled(gradient, loss_grad, dtype) if needed else None)
    return (*found, *(None,) * 6)


define_op(_SCHEMA, _implementation, _fake, _backward, _setup_context)


class _SubclassCrossEntropy(torch.autograd.Function):
    """The same for a frozen weight that is a tensor subclass; returns the loss sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_b: Tensor | None,
        targets: Tensor,
        options: Options,
        wanted: Wanted,
    ) -> Tensor:
        head: Head = SubclassHead(weight, bias, Wanted(*wanted[:3]))
        if lora_b is not None:
            head = AdaptedHead(head, lora_b, wanted.lora_b)
        rows = walk_chunks(hidden, head, weight.shape[0], targets, options, wanted, hidden.dtype)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, bias, lora_b)]
        bias_grad = head.bias_grad
        if wanted.bias and bias_grad is None and bias is not None:
            bias_grad = torch.zeros_like(bias)
        b_grad = adapter_grad(head, lora_b) if wanted.lora_b else None
        ctx.save_for_backward(rows.hidden_grad, bias_grad, b_grad)
        return rows.losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        hidden, bias, lora_b = (
            None if gradient is None else scaled(gradient, grads[0], dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, None, bias, lora_b, None, None, None


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
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: Options,
    lora: LoraAdapter | None,
) -> Tensor:
    weight = settled(weight)
    bias = None if bias is None else settled(bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = targets.reshape(-1)
    grad = torch.is_grad_enabled()
    if grad and weight.requires_grad:
        if rows.shape[0] <= options.chunk_size or not is_plain(weight):
            return -token_logprobs(rows, weight, bias, targets, options, lora).sum()
    lora_b = None
    if lora is not None:
        rows, lora_b = beside(rows, lora), lora.b
    wanted = Wanted(
        *(grad and t is not None and t.requires_grad for t in (rows, weight, bias, lora_b))
    )
    if is_plain(weight):
        dtype = compute_dtype(rows, weight)
        total: Tensor = torch.ops.ts_kernels.head_cross_entropy(
            rows, weight, bias, lora_b, targets, *options, dtype, list(wanted)
        )[0]
        return total
    apply: Any = _SubclassCrossEntropy.apply
    total = apply(rows, weight, bias, lora_b, targets, options, wanted)
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
    lora: LoraAdapter | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` against `targets`, never building the logits.

    Rows are taken `chunk_size` at a time: [chunk_size, V] logits exist at once, in the dtype in
    which hidden and weight multiply (hidden's, or autocast's). The softmax, the term of the true
    class and the loss are fp32; the logits' gradient is rounded once to the logits' dtype, as are
    the gradients of hidden, weight and bias to theirs (on the CPU, and with a weight that is a
    tensor subclass, a 16-bit hidden's is rounded once more).

    The gradients are computed in the forward pass and only scaled in backward, and nothing refers
    to the weight afterwards; what is frozen costs no gradient work. A trained weight's gradient is
    summed in float32, [V, D], and waits for backward so. (If all rows fit one chunk and the weight
    is trained, or a trained weight is a tensor subclass, the logits are computed again in backward
    instead.) Either backward may run more than once. Runs on the current stream.

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
        lora: None, or a LoRA adapter on the output layer: `LoraAdapter(a, b, scaling)`, which adds
            scaling * (hidden @ a.T) @ b.T to the logits. a [r, D] and b [V, r] receive gradients.

    Returns:
        0-d float32 loss (float64 for float64 inputs). With every target ignored it is 0 and so
        are its gradients, whatever the divisor.

    Raises:
        ValueError: a shape, dtype, option or target is not acceptable. A target out of range on a
            CUDA device is caught there by a device assertion, without the host waiting; the error
            shows at the next synchronization.
        NotImplementedError: the gradient is differentiated again, or (unless the logits are
            computed again) backward runs with create_graph=True.

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
    if lora is not None:
        check_adapter(lora, hidden, weight)
    options = Options(chunk_size, ignore_index, logit_softcap)
    total = _loss_sum(hidden, weight, bias, targets, options, lora)
    if num_items is not None:
        return total / divisor(num_items, total.device)
    if reduction == "sum":
        return total
    return total / count_targets(targets, ignore_index=ignore_index).clamp(min=1)
