"""Put tensors into a skeleton, one at a time: quantized, cast, tied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.engine.served import serve_stored
from ts_core.errors import DataError
from ts_hf.experts import find_experts
from ts_hf.families import find_decoder_layers
from ts_hf.sizes import format_bytes

Encode = Callable[[Tensor, str], Tensor]


@dataclass
class LoadReport:
    """What load_model did; kept at `model.trainstream_load`.

    Attributes:
        quantize: the codec that weights were encoded in while they were read, or None.
        stored_as: the format of a checkpoint whose weights were kept as they were stored, or None.
        quantized_tensors: weights held in a codec's format.
        kept_precise: those of them that `keep_precise` stored one step more precise.
        quantized_bytes: their bytes.
        plain_bytes: bytes of everything else.
        seconds: how long loading took.
        events: decisions in plain words.
        storage: per matrix its error, its bytes and why (keep_precise, error_rank), or None.
    """

    quantize: str | None = None
    stored_as: str | None = None
    quantized_tensors: int = 0
    kept_precise: int = 0
    quantized_bytes: int = 0
    plain_bytes: int = 0
    seconds: float = 0.0
    events: list[str] = field(default_factory=list)
    storage: Any = None

    @property
    def total_bytes(self) -> int:
        """Host bytes of all weights as kept."""
        return self.quantized_bytes + self.plain_bytes

    def summary(self) -> str:
        """One line in plain words."""
        quantized = (
            f"{self.quantized_tensors} weights in {self.quantize or self.stored_as} "
            f"({format_bytes(self.quantized_bytes)}), "
            if self.quantize or self.stored_as
            else ""
        )
        return (
            f"loaded in {self.seconds:.1f} s: {quantized}"
            f"{format_bytes(self.plain_bytes)} of other weights"
        )


def quantizable_names(model: nn.Module) -> set[str]:
    """Names of the weights that quantization applies to, all of them in decoder layers.

    Those of every nn.Linear, and the stacked experts of mixture-of-experts layers.
    """
    inside = {id(module) for layer in find_decoder_layers(model) for module in layer.modules()}
    found = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
    for spec in find_experts(model):
        for name in spec.parameters:
            parameter = spec.module._parameters[name]
            if id(spec.module) in inside and parameter is not None and parameter.dim() >= 3:
                found.add(f"{spec.name}.{name}")
    return found


class Encoder:
    """Encodes weights as they are read, with the options of load_model.

    Args:
        codec_name: an installed codec.
        options: `block_size`, `double_quant`, `keep_precise`, `error_rank`, `error_iters`.

    Attributes:
        starts: by weight name, the factors that adapters can start at (`error_rank`).

    Raises:
        UnknownPluginError: no installed package offers the codec.
        OptionError: an option that the codec does not take.
    """

    def __init__(self, codec_name: str, **options: Any) -> None:
        from ts_core.engine.quantize import make_storer
        from ts_core.registry import codecs

        self._codec = codecs.get(codec_name)
        self._basic = {name: options.pop(name) for name in ("block_size", "double_quant")}
        self._storer = make_storer(self._codec, options, **self._basic, second_moments=None)
        self.starts: dict[str, Any] = {}

    def __call__(self, weight: Tensor, name: str) -> Tensor:
        """The weight in the codec's format, on its device."""
        encoded: Tensor
        if self._storer is None or weight.dim() != 2:  # what is chosen per matrix skips stacks
            encoded = self._codec.encode(weight, name=name, **self._basic)
            return encoded
        stored = self._storer.store(weight, name)
        encoded = stored.weight
        self.starts.pop(name, None)
        if stored.start is not None:
            self.starts[name] = stored.start
        return encoded

    def improved(self) -> list[str]:
        """Names of encoded weights that are to be encoded once more, now that all were seen."""
        return [] if self._storer is None else list(self._storer.improved())

    @property
    def report(self) -> Any:
        """Per matrix what was chosen, or None."""
        return None if self._storer is None else self._storer.report


