"""QuantTensor: a frozen weight that looks like its full-precision self and stores codes.

It is a wrapper subclass: shape and dtype are those of the weight it stands for, the bytes are in
inner tensors (for plain NF4 and int8 `codes` and `absmax`). `F.linear` goes to `ts_quant.linear`;
every other operation sees the decoded weight (`ts_quant.aten`).

A pager may replace the inner tensors (`setattr(q, name, tensor)`) between any two operations, by
tensors of the same shape and dtype at another address or on another device. Everything here reads
them afresh. `device`, which PyTorch fixes when the wrapper is made, may then be out of date;
results are on the inner tensors' device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ts_quant import stacks
from ts_quant.codecs.base import QuantSpec, codec_named
from ts_quant.errors import FrozenWeightError, OptionError
from ts_quant.frozen_view import shown, written
from ts_quant.linear import frozen_linear, input_gradient
from ts_quant.matmul import speed
from ts_quant.matmul.options import MatmulOptions
from ts_quant.no_memory import NoMemory, refuse_graph
from ts_quant.stored_spec import check_stored, is_floating, stored_spec

_FROZEN = (
    "a quantized weight is frozen: {what}. Train adapters on top of it (LoRA), or call "
    ".dequantize() for an ordinary tensor; q.copy_(tensor) encodes new values in place"
)

_DEFAULT_MATMUL = MatmulOptions()

Metadata = tuple[QuantSpec, torch.dtype, MatmulOptions]


class Edits:
    """How often the values in some buffers were changed in place."""

    __slots__ = ("count",)

    def __init__(self, count: int = 0) -> None:
        self.count = count


class QuantTensor(NoMemory, torch.Tensor):
    """A quantized, frozen weight with the shape and dtype of the original.

    Make one with `ts_quant.quantize`. Put it in a module as
    `torch.nn.Parameter(q, requires_grad=False)`.

    Args:
        buffers: the codec's inner tensors, in the order of its `buffer_names`, all on one device.
            They are kept, not copied.
        spec: codec, block size and layout of the scales.
        shape: shape of the weight.
        dtype: floating dtype that the weight is decoded to by default.
    """

    # Python attributes, because reading `dtype` or `shape` of a subclass costs a round through
    # __torch_function__, which a linear layer would pay several times per call.
    _spec: QuantSpec
    _decoded_dtype: torch.dtype
    _decoded_shape: torch.Size
    _names: tuple[str, ...]
    _matmul: MatmulOptions
    _edits: Edits
    """Shared by all tensors over the same buffers; see `ts_quant.linear`."""

    @staticmethod
    def __new__(
        cls, buffers: Sequence[Tensor], spec: QuantSpec, shape: torch.Size, dtype: torch.dtype
    ) -> QuantTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        self: QuantTensor = make(
            cls, shape, dtype=dtype, device=buffers[0].device, requires_grad=False
        )
        return self

    def __init__(
        self, buffers: Sequence[Tensor], spec: QuantSpec, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._decoded_dtype = dtype
        self._decoded_shape = shape
        self._edits = Edits()
        self._matmul = _DEFAULT_MATMUL
        self._names = codec_named(spec.codec).buffer_names(spec)
        for name, buffer in zip(self._names, buffers, strict=True):
            setattr(self, name, buffer)

    @classmethod
    def from_buffers(
        cls,
        codec: str,
        buffers: Mapping[str, Tensor],
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: Mapping[str, Any] | None = None,
    ) -> QuantTensor:
        """A QuantTensor over buffers that are stored already, such as a checkpoint's.

        Nothing is decoded, encoded or copied; sizes and dtypes are checked, values are not.

        Args:
            codec: "nf4", "int8", "fp8", "nvfp4" or "mxfp4"; "fp8_row" for "fp8" with a scale per
                row where `layout` says nothing else.
            buffers: the tensors by name, contiguous, on one device. `codes` in any shape: uint8
                (int8 for int8), or a float8 dtype, which is taken as its bytes. The others as in
                the table of `ts_quant.codecs.scales`; for fp8's "tile", `scale` fp32
                [..., ceil(N / rows), ceil(K / block_size)].
            shape: shape of the decoded weight.
            dtype: floating dtype that the weight is decoded to by default.
            layout: what is not the codec's default: "scales" (a scale layout), "block_size",
                "rows" for "tile", "outliers" (columns kept in bf16), and "channel_scale" (True
                with the buffer of that name, fp32 [in], by which columns are multiplied).

        Raises:
            OptionError: an unknown codec, layout or buffer, or a buffer of another size or dtype.
        """
        chosen = codec_named(codec)
        check_stored(buffers, shape, layout)
        spec = stored_spec(chosen, tuple(shape), dict(layout or {}))
        if not is_floating(dtype) or dtype.itemsize < 2:
            raise OptionError(f"dtype={dtype} is not accepted: expected bf16, fp16, fp32 or fp64")
        return cls(chosen.check_buffers(buffers, spec, shape), spec, torch.Size(shape), dtype)

    # -- what is stored ------------------------------------------------------------------------

    @property
    def codec(self) -> str:
        """Name of the format."""
        return self._spec.codec

    @property
    def block_size(self) -> int:
        """Values per scale (of layout "tile": columns per scale)."""
        return self._spec.block_size

    @property
    def spec(self) -> QuantSpec:
        """Codec, block size and layout of the scales."""
        return self._spec

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the stored buffers, scales included."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def buffers(self) -> tuple[Tensor, ...]:
        """The inner tensors, as they are now."""
        return tuple([getattr(self, name) for name in self._names])

    def product_speeds(self, tokens: int, device: torch.device) -> tuple[float, float]:
        """See `ts_quant.matmul.speed.product_speeds`."""
        return speed.product_speeds(self, tokens, device)

    def input_gradient(self, dy: Tensor) -> Tensor:
        """dy @ W: the gradient of a linear layer's input, of a weight [N, K].

        With the weight decoded, or in FP8 or NVFP4 where `configure_matmul` asks for it
        (`fp8_backward`, `nvfp4_backward`) and the device can. Runs on the current stream; the host
        does not wait, so that it can be captured in a CUDA graph. Records no gradient of its own.

        Args:
            dy: [M, N] of a floating dtype, on the inner tensors' device.

        Returns:
            [M, K] of dy's dtype, new.

        Raises:
            OptionError: the weight is no matrix, or dy does not fit it or is not floating.
        """
        return input_gradient(self, dy)

    def share_memory_(self) -> QuantTensor:
        """Move the inner tensors to shared memory, as torch.Tensor.share_memory_ does; in place."""
        for buffer in self.buffers():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the inner tensors are in shared memory (always on a GPU)."""
        return all(buffer.is_shared() for buffer in self.buffers())

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The weight as an ordinary tensor.

        Each value is computed in fp32 and rounded once to the output's dtype (with factors per
        channel twice, see `ts_quant.codecs.channel_scale`). Runs on the current
        stream of the inner tensors' device; with `out` nothing is allocated on a GPU, so it can
        be captured in a CUDA graph.

        Args:
            dtype: floating dtype of the result; None means the weight's dtype, or out's.
            out: contiguous tensor of the weight's shape, on the inner tensors' device, that
                receives the values and is returned.

        Raises:
            OptionError: `dtype` is not floating, or `out` does not fit.
        """
        if out is not None:
            self._check_out(out, dtype)
            self._decode_out(out)
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)
            return out
        if dtype is None:
            dtype = self._decoded_dtype
        elif not is_floating(dtype):
            raise OptionError(f"dequantize() gives floating dtypes, not {dtype}")
        codec = codec_named(self._spec.codec)
        return codec.decode(self.buffers(), self._spec, self._decoded_shape, dtype)

    def _decode_out(self, out: Tensor) -> None:
        codec_named(self._spec.codec).decode_out(self.buffers(), self._spec, out)

    def _check_out(self, out: Tensor, dtype: torch.dtype | None) -> None:
        if not isinstance(out, Tensor):
            raise OptionError(f"out is a {type(out).__name__}; expected a tensor")
        device = self.buffers()[0].device
        if (
            out.shape != self._decoded_shape
            or out.device != device
            or not out.dtype.is_floating_point
        ):
            raise OptionError(
                f"out has shape {tuple(out.shape)}, {out.dtype} on {out.device}; expected shape "
                f"{tuple(self._decoded_shape)}, a floating dtype, on {device}"
            )
        if not out.is_contiguous():
            raise OptionError(f"out has strides {out.stride()}; expected a contiguous tensor")
        if dtype is not None and dtype is not out.dtype:
            raise OptionError(f"dtype={dtype} contradicts out, which is {out.dtype}")

    def with_buffers(
        self, buffers: Sequence[Tensor], dtype: torch.dtype | None = None
    ) -> QuantTensor:
        """A QuantTensor of the same shape and format over other inner tensors."""
        made = QuantTensor(buffers, self._spec, self._decoded_shape, dtype or self._decoded_dtype)
        made._matmul = self._matmul
        return made

    # -- stacks of matrices --------------------------------------------------------------------

    def stack_rows(self) -> tuple[str, ...] | None:
        """See `ts_quant.stacks.stack_rows`."""
        return stacks.stack_rows(self)

    def stack_like(self, buffers: Mapping[str, Tensor], count: int) -> QuantTensor:
        """See `ts_quant.stacks.stack_like`."""
        return stacks.stack_like(self, buffers, count)

    def stack_part(self, first: int, count: int) -> QuantTensor:
        """See `ts_quant.stacks.stack_part`."""
        return stacks.stack_part(self, first, count)

    # -- PyTorch's protocols -------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        return list(self._names), (self._spec, self._decoded_dtype, self._matmul)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        meta: Metadata,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> QuantTensor:
        spec, dtype, matmul = meta
        names = codec_named(spec.codec).buffer_names(spec)
        made = QuantTensor([inner[name] for name in names], spec, outer_size, dtype)
        made._matmul = matmul
        return made

    def _stable_hash_for_caching(self) -> str:
        """Names what compiled code may depend on, for AOTAutograd's cache."""
        inner = [
            (str(b.dtype), tuple(b.shape), b.stride(), b.storage_offset(), str(b.device))
            for b in self.buffers()
        ]
        return f"QuantTensor {self._spec} {self._matmul} {self.dtype} {tuple(self.shape)} {inner}"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            bound = _linear_arguments(*args, **kwargs)
            if bound is not None:
                return frozen_linear(*bound)
        elif func in _FORBIDDEN:
            _FORBIDDEN[func](*args, **kwargs)
        elif func == _SET_DATA and isinstance(args[0], QuantTensor):
            return _set_data(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = ATEN_HANDLERS.get(func, _on_dequantized)
        return handler(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"QuantTensor({self.codec}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.buffers()[0].device}, block_size={self.block_size}, "
            f"nbytes={self.nbytes})"
        )

    def __copy__(self) -> QuantTensor:
        copied: Any = self.detach()
        return cast(QuantTensor, copied)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantTensor:
        if id(self) in memo:
            copied: QuantTensor = memo[id(self)]
            return copied
        copied = self.with_buffers([buffer.detach().clone() for buffer in self.buffers()])
        for key, value in self.__dict__.items():
            if key not in copied.__dict__:
                setattr(copied, key, copy.deepcopy(value, memo))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FrozenWeightError(
            f"a QuantTensor ({self.codec}, shape {tuple(self.shape)}) cannot be pickled, so that "
            f"no file of weights needs unpickling. Save it with ts_quant.save_quantized "
            f"(safetensors), or q.dequantize() as an ordinary tensor"
        )


AtenHandler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
ATEN_HANDLERS: dict[Any, AtenHandler] = {}
"""Operations that keep a QuantTensor quantized; filled by `ts_quant.aten`."""


def _on_dequantized(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Any operation, on decoded copies of the QuantTensors among its arguments."""
    if written(func, args, kwargs, QuantTensor):
        raise FrozenWeightError(_FROZEN.format(what=f"{func} would change it in place"))

    def decode(value: Any) -> Any:
        return value.dequantize() if isinstance(value, QuantTensor) else value

    def compute() -> Any:
        decoded, options = tree_map(decode, (args, kwargs))
        return func(*decoded, **options)

    return shown(func, compute)


def _linear_arguments(
    input: Any, weight: Any, bias: Any = None
) -> tuple[Tensor, QuantTensor, Tensor | None] | None:
    """F.linear's arguments if its frozen path applies, else None."""
    if not isinstance(weight, QuantTensor) or len(weight._decoded_shape) != 2:
        return None
    if isinstance(input, QuantTensor) or isinstance(bias, QuantTensor):
        return None
    return input, weight, bias


def _refuse_grad(tensor: Any, requires_grad: bool = True) -> None:
    if requires_grad and isinstance(tensor, QuantTensor):
        raise FrozenWeightError(
            _FROZEN.format(what="requires_grad cannot be True")
            + ". In a module use torch.nn.Parameter(q, requires_grad=False), and call "
            "requires_grad_(False) on it before load_state_dict(assign=True)"
        )


def _refuse_setitem(tensor: Any, index: Any, value: Any) -> None:
    if isinstance(tensor, QuantTensor):
        raise FrozenWeightError(_FROZEN.format(what="its elements cannot be assigned"))


def _refuse_graph(tensor: Any, source: Any = None, *args: Any, **kwargs: Any) -> None:
    if isinstance(tensor, QuantTensor):
        refuse_graph(kwargs.get("src", source))


def _refuse_apply(tensor: Any, function: Any) -> None:
    if isinstance(tensor, QuantTensor):
        NoMemory.apply_(tensor, function)


_FORBIDDEN: dict[Any, Callable[..., None]] = {
    torch.Tensor.requires_grad_: _refuse_grad,
    torch.Tensor.requires_grad.__set__: _refuse_grad,  # type: ignore[attr-defined]
    torch.Tensor.__setitem__: _refuse_setitem,
    torch.Tensor.apply_: _refuse_apply,
    torch.Tensor.copy_: _refuse_graph,
}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _set_data(target: QuantTensor, value: Tensor) -> None:
    """`q.data = value`: take over another QuantTensor's buffers, format and dtype."""
    if not isinstance(value, QuantTensor):
        raise FrozenWeightError(
            _FROZEN.format(what=f".data cannot become a plain {value.dtype} tensor")
        )
    with torch._C.DisableTorchFunctionSubclass():
        _SET_DATA(target, value)
    target._spec = value._spec
    target._decoded_dtype = value._decoded_dtype
    target._decoded_shape = value._decoded_shape
    target._edits = Edits(target._edits.count + 1)
    target._names = value._names
    target._matmul = value._matmul
    for name in value._names:
        setattr(target, name, getattr(value, name))
