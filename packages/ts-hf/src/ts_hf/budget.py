"""Which codec a model is loaded in, from its sizes and the free RAM."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ts_core.config import WrapOptions
from ts_core.engine.quantize_options import bytes_per_weight
from ts_core.errors import NotAvailableError, OutOfBudgetError
from ts_core.memory.ram import ram_available_bytes
from ts_hf.families import find_decoder_layers
from ts_hf.fill import LoadReport, quantizable_names
from ts_hf.sizes import format_bytes

_OFF = (None, "none", False)


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of a skeleton's parameters in its own dtypes.

    Attributes:
        linear_values: values of the weights that quantization applies to.
        linear_bytes: bytes of those.
        other_matrix_bytes: of the decoder layers' other matrices (fused experts, Conv1D).
        other_matrix: name of the largest of these, or "".
        rest_bytes: of everything else: embeddings, norms, biases.
    """

    linear_values: int
    linear_bytes: int
    other_matrix_bytes: int
    other_matrix: str
    rest_bytes: int

    def total_bytes(self, codec_name: str | None, options: WrapOptions, disk: bool = False) -> int:
        """Bytes of RAM in a codec, or in full precision (None); without the matrices of the
        layers when those are on a disk.
        """
        if disk:
            return self.rest_bytes
        linear = self.linear_bytes
        if codec_name is not None:
            linear = int(self.linear_values * bytes_per_weight(codec_name, options))
        return linear + self.other_matrix_bytes + self.rest_bytes

    @property
    def mostly_linear(self) -> bool:
        """Whether quantization reaches at least half of the layers' matrices."""
        return self.linear_bytes >= self.other_matrix_bytes

    def not_reached(self) -> str:
        """What quantization does not reach, in words."""
        share = self.other_matrix_bytes / max(1, self.other_matrix_bytes + self.linear_bytes)
        return (
            f"{share:.0%} of the decoder layers' weights ({format_bytes(self.other_matrix_bytes)}) "
            f"are not in nn.Linear modules (the largest: {self.other_matrix!r})"
        )


def measure(model: nn.Module) -> ModelSizes:
    """The sizes of a skeleton; a tied weight counts once."""
    linear = quantizable_names(model)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    in_layers = {
        id(parameter) for layer in find_decoder_layers(model) for parameter in layer.parameters()
    }
    values = linear_bytes = other_bytes = rest = 0
    largest = (0, "")
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        if name in tied:
            continue
        if name in linear:
            values, linear_bytes = values + parameter.numel(), linear_bytes + size
        elif id(parameter) in in_layers and parameter.dim() >= 2:
            other_bytes += size
            largest = max(largest, (size, name))
        else:
            rest += size
    return ModelSizes(values, linear_bytes, other_bytes, largest[1], rest)


def choose_codec(
    model: nn.Module,
    options: WrapOptions,
    ram_fraction: float,
    report: LoadReport,
    disk: bool = False,
) -> str | None:
    """The codec's name, or None for full precision.

    Args:
        model: the skeleton.
        options: quantize, quant_block_size, double_quant, keep_precise; the rest is not looked at.
        ram_fraction: share of free RAM that "auto" plans with.
        report: takes the events.
        disk: whether the layers' matrices are kept on a disk.

    Raises:
        OutOfBudgetError: the model does not fit in the free RAM.
        NotAvailableError: a codec was asked for that would reach less than half of the layers.
        UnknownPluginError: no installed package offers the codec.
    """
    sizes = measure(model)
    free = ram_available_bytes()
    if options.quantize == "auto":
        return _automatic(sizes, options, free, ram_fraction, report, disk)
    chosen = None if options.quantize in _OFF else str(options.quantize)
    needed = sizes.total_bytes(chosen, options, disk)
    if chosen is not None and sizes.other_matrix_bytes:
        if not sizes.mostly_linear:
            raise NotAvailableError(
                f"quantize={chosen!r}: {sizes.not_reached()}, and quantizing those is not "
                f"available in this version. Use quantize=None."
            )
        report.events.append(f"{sizes.not_reached()} and stay in full precision")
    if needed > free:
        how = "in full precision" if chosen is None else f"in {chosen}"
        raise OutOfBudgetError(
            f"the model takes {format_bytes(needed)} {how}, but only {format_bytes(free)} of RAM "
            f"is free. {_remedy(sizes, options, free)}"
        )
    return chosen


def _remedy(sizes: ModelSizes, options: WrapOptions, free: int) -> str:
    """What makes a model fit that does not: the most precise codec that does, or more RAM."""
    for name in _by_precision() if sizes.mostly_linear else ():
        size = sizes.total_bytes(name, options)
        if size <= free:
            return f"Quantize it (quantize={name!r}: {format_bytes(size)}), or free RAM."
    return "Free RAM, or use a machine with more."


def _by_precision() -> list[str]:
    from ts_core.registry import codecs

    return sorted(codecs.names(), key=lambda name: codecs.get(name).error_rank_order)


def check_stored(size_bytes: int, format_name: str) -> None:
    """Refuse a checkpoint whose stored weights alone exceed the free RAM.

    Raises:
        OutOfBudgetError: by how much.
    """
    free = ram_available_bytes()
    if size_bytes > free:
        raise OutOfBudgetError(
            f"the checkpoint takes {format_bytes(size_bytes)} as stored ({format_name}), but only "
            f"{format_bytes(free)} of RAM is free. Free RAM."
        )


def _automatic(
    sizes: ModelSizes,
    options: WrapOptions,
    free: int,
    ram_fraction: float,
    report: LoadReport,
    disk: bool,
) -> str | None:
    budget = free * ram_fraction
    plain = sizes.total_bytes(None, options, disk)
    if plain <= budget:
        return None
    order = _by_precision() if sizes.mostly_linear else []
    for name in order:
        size = sizes.total_bytes(name, options)
        if size <= budget:
            report.events.append(
                f"quantize='auto' chose {name}: the model takes {format_bytes(plain)} in full "
                f"precision, {format_bytes(size)} in {name}, and {format_bytes(budget)} of RAM "
                f"may be used"
            )
            return name
    if order:
        tried = ", ".join(
            f"{name} {format_bytes(sizes.total_bytes(name, options))}" for name in order
        )
    elif sizes.mostly_linear:
        tried = "no codec is installed: pip install 'ts-quant>=0.8,<0.9'"
    else:
        tried = f"quantization does not help: {sizes.not_reached()}"
    raise OutOfBudgetError(
        f"the model takes {format_bytes(plain)} in full precision ({tried}), but only "
        f"{format_bytes(budget)} of RAM may be used ({ram_fraction} of {format_bytes(free)} free). "
        f"Free RAM, or use a machine with more."
    )
