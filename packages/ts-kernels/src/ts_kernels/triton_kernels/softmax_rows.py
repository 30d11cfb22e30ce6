# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Cross-entropy of rows of logits, and its gradient written over them, in Triton.

    z    = logits, or cap * tanh(logits / cap)
    loss = log(sum(exp(z - max z))) + max z - z[target]
    grad = scale * (softmax(z) - onehot(target)), times 1 - (z / cap)^2 with a cap

One pass finds max and sum together (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018), a second writes the gradient. All arithmetic is fp32, the term of the true class
included; a gradient is rounded once, when it is stored.
"""

import triton
import triton.language as tl


@triton.jit
def _soft_capped(logits, cap):
    # tanh(t) = 2 * sigmoid(2 t) - 1
    return cap * (2.0 * tl.sigmoid(2.0 * (logits / cap)) - 1.0)


@triton.jit(do_not_specialize=["ignore_index", "cap"])
def softmax_rows_kernel(
    logits_ptr,
    targets_ptr,
    scale_ptr,
    loss_ptr,
    row_stride,
    vocab,
    ignore_index,
    cap,
    WRITE_GRAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row of logits [rows, vocab]; writes loss [rows] fp32.

    Launch with debug=True, which makes the assertion count.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row).to(tl.int64)
    cap = tl.full([], cap, tl.float32)

    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if WRITE_GRAD:
            for start in range(0, vocab, BLOCK):
                col = start + tl.arange(0, BLOCK)
                zero = tl.zeros([BLOCK], dtype=logits_ptr.dtype.element_ty)
                tl.store(logits_row + col, zero, mask=col < vocab)
        return

    in_range = (target >= 0) & (target < vocab)
    tl.device_assert(
        in_range, "ts_kernels: a target is outside [0, classes) and is not ignore_index"
    )
    target = tl.minimum(tl.maximum(target, 0), vocab - 1)
    true_logit = tl.load(logits_row + target).to(tl.float32)
    if HAS_CAP:
        true_logit = _soft_capped(true_logit, cap)

    peak = float("-inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        col = start + tl.arange(0, BLOCK)
        z = tl.load(logits_row + col, mask=col < vocab, other=float("-inf")).to(tl.float32)
        if HAS_CAP:
            z = tl.where(col < vocab, _soft_capped(z, cap), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(z, axis=0))
        # a row may begin with logits of -inf: exp(-inf - -inf) would be NaN
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(z - shift), axis=0)
        peak = new_peak
    tl.store(loss_ptr + row, tl.log(total) + (peak - true_logit))

    if WRITE_GRAD:
        for start in range(0, vocab, BLOCK):
            col = start + tl.arange(0, BLOCK)
            z = tl.load(logits_row + col, mask=col < vocab, other=0.0).to(tl.float32)
            if HAS_CAP:
                z = _soft_capped(z, cap)
            grad = tl.exp(z - peak) / total
            grad = tl.where(col == target, grad - 1.0, grad)
            if HAS_CAP:
                ratio = z / cap
                grad = grad * (1.0 - ratio * ratio)
            if HAS_SCALE:
                grad = grad * tl.load(scale_ptr + row)
            tl.store(logits_row + col, grad.to(logits_ptr.dtype.element_ty), mask=col < vocab)
