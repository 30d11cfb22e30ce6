"""Which tensors of a checkpoint make up which quantized weight.

A reader is given the names, dtypes and shapes of a checkpoint's tensors and its quantization
config, and answers with a `ReadPlan`; tensors are read only when a weight is built, apart from the
few small ones that describe others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ts_quant.codecs.finite_scales import refuse_bad_scales
from ts_quant.errors import CheckpointError, NotAvailableError, OptionError
from ts_quant.tensor import QuantTensor
from ts_quant.transposed import TransposedQuantTensor


class TensorInfo(Protocol):
    """What a header says of a tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


Header = Mapping[str, Any]
"""Tensor name -> TensorInfo."""

ReadSmall = Callable[[str], Tensor]
"""Reads one (small) tensor by its name."""

Build = Callable[[Mapping[str, Tensor]], "StoredParts"]


@dataclass(frozen=True)
class StoredParts:
    """What `QuantTensor.from_buffers` takes.

    Attributes:
        codec: the codec's name.
        buffers: by name; those of two or more dimensions keep the weight's rows and columns.
        layout: scale layout, block size, rows.
    """

    codec: str
    buffers: dict[str, Tensor]
    layout: dict[str, Any]


@dataclass(frozen=True)
class StoredWeight:
    """One quantized weight of a checkpoint.

    Attributes:
        name: its name without the format's suffixes ("model.layers.0.mlp.up_proj.weight").
        shape: of the decoded weight.
        codec: the codec it is stored in.
        sources: role -> name of the tensor in the checkpoint; the codes are the first.
        make: parts from the tensors of `sources`.
        transposed: whether models hold this weight with its last two dimensions swapped.
    """

    name: str
    shape: tuple[int, ...]
    codec: str
    sources: dict[str, str]
    make: Build
    transposed: bool = False

    def parts(self, tensors: Mapping[str, Tensor]) -> StoredParts:
        """The buffers, from the tensors by role.

        Raises:
            CheckpointError: the tensors do not make such a weight.
        """
        try:
            found = self.make(tensors)
            scales = "e4m3" if found.codec == "nvfp4" else "e8m0"
            refuse_bad_scales(self.name, found.buffers, scales)
            return found
        except (OptionError, KeyError, IndexError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"the stored weight {self.name!r}: {error}") from error

    def build(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> QuantTensor:
        """The QuantTensor, over the tensors given (by role); nothing is decoded.

        Raises:
            CheckpointError: the tensors do not make such a weight.
        """
        return assemble(self.name, self.parts(tensors), self.shape, dtype)

    def build_as_held(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """`build`, with the last two dimensions swapped where models hold the weight so.

        Raises:
            CheckpointError: the tensors do not make such a weight.
        """
        built = self.build(tensors, dtype)
        return TransposedQuantTensor(built) if self.transposed else built


def assemble(
    name: str, parts: StoredParts, shape: tuple[int, ...], dtype: torch.dtype
) -> QuantTensor:
    """A QuantTensor of parts; errors name the weight."""
    try:
        return QuantTensor.from_buffers(
            parts.codec, parts.buffers, shape=shape, dtype=dtype, layout=parts.layout
        )
    except OptionError as error:
        raise CheckpointError(f"the stored weight {name!r}: {error}") from error


@dataclass
class ReadPlan:
    """How to read a checkpoint that stores weights quantized.

    Attributes:
        format: the format, in words.
        weights: the quantized weights, by name.
        ignored: tensors that no weight needs (scales of activations, of the cache, ...).
    """

    format: str
    weights: dict[str, StoredWeight] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def add(self, weight: StoredWeight) -> None:
        """Add a weight; two of one name are refused."""
        if weight.name in self.weights:
            raise CheckpointError(f"the checkpoint stores {weight.name!r} twice")
        self.weights[weight.name] = weight

    @property
    def consumed(self) -> set[str]:
        """Names of the tensors that the weights are made of."""
        return {key for weight in self.weights.values() for key in weight.sources.values()}

    def assemble(
        self, name: str, parts: StoredParts, shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantTensor:
        """A QuantTensor of parts joined from several weights'."""
        return assemble(name, parts, shape, dtype)


def plan_reading(
    header: Header,
    config: Mapping[str, Any] | None,
    read: ReadSmall,
    *,
    modelopt: Mapping[str, Any] | None = None,
) -> ReadPlan | None:
    """Find the quantized weights of a checkpoint.

    Args:
        header: name -> dtype and shape of every tensor.
        config: `quantization_config` of config.json, or None.
        read: reads one small tensor by name (bitsandbytes keeps descriptions in tensors).
        modelopt: contents of hf_quant_config.json, or None.

    Returns:
        The plan, or None where nothing is stored quantized.

    Raises:
        NotAvailableError: a format, or an algorithm of it, that this version does not read.
        CheckpointError: the tensors are not what the format asks for.
    """
    from ts_quant.readers import bitsandbytes, block_fp8, compressed_tensors, mxfp4
    from ts_quant.readers import modelopt as modelopt_reader

    readers: dict[str, Callable[..., ReadPlan]] = {
        "bitsandbytes": bitsandbytes.plan,
        "compressed-tensors": compressed_tensors.plan,
        "fp8": block_fp8.plan,
        "modelopt": modelopt_reader.plan,
        "mxfp4": mxfp4.plan,
    }
    settings = _settings(config, "quantization_config")
    method = settings.get("quant_method")
    if method is None and modelopt is not None:
        method, settings = "modelopt", _settings(modelopt, "hf_quant_config.json")
    if method is None and settings.get("load_in_4bit"):
        method = "bitsandbytes"
    if method is None and bitsandbytes.present(header):
        method = "bitsandbytes"
    if method is None:
        if settings:
            raise NotAvailableError(
                f"the checkpoint's quantization_config names no quant_method "
                f"({sorted(map(str, settings))}); this version reads {', '.join(sorted(readers))}"
            )
        _refuse_codes(header)
        return None
    reader = readers.get(str(method))
    if reader is None:
        raise NotAvailableError(
            f"the checkpoint's weights are stored by {method!r}, which this version does not "
            f"read; it reads {', '.join(sorted(readers))}. Use the full-precision checkpoint and "
            f"quantize it while loading"
        )
    found = reader(header, settings, read)
    _refuse_left_over(header, found)
    _refuse_twice(header, found)
    return found


def _settings(config: Any, where: str) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{where} is a {type(config).__name__}, not an object")
    return dict(config)


_CODES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _refuse_left_over(header: Header, found: ReadPlan) -> None:
    """No tensor of codes may be taken for an ordinary weight."""
    used = found.consumed | found.ignored
    for name, info in header.items():
        if name not in used and info.dtype in _CODES and len(info.shape) >= 2:
            raise CheckpointError(
                f"tensor {name!r} ({info.dtype}, shape {list(info.shape)}) holds codes, but the "
                f"tensors that {found.format} keeps beside them are missing. The checkpoint is "
                f"incomplete, or of a variant that this version does not read"
            )


def _refuse_twice(header: Header, found: ReadPlan) -> None:
    """A weight is stored quantized or plain, not both."""
    for name in found.weights:
        if name in header and name not in found.consumed:
            raise CheckpointError(
                f"the checkpoint stores {name!r} twice: quantized ({found.format}), and as "
                f"{header[name].dtype}. Remove the one that is not meant"
            )


def _refuse_codes(header: Header) -> None:
    """Without a quantization config no tensor may hold codes."""
    for name, info in header.items():
        if len(info.shape) < 2 or info.dtype not in _CODES:
            continue
        stem = name.removesuffix("_packed").removesuffix("_blocks")
        scales = [other for other in header if other.startswith(stem) and "scale" in other]
        if info.dtype.is_floating_point or scales:
            beside = f" beside {scales[0]!r}" if scales else ""
            raise CheckpointError(
                f"tensor {name!r} ({info.dtype}, shape {list(info.shape)}){beside} holds codes, "
                f"but the checkpoint has no quantization_config that says how to read them. "
                f"Restore it in config.json (or hf_quant_config.json)"
            )


def with_channel_scale(header: Header, weight: StoredWeight, factors: str) -> StoredWeight:
    """The weight, its columns multiplied by the factors of its layer's inputs.

    Args:
        header: name -> dtype and shape.
        weight: what it is without them.
        factors: name of the tensor [in] of a floating dtype.

    Raises:
        CheckpointError: it has another shape or dtype.
    """
    info = info_of(header, factors, weight.name, "the factors of its inputs")
    columns = weight.shape[-1]
    if tuple(info.shape) not in ((columns,), (1, columns)) or not info.dtype.is_floating_point:
        raise CheckpointError(
            f"tensor {factors!r} has dtype {info.dtype} and shape {list(info.shape)}; expected a "
            f"floating dtype and [{columns}], one factor per column of {weight.name!r}"
        )

    def make(tensors: Mapping[str, Tensor]) -> StoredParts:
        parts = weight.make(tensors)
        scale = float32(tensors["channel_scale"]).view(-1)
        if not bool((scale > 0).all()):  # finite ones are asked for with the other scales
            raise CheckpointError(f"tensor {factors!r} holds factors that are not positive")
        buffers = {**parts.buffers, "channel_scale": scale}
        return StoredParts(parts.codec, buffers, {**parts.layout, "channel_scale": True})

    return replace(weight, sources={**weight.sources, "channel_scale": factors}, make=make)


def info_of(header: Header, name: str, weight: str, purpose: str) -> TensorInfo:
    """The header's entry of a tensor that must be there."""
    info: TensorInfo | None = header.get(name)
    if info is None:
        raise CheckpointError(f"{weight!r} has no tensor {name!r}, {purpose}")
    return info


def expect_shape(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    if tuple(info.shape) != shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(info.shape)}; expected {list(shape)}"
        )


def expect_scalar(name: str, info: TensorInfo) -> None:
    """Refuse what is not one number (0-d or [1])."""
    if tuple(info.shape) not in ((), (1,)):
        raise CheckpointError(f"tensor {name!r} has shape {list(info.shape)}; expected one number")


def float32(tensor: Tensor) -> Tensor:
    """Scales in fp32 (bf16, fp16 and e8m0 ones are exact in it), contiguous."""
    return tensor.to(torch.float32).contiguous()
