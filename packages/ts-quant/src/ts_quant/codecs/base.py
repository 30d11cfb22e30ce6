"""What a codec is: named buffers for a tensor, and the way back.

A `Codec` knows one code format. It turns a weight into a few named buffers and decodes them into
an output tensor; a `QuantSpec` says how the scales beside the codes are laid out. `QuantTensor`
holds the buffers and asks the codec of its spec by name, so nothing outside this folder depends on
a format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ts_quant.errors import NonFiniteWeightError, OptionError

if TYPE_CHECKING:
    from ts_quant.readers import ReadPlan
    from ts_quant.storing import Storer
    from ts_quant.tensor import QuantTensor

DEFAULT_BLOCK_SIZE = 64
_MOST_BLOCK = 1 << 62


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor was encoded.

    Attributes:
        codec: the codec's name.
        block_size: values per scale, along the flattened tensor; of layout "tile", columns per
            scale.
        scales: name of the scale layout; `ts_quant.codecs.scales` lists them.
        rows: rows per scale of layout "tile", else 1.
        outliers: columns of a matrix that are kept in bf16 (`ts_quant.codecs.outliers`).
        channel_scale: whether a factor per input channel is kept (`ts_quant.codecs.channel_scale`).
    """

    codec: str
    block_size: int
    scales: str = "float32"
    rows: int = 1
    outliers: int = 0
    channel_scale: bool = False


