# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The gate of a gated MLP in Triton.

    out   = act(gate) * up
    dgate = dout * up * act'(gate)
    dup   = dout * act(gate)

    silu:      act(g) = g * sigmoid(g)
    gelu_tanh: act(g) = g * sigmoid(2 t),  t = sqrt(2 / pi) * (g + 0.044715 g^3)

(1 + tanh(t) = 2 sigmoid(2 t).) Shazeer, "GLU variants improve transformer", 2020; Hendrycks and
Gimpel, "Gaussian error linear units", 2016. All arithmetic is fp32; results are rounded once.

Shapes: [rows, columns] with unit column stride, a stride between rows for each input; results are
contiguous.
"""

import triton
import triton.language as tl


@triton.jit
def _gate_and_slope(g, GELU: tl.constexpr):
    """(s, act'(g)) with act(g) = g * s."""
    if GELU:
        inner = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        s = tl.sigmoid(inner)
        slope = s + g * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    else:
        s = tl.sigmoid(g)
        slope = s * (1.0 + g * (1.0 - s))
    return s, slope


@triton.jit
def _position(columns, BLOCK: tl.constexpr):
    """(row, columns of this program's block, their mask)."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(columns, BLOCK)
    row = program // blocks
    col = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row, col, col < columns


@triton.jit
def gated_mlp_forward_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    columns,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row; the grid is rows * cdiv(columns, BLOCK)."""
    row, col, ok = _position(columns, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=ok, other=0.0).to(tl.float32)
    s, _ = _gate_and_slope(gate, GELU)
    out = (gate * s * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * columns + col, out, mask=ok)


@triton.jit
def gated_mlp_backward_kernel(
    dout_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dout_stride,
    gate_stride,
    up_stride,
    columns,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both gradients of one block of a row."""
    row, col, ok = _position(columns, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=ok, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + row * dout_stride + col, mask=ok, other=0.0).to(tl.float32)
    s, slope = _gate_and_slope(gate, GELU)
    dgate = (dout * up * slope).to(dgate_ptr.dtype.element_ty)
    dup = (dout * gate * s).to(dup_ptr.dtype.element_ty)
    tl.store(dgate_ptr + row * columns + col, dgate, mask=ok)
    tl.store(dup_ptr + row * columns + col, dup, mask=ok)
