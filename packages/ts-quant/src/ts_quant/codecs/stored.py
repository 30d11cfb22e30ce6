"""What all codecs share: dispatch to the operators, the choice of kernel, checks of buffers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ts_quant.codecs import channel_scale, outliers
from ts_quant.codecs.backend import cuda_decoder
from ts_quant.codecs.base import Codec, QuantSpec
from ts_quant.codecs.operators import decode_op, decode_out_op, eager, encode_op, fields
from ts_quant.errors import OptionError

BufferSize = tuple[torch.dtype, tuple[int, ...]]


class StoredCodec(Codec):
    """A codec whose encode and decode are operators of `ts_quant.codecs.operators`.

    Attributes:
        triton_module: module with the Triton decoder, `decode_out(buffers, spec, out)`; imported
            at the first CUDA decode.
    """

    triton_module: str

    @abstractmethod
    def buffer_sizes(self, spec: QuantSpec, shape: Sequence[int]) -> list[BufferSize]:
        """Dtype and shape of each buffer, then of the absmax that `encode_buffers` adds."""

    @abstractmethod
    def encode_reference(self, weight: Tensor, spec: QuantSpec) -> list[Tensor]:
        """`encode_buffers` in plain PyTorch on every device: the same bytes everywhere."""

    @abstractmethod
    def decode_reference(self, buffers: Sequence[Tensor], spec: QuantSpec, out: Tensor) -> None:
        """The decoder in plain PyTorch: any device, any floating dtype; `out` contiguous."""

    def encode_buffers(self, weight: Tensor, spec: QuantSpec) -> list[Tensor]:
        made: list[Tensor] = encode_op(weight, *fields(spec))
        return made

    def decode(
        self, buffers: Sequence[Tensor], spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        if spec.outliers:
            *rest, values, channels = buffers
            decoded = self.decode(rest, outliers.without(spec), shape, dtype)
            return outliers.put_back((values, channels), decoded)
        if spec.channel_scale:
            *rest, scale = buffers
            decoded = self.decode(rest, channel_scale.without(spec), shape, dtype)
            return channel_scale.apply(scale, decoded)
        if eager(buffers[0]):
            out = torch.empty(shape, dtype=dtype, device=buffers[0].device)
            self.run_decode(buffers, spec, out)
            return out
        made: Tensor = decode_op(buffers, *fields(spec), shape, dtype)
        return made

    def decode_out(self, buffers: Sequence[Tensor], spec: QuantSpec, out: Tensor) -> None:
        if spec.outliers:
            *rest, values, channels = buffers
            self.decode_out(rest, outliers.without(spec), out)
            outliers.put_back((values, channels), out)
        elif spec.channel_scale:
            *rest, scale = buffers
            self.decode_out(rest, channel_scale.without(spec), out)
            channel_scale.apply(scale, out)
        elif eager(buffers[0]) and eager(out):
            self.run_decode(buffers, spec, out)
        else:
            decode_out_op(buffers, *fields(spec), out)

    def run_decode(self, buffers: Sequence[Tensor], spec: QuantSpec, out: Tensor) -> None:
        """Decode plain tensors: the Triton kernel on a GPU that has one, else the reference."""
        kernel = cuda_decoder(self.triton_module, out.dtype) if buffers[0].is_cuda else None
        (kernel or self.decode_reference)(buffers, spec, out)

    def check_buffers(
        self, buffers: Mapping[str, Tensor], spec: QuantSpec, shape: Sequence[int]
    ) -> tuple[Tensor, ...]:
        names = self.buffer_names(spec)
        if set(buffers) != set(names):
            raise OptionError(
                f"buffers {sorted(buffers)} do not make a {self.name!r} weight with "
                f"{spec.scales!r} scales; expected {list(names)}"
            )
        expected = self.buffer_sizes(spec, shape)
        kept = []
        for name, (dtype, size) in zip(names, expected, strict=False):
            kept.append(_checked(name, buffers[name], dtype, math.prod(size), spec, shape))
        devices = {buffer.device for buffer in kept}
        if len(devices) > 1:
            raise OptionError(f"the buffers are on several devices: {sorted(map(str, devices))}")
        return tuple(kept)


# The float8 dtypes that some format's bytes are; others (e5m2, say) mean other values.
_AS_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def _checked(
    name: str, buffer: Tensor, dtype: torch.dtype, numel: int, spec: QuantSpec, shape: Sequence[int]
) -> Tensor:
    """The buffer as `dtype`, contiguous, with the elements a weight of that shape needs."""
    label = f"buffer {name!r} of a {spec.codec!r} weight of shape {tuple(shape)}"
    if dtype.itemsize == 1 and buffer.dtype in _AS_BYTES:
        buffer = buffer.view(dtype)
    if buffer.dtype is not dtype:
        raise OptionError(f"{label} has dtype {buffer.dtype}; expected {dtype}")
    if buffer.numel() != numel:
        raise OptionError(
            f"{label} has {buffer.numel()} elements, shape {tuple(buffer.shape)}; expected {numel}"
        )
    if not buffer.is_contiguous():
        raise OptionError(f"{label} has strides {buffer.stride()}; expected a contiguous tensor")
    return buffer.detach().view(1) if buffer.dim() == 0 else buffer.detach()
