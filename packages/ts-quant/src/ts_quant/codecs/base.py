"""What a codec is: named buffers for a tensor, and the way back.

A `Codec` knows one format. It turns a weight into a few named buffers and decodes them into an
output tensor. `QuantTensor` holds the buffers and asks the codec of its `QuantSpec` by name, so
nothing outside this folder depends on a format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ts_quant.errors import NonFiniteWeightError, NotAvailableError, OptionError

if TYPE_CHECKING:
    from ts_quant.tensor import QuantTensor

DEFAULT_BLOCK_SIZE = 64


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor was encoded: the codec's name and the number of values per scale."""

    codec: str
    block_size: int


class Codec(ABC):
    """One storage format for frozen weights.

    Attributes:
        name: the name users write, `quantize(w, name)`.
        error_rank_order: place in the order of precision; smaller is more precise.
        buffer_names: attributes of a `QuantTensor` that hold this format's buffers, in the order
            in which `encode_buffers` returns them.
    """

    API_VERSION = 1
    name: str
    error_rank_order: int
    buffer_names: tuple[str, ...] = ("codes", "absmax")
    code_bytes: float
    """Bytes of code per weight, without scales."""

    def bytes_per_weight(
        self, block_size: int = DEFAULT_BLOCK_SIZE, double_quant: bool = False
    ) -> float:
        """Stored bytes per weight, scales included, for a tensor of many blocks."""
        self.check_options(block_size, double_quant)
        return self.code_bytes + 4.0 / block_size

    def encode(
        self,
        weight: Tensor,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        double_quant: bool = False,
        name: str | None = None,
    ) -> QuantTensor:
        """Encode a weight; see `ts_quant.quantize`."""
        from ts_quant.tensor import QuantTensor

        self.check_options(block_size, double_quant)
        weight = _plain(weight, name)
        return QuantTensor(
            self.encode_checked(weight, block_size, name),
            QuantSpec(self.name, block_size),
            weight.shape,
            weight.dtype,
        )

    def encode_checked(
        self, weight: Tensor, block_size: int, name: str | None
    ) -> tuple[Tensor, ...]:
        """The buffers of a plain floating-point tensor; refuses NaN and infinity.

        Waits for the device once, to read whether every scale is finite.

        Raises:
            NonFiniteWeightError: the weight holds NaN or infinity (or fp64 beyond fp32's range).
        """
        with torch.no_grad():
            buffers = self.encode_buffers(weight, block_size)
            if not weight.is_meta:
                _refuse_non_finite(buffers[-1], block_size, weight, name)
        return buffers

    def check_options(self, block_size: int, double_quant: bool) -> None:
        """Refuse a block size or an option that this codec does not take."""
        if double_quant:
            raise NotAvailableError(
                f"double_quant=True is not available in this version (codec {self.name!r}); "
                f"leave it False: fp32 scales cost {4.0 / DEFAULT_BLOCK_SIZE} bytes per weight "
                f"at the default block size"
            )
        if isinstance(block_size, bool) or not isinstance(block_size, int):
            raise OptionError(
                f"block_size must be an even int of at least 2, not {block_size!r} "
                f"({type(block_size).__name__})"
            )
        if block_size < 2 or block_size % 2:
            raise OptionError(
                f"block_size={block_size} is not accepted: it must be an even int of at least 2 "
                f"(64 is usual)"
            )

    @abstractmethod
    def encode_buffers(self, weight: Tensor, block_size: int) -> tuple[Tensor, ...]:
        """The buffers of a plain tensor, the scales last, with no check of the values."""

    @abstractmethod
    def decode(
        self, buffers: Sequence[Tensor], block_size: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A new tensor of `shape` and `dtype` on the buffers' device (current stream)."""

    @abstractmethod
    def decode_out(self, buffers: Sequence[Tensor], block_size: int, out: Tensor) -> None:
        """Decode into a contiguous `out` on the buffers' device, without allocating on a GPU.

        Runs on the current stream; `out` and the buffers must stay alive until it has run.
        """


C = TypeVar("C", bound="Codec")

_CODECS: dict[str, Codec] = {}
_PLANNED = ("fp8", "nvfp4")


def register(codec: C) -> C:
    """Make a codec available to `quantize` and to the QuantTensors that name it."""
    _CODECS[codec.name] = codec
    return codec


def codec_named(name: str) -> Codec:
    """The codec called `name`.

    Raises:
        NotAvailableError: the name belongs to a format this version does not build.
        OptionError: no such codec.
    """
    codec = _CODECS.get(name)
    if codec is not None:
        return codec
    listed = ", ".join(repr(known) for known in sorted(_CODECS))
    if name in _PLANNED:
        raise NotAvailableError(
            f"the codec {name!r} is not available in this version of ts-quant; use one of {listed}"
        )
    raise OptionError(f"unknown codec {name!r}; expected one of {listed}")


def _plain(weight: Tensor, name: str | None) -> Tensor:
    from ts_quant.tensor import QuantTensor

    label = f"weight {name!r}" if name else "the weight"
    if not isinstance(weight, Tensor):
        raise OptionError(f"{label} must be a torch.Tensor, not {type(weight).__name__}")
    if not weight.dtype.is_floating_point:
        raise OptionError(
            f"{label} has dtype {weight.dtype}; only floating-point tensors can be quantized"
        )
    if weight.layout is not torch.strided:
        raise OptionError(f"{label} has layout {weight.layout}; expected a dense tensor")
    if isinstance(weight, QuantTensor):
        return weight.dequantize()
    return weight.detach()


def _refuse_non_finite(absmax: Tensor, block_size: int, weight: Tensor, name: str | None) -> None:
    finite = torch.isfinite(absmax)
    if bool(finite.all()):
        return
    bad = torch.nonzero(~finite).flatten()
    first = int(bad[0]) * block_size
    label = f"weight {name!r}" if name else "the weight"
    beyond = " or beyond the range of float32" if weight.dtype is torch.float64 else ""
    raise NonFiniteWeightError(
        f"{label} (shape {tuple(weight.shape)}, {weight.dtype}) holds values that are NaN, "
        f"infinite{beyond}, in {bad.numel()} of its {absmax.numel()} blocks; the first is among "
        f"the flattened elements {first} to {min(first + block_size, weight.numel()) - 1}. "
        f"Quantization needs finite values: repair the checkpoint or leave this weight unquantized"
    )