class Filler:
    """Places tensors in `model`, encoding those that are to be quantized.

    Args:
        model: the skeleton, changed in place.
        encode: encodes one weight, or None for no quantization.
        report: counts what was placed.
        frozen: whether every parameter is frozen (as it always is with `encode`).
        keep: where a parameter's value is kept: takes its name and value, returns the same value.

    Values are kept aside until `finish` puts them into the model, so the skeleton stays a skeleton
    while it is being filled, and an error leaves nothing half-made.
    """

    def __init__(
        self,
        model: nn.Module,
        encode: Encode | None,
        report: LoadReport,
        *,
        frozen: bool = False,
        keep: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self._keep = keep
        self.encode = encode
        self.frozen = frozen or encode is not None
        self.only: set[str] | None = None
        """When set, other names are passed over (a second reading of some)."""
        self.report = report
        self.quantizable = quantizable_names(model) if encode is not None else set()
        self.placed: set[str] = set()
        """Names that have values."""
        self._made: dict[str, Tensor] = {}
        self._work_device = _work_device()

    def place(self, name: str, tensor: Tensor) -> None:
        """Prepare `tensor` to become the parameter or buffer called `name`.

        Args:
            name: a name of the model's state dict.
            tensor: any device and dtype; ends on the CPU, in the dtype the skeleton has for it.

        Raises:
            DataError: its values cannot be quantized (not finite).
        """
        if self.only is not None and name not in self.only:
            return
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        if leaf in module._buffers:
            reference = module._buffers[leaf]
            dtype = tensor.dtype if reference is None else reference.dtype
            self._made[name] = tensor.to("cpu", dtype)
        else:
            slot: Tensor = module._parameters[leaf]  # type: ignore[assignment]
            value = self._value(name, tensor, slot.dtype)
            if self._keep is not None:
                value = self._keep(name, value)
            trainable = not self.frozen and value.is_floating_point()
            self._made[name] = nn.Parameter(value, requires_grad=trainable)
        self.placed.add(name)

    def _value(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if hasattr(tensor, "__tensor_flatten__"):
            return tensor.to("cpu")  # stored in some format already
        if not tensor.is_floating_point():
            if dtype.is_floating_point:
                raise DataError(
                    f"tensor {name!r} is stored as {tensor.dtype}, where the model has a "
                    f"floating-point weight. The checkpoint is damaged, or in a format this "
                    f"version does not read."
                )
            return tensor.to("cpu")
        if self.encode is None or name not in self.quantizable:
            return tensor.to(dtype).to("cpu")
        try:
            return self._encoded(self.encode, name, tensor, dtype)
        except torch.OutOfMemoryError:
            if self._work_device.type == "cpu":
                raise
            self._work_device = torch.device("cpu")
            self.report.events.append(
                f"GPU memory ran out at {name}: encoding on the CPU from there"
            )
            return self._encoded(self.encode, name, tensor, dtype)

    def _encoded(self, encode: Encode, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        try:
            # Encode what the model would have computed with: the weight in the model's dtype.
            return encode(tensor.to(self._work_device).to(dtype), name).to("cpu")
        except ValueError as error:
            raise DataError(f"tensor {name!r} cannot be quantized: {error}") from error

    def finish(self) -> None:
        """Put the values into the model, tie what is tied, check that nothing is left on meta.

        Raises:
            DataError: something received no values.
        """
        for name in list(self._made):
            path, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(path)
            home = module._buffers if leaf in module._buffers else module._parameters
            home[leaf] = self._made.pop(name)  # type: ignore[assignment]
            start = getattr(self.encode, "starts", {}).get(name)
            if start is not None:
                module.error_start = start
        self._tie()
        serve_stored(self.model)
        if self._work_device.type == "cuda":
            torch.cuda.empty_cache()  # what was used for encoding is not to look occupied
        for name, tensor in _named_tensors(self.model):
            if tensor.is_meta:
                raise DataError(
                    f"{name!r} of {type(self.model).__name__} received no values. The checkpoint "
                    f"does not contain it and it cannot be computed."
                )
            size = stored_bytes(tensor)
            if hasattr(tensor, "__tensor_flatten__"):
                self.report.quantized_tensors += 1
                self.report.quantized_bytes += size
            else:
                self.report.plain_bytes += size

    def _tie(self) -> None:
        """Make tied weights one parameter again, from whichever of the group was placed."""
        for _ in range(2):  # the second pass reaches members that come before the placed one
            for target, source in dict(_tied_keys(self.model)).items():
                self._tie_pair(target, source)

    def _tie_pair(self, target: str, source: str) -> None:
        if target in self.placed and source in self.placed:
            if not torch.equal(_parameter(self.model, target), _parameter(self.model, source)):
                self.report.events.append(
                    f"{target} and {source} are tied by the config but differ in the checkpoint: "
                    f"kept apart"
                )
                del _tied_keys(self.model)[target]
                return
        kept, other = (source, target) if source in self.placed else (target, source)
        if kept in self.placed:
            path, _, leaf = other.rpartition(".")
            self.model.get_submodule(path)._parameters[leaf] = _parameter(self.model, kept)
            self.placed.add(other)


def stored_bytes(tensor: Tensor) -> int:
    """Bytes a tensor takes; of a wrapper subclass, those of its inner tensors."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    return sum(stored_bytes(getattr(tensor, inner)) for inner in flatten()[0])


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tied_keys(model: nn.Module) -> dict[str, str]:
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return tied


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    path, _, leaf = name.rpartition(".")
    parameter: nn.Parameter = model.get_submodule(path)._parameters[leaf]  # type: ignore[assignment]
    return parameter


def _work_device() -> torch.device:
    """Where weights are encoded: the GPU when there is one, which is far faster at it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
