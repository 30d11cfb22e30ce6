"""Merge a trained adapter into the weights below it, one matrix at a time, and say what it cost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import DataError, NotAvailableError, OptionError, StateError
from ts_core.store.leaves import is_wrapper
from ts_hf.adapters import is_peft_model
from ts_hf.checkpoints.originals import Originals
from ts_hf.codec_hooks import codec_hook
from ts_hf.merge_places import MergePlace, merge_places, merge_stack

ORIGINAL = "original"
DEQUANTIZED = "dequantized"


def merge_adapter(
    model: nn.Module,
    into: str = ORIGINAL,
    *,
    original: str | Path | None = None,
    started: bool | None = None,
    block_size: int = 64,
    double_quant: bool = False,
) -> tuple[Any, Any]:
    """Merge the active LoRA or DoRA adapter(s) of a PEFT model into its weights.

    The model is changed in place and must not be used afterwards, only the one returned. One
    matrix at a time is in full precision beside the result.

    Args:
        model: a PEFT model, not wrapped (call `unwrap` first).
        into: "original": the full-precision weights that the base was quantized from, read again
            from its checkpoint; weights without an adapter become the original ones too, and what
            an adapter started with (`error_rank`) is taken off, since it made up for quantization.
            "dequantized": the weights as the adapter saw them, decoded. Or the name of a codec:
            the merged matrices are stored in it; those without an adapter stay as they are.
        original: folder or hub id of the full-precision checkpoint; None for the one the model was
            loaded from.
        started: for "original", whether the adapter once started at what quantization lost. None:
            as happened in this process. An adapter that was read from a file does not say; the
            model must then be loaded with the `error_rank` (and iterations) of that time.
        block_size: values per scale, for a codec.
        double_quant: one-byte scales, for a codec.

    Returns:
        (merged model without PEFT, report): `report.error` is the relative distance from the model
        that was trained, `report.survived` the share of the adapter's update that the merged
        weights hold; `report.rows` say so of each matrix, `report.table()` in text.

    Raises:
        StateError: no adapters, a wrapped model, adapters that are merged already, or `started` is
            needed.
        NotAvailableError: adapters other than LoRA or DoRA of matrices and of stacked experts (of
            convolutions, say), or no installed package can merge.
        DataError: the original weights cannot be read, or are of another model.
        OptionError, UnknownPluginError: `into` names no codec.
    """
    _check(model, into)
    tools = codec_hook("merging")
    if tools is None:
        raise NotAvailableError(
            "no installed package can merge adapters. Add one: pip install 'ts-quant>=0.8,<0.9'"
        )
    merging = tools()
    places = list(merge_places(model))
    base: Any = model.get_base_model()  # type: ignore[operator]
    originals = Originals(original or base.config.name_or_path) if into == ORIGINAL else None
    # Whatever can be refused is refused before the first weight changes.
    ranks = dict.fromkeys((place.name for place in places), 0)
    if originals is not None:
        ranks = {place.name: _start_rank(place, started) for place in places}
        for place in places:
            originals.require(place.name)
    report = merging.MergeReport(into)
    uses = Counter(id(p) for m in base.modules() for p in m._parameters.values() if p is not None)
    options = {"block_size": block_size, "double_quant": double_quant}
    with torch.no_grad():
        for place in places:
            weight = place.weight
            original_weight = _original(originals, place.name, weight.dtype)
            try:
                if place.stacked:
                    merged = merge_stack(merging, place, into, original_weight, report, options)
                else:
                    rank = ranks[place.name]
                    merged, row = merging.merge_weight(
                        weight,
                        place.update(),
                        into,
                        original=original_weight,
                        started=place.holder.error_start.delta(rank) if rank else None,
                        name=place.name,
                        **options,
                    )
                    report.rows.append(row)
            except DataError:
                raise
            except ValueError as error:
                raise OptionError(str(error)) from error
            if uses[id(weight)] > 1:
                _untie(base, place.name, report)
            place.put(merged)
            if not place.stacked:
                _merge_bias(place.layer, place.holder)
            if hasattr(place.holder, "error_start"):
                del place.holder.error_start
        result = model.unload()  # type: ignore[operator]
        _untie_split(result, report)
        if into in (ORIGINAL, DEQUANTIZED):
            _plain(result, originals)
    return result, report


def _check(model: nn.Module, into: str) -> None:
    if not is_peft_model(model):
        raise StateError(f"a {type(model).__name__} has no adapters to merge.")
    if hasattr(model, "_trainstream_session"):
        raise StateError("the model is wrapped: call unwrap(model) first, then merge_adapter.")
    if into not in (ORIGINAL, DEQUANTIZED):
        from ts_core.registry import codecs

        codecs.get(into)  # raises, listing those that are installed


def _original(originals: Originals | None, name: str, dtype: torch.dtype) -> Tensor | None:
    """The original weight in the dtype the model computes in."""
    return None if originals is None else originals.read(name).to(dtype)


def _start_rank(place: MergePlace, asked: bool | None) -> int:
    """Rank of the start that the layer's adapter had at what quantization lost; 0 for none.

    Raises:
        StateError: it is not known, or asked for where there are no factors.
    """
    name, layer = place.name, place.layer
    if place.stacked:
        return 0
    start = getattr(place.holder, "error_start", None)
    if asked is False or (start is None and not asked):
        return 0
    if start is None:
        raise StateError(
            f"started=True, but {name} holds no factors of what quantization lost. Load the model "
            f"with the error_rank it was trained with, then the adapter."
        )
    if start.started is not None and start.started[0] in layer.active_adapters:
        return int(start.started[1])
    if asked is None:
        raise StateError(
            f"{name} was loaded with error_rank, but its adapter was not started in this process, "
            f"so it may or may not make up for quantization. Say started=True if it was trained "
            f"from such a start, started=False if not."
        )
    return int(next(layer.r[a] for a in layer.active_adapters if a in layer.scaling))


def _merge_bias(layer: Any, linear: Any) -> None:
    """LoRA's own bias (lora_bias=True), which is constant."""
    for adapter in layer.active_adapters:
        if adapter not in getattr(layer, "lora_B", {}):
            continue
        bias = getattr(layer.lora_B[adapter], "bias", None)
        if bias is not None:
            extra = bias * layer.scaling[adapter]
            if linear.bias is None:
                extra = extra.to(layer.lora_B[adapter].weight.dtype)
                linear.bias = nn.Parameter(extra.clone(), requires_grad=False)
            else:
                linear.bias.data = linear.bias.data + extra.to(linear.bias.dtype)


def _untie(base: Any, name: str, report: Any) -> None:
    """A merged weight is no longer that of the module it was shared with."""
    base.config.tie_word_embeddings = False
    tied = getattr(base, "all_tied_weights_keys", None)
    if tied:
        for key, source in list(tied.items()):
            if name in (key, source):
                del tied[key]
    report.notes.append(f"{name} was tied to another weight; they are two weights now")


def _untie_split(model: Any, report: Any) -> None:
    """Weights that the config ties, of which one was trained on its own (modules_to_save)."""
    for name, source in list((getattr(model, "all_tied_weights_keys", None) or {}).items()):
        if model.get_parameter(name) is not model.get_parameter(source):
            _untie(model, name, report)


def _plain(model: nn.Module, originals: Originals | None) -> None:
    """Ordinary tensors for the quantized weights that no adapter was on."""
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or not is_wrapper(parameter):
                continue
            dense: Tensor
            if originals is None:
                dense = parameter.dequantize()
            else:
                dense = originals.read(f"{name}.{leaf}" if name else leaf).to(parameter.dtype)
            module._parameters[leaf] = nn.Parameter(dense, requires_grad=False)
