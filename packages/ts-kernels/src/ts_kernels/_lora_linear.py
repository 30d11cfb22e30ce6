"""A linear layer with a LoRA adapter as one differentiable function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ts_kernels import reference
from ts_kernels._backend import runs_eagerly
from ts_kernels._bases import SubclassBase
from ts_kernels._heads import is_plain, settled
from ts_kernels._library import define_op, not_twice_differentiable
from ts_kernels._lora_math import Adapter, add_update_, gradients, uses_split
from ts_kernels._precision import cast, compute_dtype, without_autocast
from ts_kernels._recipes import Recipe, kept_for, made_again, recipe_of


class Dtypes(NamedTuple):
    """Of the base layer's product and of the adapter's."""

    base: torch.dtype
    adapter: torch.dtype


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias + scaling * (x @ lora_a.T) @ lora_b.T, in one autograd function.

    Hu et al., "LoRA: low-rank adaptation of large language models", 2021.

    Beside the base layer's product the adapter costs two matmuls forward, of which the second adds
    to the base layer's result in place, and three backward for its own gradients, plus one that
    adds to the input gradient in place. Kept for backward: x itself (no copy in another dtype, no
    dropped-out copy), and scaling * x @ lora_a.T, which has only `rank` columns. A frozen weight
    costs no gradient work.

    A weight that is a tensor subclass (a quantized one) is multiplied by `F.linear`, and the input
    gradient by its own `input_gradient(dy)`, [N, out] -> [N, in] in a new tensor. Without that it
    is decoded by its own `dequantize()`, and without either `F.linear`'s own backward is asked,
    which keeps x. The object is kept, not its buffers, which may move in between.

    The adapter multiplies in its own dtype, and the base layer in x's; autocast has its way with
    both. A float32 adapter on a bfloat16 layer: gradients of A and B have at least 16 bits; on
    CUDA no float32 copy of x or dy is made (`_split`). Deterministic where torch's matmuls are.
    Runs on the current stream; may be captured in a CUDA graph.

    Args:
        x: [..., in], any strides; may be empty. float32, bfloat16, float16 or float64.
        weight: [out, in] of x's dtype, or a tensor subclass of any.
        lora_a: [r, in], r >= 1.
        lora_b: [out, r], lora_a's dtype.
        scaling: a number.
        bias: None or [out].

    Returns:
        [..., out], the dtype of the base layer's result.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        NotImplementedError: the gradient is differentiated again (plain weights).

    Example:
        >>> x, weight = torch.randn(2, 5, 8), torch.randn(6, 8)
        >>> a, b = torch.randn(3, 8, requires_grad=True), torch.zeros(6, 3, requires_grad=True)
        >>> lora_linear(x, weight, a, b, scaling=2.0).sum().backward()
    """
    weight, lora_a, lora_b = settled(weight), settled(lora_a), settled(lora_b)
    bias = None if bias is None else settled(bias)
    plain = is_plain(weight)
    if plain or torch.compiler.is_compiling():
        shape, trained = weight.shape, weight.requires_grad
    else:  # each attribute of a subclass costs a round through its __torch_function__
        with torch._C.DisableTorchFunctionSubclass():
            shape, trained = weight.shape, weight.requires_grad
    _check(x, shape, lora_a, lora_b, bias)
    small = (x, lora_a, lora_b) if bias is None else (x, lora_a, lora_b, bias)
    eager = not torch.compiler.is_compiling() and runs_eagerly(*small)
    if plain:
        base = compute_dtype(x, weight)
        dtypes = Dtypes(base, base if _autocasts(x) else lora_a.dtype)
        args = (x, weight, bias, lora_a, lora_b, float(scaling), *dtypes)
        if not eager:
            y: Tensor = torch.ops.ts_kernels.lora_linear(*args)[0]
            return y
        if not _differentiates(*small, weight):
            return _forward(*args)[0]
        apply: Any = _EagerLoraLinear.apply
        y = apply(recipe_of(x), *args)
        return y
    if not eager or trained:
        return reference.lora_linear(x, weight, lora_a, lora_b, scaling, bias)
    adapter_dtype = torch.get_autocast_dtype(x.device.type) if _autocasts(x) else lora_a.dtype
    if not _differentiates(*small):
        y = F.linear(x, weight, bias)
        with without_autocast(x):
            _add(y, x, Adapter(lora_a, lora_b, float(scaling), adapter_dtype))
        return y
    apply = _SubclassLoraLinear.apply
    y = apply(recipe_of(x), x, weight, bias, lora_a, lora_b, float(scaling), adapter_dtype)
    return y