class Codec(ABC):
    """One storage format for frozen weights.

    Attributes:
        name: the name users write, `quantize(w, name)`.
        error_rank_order: place in the order of precision; smaller is more precise.
        scale_layouts: names of the scale layouts this format can be stored with, the default
            first.
    """

    API_VERSION = 1
    name: str
    error_rank_order: int
    scale_layouts: tuple[str, ...]

    @property
    def stored_as(self) -> str:
        """The codec that its QuantTensors name: itself, but for a layout with a name of its own."""
        return self.name

    @abstractmethod
    def bytes_per_weight(
        self, block_size: int = DEFAULT_BLOCK_SIZE, double_quant: bool = False
    ) -> float:
        """Stored bytes per weight, scales included, for a tensor of many blocks."""

    @abstractmethod
    def spec_for(
        self,
        shape: Sequence[int],
        block_size: int = DEFAULT_BLOCK_SIZE,
        double_quant: bool = False,
        layout: str | None = None,
    ) -> QuantSpec:
        """How a weight of that shape would be stored with these options.

        Raises:
            OptionError: a block size or an option that this codec does not take.
        """

    @abstractmethod
    def buffer_names(self, spec: QuantSpec) -> tuple[str, ...]:
        """Attributes of a `QuantTensor` that hold the buffers, the codes first."""

    def encode(
        self,
        weight: Tensor,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        double_quant: bool = False,
        layout: str | None = None,
        outlier_channels: Tensor | Sequence[int] | None = None,
        name: str | None = None,
    ) -> QuantTensor:
        """Encode a weight; see `ts_quant.quantize`."""
        from ts_quant import stacks
        from ts_quant.codecs import outliers
        from ts_quant.tensor import QuantTensor

        weight = _plain(weight, name)
        spec = self.spec_for(weight.shape, block_size, double_quant, layout)
        channels = None
        if outlier_channels is not None:
            channels = outliers.checked(outlier_channels, weight.shape, weight.device)
        if channels is not None and channels.numel():
            spec, buffers = outliers.encode_with(self, weight, spec, channels, name)
        elif stacks.apart(weight.shape, spec):
            buffers = stacks.encode_apart(self, weight, spec, name)
        else:
            buffers = self.encode_checked(weight, spec, name)
        return QuantTensor(buffers, spec, weight.shape, weight.dtype)

    @staticmethod
    def plan_reading(*args: Any, **options: Any) -> ReadPlan | None:
        """`ts_quant.plan_reading`: which weights a checkpoint stores quantized, in any format."""
        from ts_quant.readers import plan_reading

        return plan_reading(*args, **options)

    @staticmethod
    def merging() -> ModuleType:
        """`ts_quant.merge`: merging an update into a weight of any format, and its report."""
        from ts_quant import merge

        return merge

    @staticmethod
    def error_stats(model: nn.Module, batches: Any, **options: Any) -> dict[str, Tensor]:
        """`ts_quant.error_stats`: E[x^2] of every linear layer's inputs, from a little data."""
        from ts_quant.error_stats import error_stats

        return error_stats(model, batches, **options)

    @staticmethod
    def configure_matmul(model: nn.Module, **options: Any) -> int:
        """`ts_quant.configure_matmul`: how a model's stored weights are multiplied."""
        from ts_quant.matmul.options import configure_matmul

        return configure_matmul(model, **options)

    @staticmethod
    def tensor_core_summary(model: nn.Module, device: torch.device) -> str | None:
        """`ts_quant.matmul_report` in a line; None where no weight's format is multiplied."""
        from ts_quant.matmul.report import matmul_report

        report = matmul_report(model, device)
        return str(report) if report.codecs else None

    @staticmethod
    def emulate_tensor_cores() -> AbstractContextManager[None]:
        """`ts_quant.emulate_tensor_cores`: on a CPU, products as tensor cores compute them."""
        from ts_quant.matmul.dispatch import emulate_tensor_cores

        return emulate_tensor_cores()

    def storer(self, **options: Any) -> Storer:
        """What stores a model's matrices in this format, better where it pays (`Storer`)."""
        from ts_quant.storing import Storer

        return Storer(self.name, **options)

    def encode_checked(
        self, weight: Tensor, spec: QuantSpec, name: str | None
    ) -> tuple[Tensor, ...]:
        """The buffers of a plain floating-point tensor; refuses NaN and infinity.

        Waits for the device once, to read whether every block is finite.

        Raises:
            NonFiniteWeightError: the weight holds NaN or infinity (or fp64 beyond fp32's range).
            OptionError: the scale layout can only be read.
        """
        with torch.no_grad():
            *buffers, absmax = self.encode_buffers(weight, spec)
            if not weight.is_meta:
                _refuse_non_finite(absmax, spec, weight, name)
        return tuple(buffers)

    @abstractmethod
    def encode_buffers(self, weight: Tensor, spec: QuantSpec) -> list[Tensor]:
        """The buffers of a plain tensor, then each block's absmax, with no check of the values."""

    @abstractmethod
    def check_buffers(
        self, buffers: Mapping[str, Tensor], spec: QuantSpec, shape: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Stored buffers, checked and in the order of `buffer_names`; no bytes are copied.

        Raises:
            OptionError: a buffer is missing, unknown, or of another dtype or size.
        """

    @abstractmethod
    def decode(
        self, buffers: Sequence[Tensor], spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A new tensor of `shape` and `dtype` on the buffers' device (current stream)."""

    @abstractmethod
    def decode_out(self, buffers: Sequence[Tensor], spec: QuantSpec, out: Tensor) -> None:
        """Decode into a contiguous `out` on the buffers' device, without allocating on a GPU.

        Runs on the current stream; `out` and the buffers must stay alive until it has run.
        """


C = TypeVar("C", bound="Codec")

_CODECS: dict[str, Codec] = {}


def register(codec: C) -> C:
    """Make a codec available to `quantize` and to the QuantTensors that name it."""
    _CODECS[codec.name] = codec
    return codec


def codec_named(name: str) -> Codec:
    """The codec called `name`.

    Raises:
        OptionError: no such codec.
    """
    codec = _CODECS.get(name) if isinstance(name, str) else None
    if codec is not None:
        return codec
    listed = ", ".join(repr(known) for known in sorted(_CODECS))
    raise OptionError(f"unknown codec {name!r}; expected one of {listed}")


def check_block_size(block_size: int) -> None:
    """Refuse a block size that is not an even int of at least 2."""
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise OptionError(
            f"block_size must be an even int of at least 2, not {block_size!r} "
            f"({type(block_size).__name__})"
        )
    if block_size < 2 or block_size % 2 or block_size > _MOST_BLOCK:
        raise OptionError(
            f"block_size={block_size} is not accepted: it must be an even int of at least 2 "
            f"(64 is usual), and at most 2^62"
        )


def _plain(weight: Tensor, name: str | None) -> Tensor:
    from ts_quant.tensor import QuantTensor

    label = f"weight {name!r}" if name else "the weight"
    if not isinstance(weight, Tensor):
        raise OptionError(f"{label} must be a torch.Tensor, not {type(weight).__name__}")
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        raise OptionError(
            f"{label} has dtype {weight.dtype}; only bf16, fp16, fp32 and fp64 tensors can be "
            f"quantized"
        )
    if weight.layout is not torch.strided:
        raise OptionError(f"{label} has layout {weight.layout}; expected a dense tensor")
    if isinstance(weight, QuantTensor):
        return weight.dequantize()
    return weight.detach()


def _refuse_non_finite(absmax: Tensor, spec: QuantSpec, weight: Tensor, name: str | None) -> None:
    finite = torch.isfinite(absmax)
    if bool(finite.all()):
        return
    bad = torch.nonzero(~finite.flatten()).flatten()
    where = ""
    if spec.scales != "tile":
        first = int(bad[0]) * spec.block_size
        last = min(first + spec.block_size, weight.numel()) - 1
        where = f"; the first is among the flattened elements {first} to {last}"
    label = f"weight {name!r}" if name else "the weight"
    beyond = " or beyond the range of float32" if weight.dtype is torch.float64 else ""
    raise NonFiniteWeightError(
        f"{label} (shape {tuple(weight.shape)}, {weight.dtype}) holds values that are NaN, "
        f"infinite{beyond}, in {bad.numel()} of its {absmax.numel()} blocks{where}. "
        f"Quantization needs finite values: repair the checkpoint or leave this weight unquantized"
    )
