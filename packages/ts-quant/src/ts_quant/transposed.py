"""A stored weight seen with its last two dimensions swapped.

Some models hold a weight the other way round than its checkpoint stores it (gpt-oss: experts as
[experts, inputs, outputs], stored in blocks along the inputs as [experts, outputs, inputs]). Codes
cannot be transposed without encoding again, so this keeps them as they are and swaps what is
decoded. Like a QuantTensor it is frozen, names its inner tensors by PyTorch's protocol, and is
decoded by every operation but copies and moves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ts_quant.errors import FrozenWeightError, OptionError
from ts_quant.frozen_view import shown, written
from ts_quant.no_memory import NoMemory, refuse_graph
from ts_quant.tensor import QuantTensor

aten = torch.ops.aten
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_MOVES = (
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
)


class TransposedQuantTensor(NoMemory, torch.Tensor):
    """A QuantTensor's values with the last two dimensions swapped.

    Args:
        stored: the QuantTensor, of two or more dimensions. Kept, not copied.
    """

    stored: QuantTensor

    @staticmethod
    def __new__(cls, stored: QuantTensor) -> TransposedQuantTensor:
        if stored.dim() < 2:
            raise OptionError(
                f"a weight of shape {tuple(stored.shape)} has no two dimensions to swap"
            )
        make: Any = torch.Tensor._make_wrapper_subclass
        shape = (*stored.shape[:-2], stored.shape[-1], stored.shape[-2])
        self: TransposedQuantTensor = make(
            cls, shape, dtype=stored.dtype, device=stored.buffers()[0].device, requires_grad=False
        )
        return self

    def __init__(self, stored: QuantTensor) -> None:
        self.stored = stored

    @property
    def codec(self) -> str:
        """Name of the format."""
        return self.stored.codec

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the stored buffers."""
        return self.stored.nbytes

    def buffers(self) -> tuple[Tensor, ...]:
        """The inner tensors, as they are now."""
        return self.stored.buffers()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as an ordinary, contiguous tensor."""
        return self.stored.dequantize(dtype).transpose(-1, -2).contiguous()

    @property
    def data(self) -> TransposedQuantTensor:
        """The same weight, detached; assigning another one takes over its stored form."""
        detached: Any = self.detach()
        return cast(TransposedQuantTensor, detached)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, TransposedQuantTensor):
            raise FrozenWeightError(
                f"a stored weight is frozen: .data cannot become a plain {value.dtype} tensor. Use "
                f"copy_ with new values (it encodes them), or .dequantize() for an ordinary tensor"
            )
        with torch._C.DisableTorchFunctionSubclass():
            _SET_DATA(self, value)
        self.stored = value.stored

    @property
    def requires_grad(self) -> bool:
        """False."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> TransposedQuantTensor:
        """Refused, unless it is False."""
        if requires_grad:
            raise FrozenWeightError(
                "a stored weight is frozen: requires_grad cannot be True. Train adapters on top "
                "of it (LoRA). In a module use torch.nn.Parameter(q, requires_grad=False)"
            )
        return self

    def copy_(self, src: Tensor, non_blocking: bool = False) -> TransposedQuantTensor:
        """Encode new values in place."""
        refuse_graph(src)
        super().copy_(src, non_blocking)
        return self

    def stack_rows(self) -> tuple[str, ...] | None:
        """See `ts_quant.stacks.stack_rows`."""
        return self.stored.stack_rows() if self.stored.dim() > 2 else None

    def stack_like(self, buffers: Mapping[str, Tensor], count: int) -> TransposedQuantTensor:
        """See `ts_quant.stacks.stack_like`."""
        return TransposedQuantTensor(self.stored.stack_like(buffers, count))

    def stack_part(self, first: int, count: int) -> TransposedQuantTensor:
        """See `ts_quant.stacks.stack_part`."""
        return TransposedQuantTensor(self.stored.stack_part(first, count))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], meta: None, outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> TransposedQuantTensor:
        return TransposedQuantTensor(inner["stored"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, TransposedQuantTensor):
            if func in _MOVES:
                kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
                moved = func(first.stored, *args[1:], **kwargs)
                if isinstance(moved, QuantTensor):
                    return TransposedQuantTensor(moved)
                return moved.transpose(-1, -2).contiguous()
            if func is aten.copy_.default:
                source = args[1]
                if isinstance(source, TransposedQuantTensor):
                    first.stored.copy_(source.stored)
                else:
                    first.stored.copy_(source.expand(first.shape).transpose(-1, -2).contiguous())
                return first
            if func is aten.is_pinned.default:
                return func(first.stored, *args[1:], **kwargs)
            if func is aten.select.int and args[1] == 0 and first.dim() > 2:
                return shown(func, lambda: _one(first.stored, args[2]).transpose(-1, -2))
        if written(func, args, kwargs, TransposedQuantTensor):
            raise FrozenWeightError(
                f"a stored weight is frozen: {func} would change it in place. Use copy_ with new "
                f"values, or .dequantize() for an ordinary tensor"
            )

        def compute() -> Any:
            decoded, options = tree_map(_decode, (args, kwargs))
            return func(*decoded, **options)

        return shown(func, compute)

    def __copy__(self) -> TransposedQuantTensor:
        copied: Any = self.detach()
        return cast(TransposedQuantTensor, copied)

    def __deepcopy__(self, memo: dict[int, Any]) -> TransposedQuantTensor:
        if id(self) not in memo:
            memo[id(self)] = TransposedQuantTensor(copy.deepcopy(self.stored, memo))
        found: TransposedQuantTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FrozenWeightError(
            f"a stored weight ({self.codec}, shape {tuple(self.shape)}) cannot be pickled. Save "
            f".dequantize(), or use ts_quant.save_quantized"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"TransposedQuantTensor({self.stored!r})"


def _one(stored: QuantTensor, index: int) -> Tensor:
    """`stored.dequantize()[index]`, decoding only that part where its codes stand alone."""
    index = range(stored.shape[0])[index]
    if stored.stack_rows() is None:
        return stored.dequantize()[index]
    return stored.stack_part(index, 1).dequantize()[0]


def _decode(value: Any) -> Any:
    return value.dequantize() if isinstance(value, TransposedQuantTensor) else value