def _autocasts(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _differentiates(*tensors: Tensor) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def _check(x: Tensor, shape: torch.Size, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    if (
        len(shape) != 2
        or a.dim() != 2
        or x.dim() < 1
        or not x.shape[-1] == a.shape[1] == shape[1]
        or b.shape != (shape[0], a.shape[0])
        or a.shape[0] < 1
    ):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, weight {tuple(shape)}, lora_a "
            f"{tuple(a.shape)} and lora_b {tuple(b.shape)}; expected [..., in], [out, in], "
            f"[r, in] and [out, r] with r of at least 1."
        )
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; expected ({shape[0]},), one per output."
        )
    if not x.is_floating_point() or not a.is_floating_point() or a.dtype != b.dtype:
        raise ValueError(
            f"x is {x.dtype}, lora_a {a.dtype} and lora_b {b.dtype}; expected floating dtypes, and "
            f"one dtype for lora_a and lora_b."
        )
    if not x.device == a.device == b.device:
        raise ValueError(
            f"x, lora_a and lora_b are on {x.device}, {a.device} and {b.device}; expected one "
            f"device."
        )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _add(y: Tensor, x: Tensor, adapter: Adapter) -> Tensor:
    """Adds the adapter's part to y [..., out] in place; returns what backward wants of it."""
    return add_update_(y.view(-1, y.shape[-1]), cast(_rows(x), y.dtype), adapter)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    base: torch.dtype,
    adapter: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(y, t)."""
    with without_autocast(x):
        x = cast(x, base)
        y = F.linear(x, cast(weight, base), None if bias is None else cast(bias, base))
        y = y.contiguous()
        return y, _add(y, x, Adapter(a, b, scaling, adapter))


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    base: torch.dtype,
    adapter: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=base)
    if uses_split(y, adapter):
        return y, x.new_empty((rows, 3 * a.shape[0]), dtype=torch.bfloat16)
    return y, x.new_empty((rows, a.shape[0]), dtype=adapter)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, a, b, *ctx.options = inputs
    t = output[1]
    ctx.mark_non_differentiable(t)
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, a, b, t)


def _autograd(ctx: Any, dy: Tensor | None, unused: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    wanted = ctx.needs_input_grad[:5]
    grads = torch.ops.ts_kernels.lora_linear_backward(
        dy, *ctx.saved_tensors, *ctx.options, ctx.bias_dtype or dy.dtype, wanted
    )
    return _picked(wanted, grads)


def _picked(wanted: tuple[bool, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return (*(g if want else None for g, want in zip(grads, wanted, strict=True)), *(None,) * 3)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    t: Tensor,
    scaling: float,
    base: torch.dtype,
    adapter: torch.dtype,
    bias_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    """(dx, dweight, dbias, da, db); a size of 0 if not wanted."""
    want_x, want_weight, want_bias, want_a, want_b = wanted
    nothing = x.new_empty(0)
    with without_autocast(x):
        dy2, x2 = _rows(dy), cast(_rows(x), base)
        base_dx = torch.mm(dy2, cast(weight, base)) if want_x else None
        grads = gradients(dy2, x2, t, Adapter(a, b, scaling, adapter), base_dx, want_a, want_b)
        return (
            nothing if grads.x is None else grads.x.view(x.shape).to(x.dtype),
            torch.mm(dy2.t(), x2).to(weight.dtype) if want_weight else weight.new_empty(0),
            _sum_rows(dy2, bias_dtype) if want_bias else nothing.to(bias_dtype),
            a.new_empty(0) if grads.a is None else grads.a,
            b.new_empty(0) if grads.b is None else grads.b,
        )


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    t: Tensor,
    scaling: float,
    base: torch.dtype,
    adapter: torch.dtype,
    bias_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    shapes = (x.shape, weight.shape, weight.shape[:1], a.shape, b.shape)
    dtypes = (x.dtype, weight.dtype, bias_dtype, a.dtype, b.dtype)
    return tuple(
        x.new_empty(shape if want else 0, dtype=dtype)
        for shape, dtype, want in zip(shapes, dtypes, wanted, strict=True)
    )


def _sum_rows(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dtype)


define_op(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor lora_a, Tensor lora_b, "
    "float scaling, ScalarType base, ScalarType adapter) -> (Tensor, Tensor)",
    _forward,
    _fake,
    _autograd,
    _setup_context,
)
define_op(
    "lora_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor lora_a, Tensor lora_b, "
    "Tensor t, float scaling, ScalarType base, ScalarType adapter, ScalarType bias_dtype, "
    "bool[5] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    not_twice_differentiable("lora_linear", "ts_kernels.reference.lora_linear"),
)


class _EagerLoraLinear(torch.autograd.Function):
    """The operator's implementation and autograd, called without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe | None, *args: Any) -> Tensor:
        x, weight, bias, a, b, *ctx.options = args
        y, t = _forward(*args)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.make = None if recipe is None else recipe.make
        ctx.save_for_backward(weight, a, b, t, *kept_for(x, recipe))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:6]
        dtype = ctx.bias_dtype or grads[0].dtype
        weight, a, b, t, *kept = ctx.saved_tensors
        backward: Any = _backward
        if torch.is_grad_enabled() or not runs_eagerly(grads[0]):
            backward = torch.ops.ts_kernels.lora_linear_backward  # it refuses a second derivative
        x = made_again(kept, ctx.make)
        results = backward(grads[0], x, weight, a, b, t, *ctx.options, dtype, wanted)
        return None, *_picked(wanted, results)


class _SubclassLoraLinear(torch.autograd.Function):
    """The same for a frozen weight that is a tensor subclass."""

    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        adapter_dtype: torch.dtype,
    ) -> Tensor:
        ctx.base = SubclassBase(weight, ctx.needs_input_grad[1])
        y: Tensor = ctx.base.forward(x, bias).contiguous()
        with without_autocast(x):
            t = _add(y, x, Adapter(a, b, scaling, adapter_dtype))
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.scaling, ctx.adapter_dtype = scaling, adapter_dtype
        ctx.make = None if recipe is None else recipe.make
        ctx.save_for_backward(a, b, t, *kept_for(x, recipe))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a second derivative is asked for, and refused
            return _subclass_gradients_once(ctx, *grads)
        return _subclass_gradients(ctx, *grads)


def _subclass_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    a, b, t, *kept = ctx.saved_tensors
    want_x, _, want_bias, want_a, want_b = ctx.needs_input_grad[1:6]
    with without_autocast(a):
        x = made_again(kept, ctx.make)
        dy2 = _rows(grads[0])
        base_dx = ctx.base.input_grad(grads[0]) if want_x else None
        adapter = Adapter(a, b, ctx.scaling, ctx.adapter_dtype)
        found = gradients(dy2, cast(_rows(x), dy2.dtype), t, adapter, base_dx, want_a, want_b)
        return (
            None,
            None if found.x is None else found.x.view(x.shape).to(x.dtype),
            None,
            _sum_rows(dy2, ctx.bias_dtype) if want_bias else None,
            found.a,
            found.b,
            None,
            None,
        )


_subclass_gradients_once = torch.autograd.function.once_differentiable(_subclass_gradients)
