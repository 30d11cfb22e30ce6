"""Where a PEFT model has LoRA adapters, and what each adds to the weight below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import NotAvailableError, StateError
from ts_core.store.leaves import is_wrapper


class MergePlace:
    """One adapted weight: a matrix, or a stack of experts' matrices.

    Args:
        name: the weight's name in the base model.
        layer: PEFT's layer, with at least one active adapter.
        leaf: the weight's name in the module below the layer.
    """

    def __init__(self, name: str, layer: Any, leaf: str) -> None:
        self.name = name
        self.layer = layer
        self.leaf = leaf
        self.holder: Any = layer.get_base_layer()
        self.stacked = self.weight.dim() == 3

    @property
    def weight(self) -> Tensor:
        """The weight as it is stored now."""
        weight: Tensor = self.holder._parameters[self.leaf]
        return weight

    @property
    def adapters(self) -> list[str]:
        """Names of the active adapters."""
        return [name for name in self.layer.active_adapters if name in self.layer.scaling]

    def put(self, merged: Tensor) -> None:
        """Replace the weight."""
        self.holder._parameters[self.leaf] = nn.Parameter(merged, requires_grad=False)

    def update(self) -> Tensor:
        """fp32: what all active adapters add to a matrix, of its shape."""
        total: Tensor | None = None
        for adapter in self.adapters:
            part = self.layer.get_delta_weight(adapter).float()
            if self.layer.use_dora.get(adapter):
                part = self._dora(adapter, part)
            total = part if total is None else total + part
        assert total is not None
        return total

    def update_of(self, expert: int) -> Tensor:
        """fp32: what all active adapters add to one expert's matrix."""
        total: Tensor | None = None
        for adapter in self.adapters:
            left, right, scale = self.layer.get_delta_factors(adapter)
            part = (left[expert].float() @ right[expert].float()) * scale
            total = part if total is None else total + part
        assert total is not None
        return total

    def _dora(self, adapter: str, part: Tensor) -> Tensor:
        """DoRA's update: m * V / ||V|| - W with V = W + B A (arXiv:2402.09353, eq. 5).

        The norm is that of each output's weights. Several adapters add their updates.
        """
        weight: Any = self.weight
        exact = (weight.dequantize() if is_wrapper(weight) else weight).float()
        dim = 0 if getattr(self.layer, "fan_in_fan_out", False) else 1
        directed = exact + part
        length = torch.linalg.norm(directed, dim=dim, keepdim=True)
        magnitude = self.layer.lora_magnitude_vector[adapter].weight.float()
        update: Tensor = magnitude.view(length.shape) / length * directed - exact
        return update


def merge_places(model: nn.Module) -> Iterator[MergePlace]:
    """Every adapted weight of a PEFT model that has an active adapter, in order.

    Raises:
        StateError: adapters that are merged already.
        NotAvailableError: adapters that are not LoRA, or of something else than matrices.
    """
    base: Any = model.get_base_model()  # type: ignore[operator]
    found = False
    for name, layer in base.named_modules():
        if not (hasattr(layer, "base_layer") and hasattr(layer, "active_adapters")):
            continue
        found = True
        if getattr(layer, "merged", False):
            raise StateError(
                f"{name}: its adapter is merged already (merge_adapter of PEFT). Call "
                f"model.unmerge_adapter() first."
            )
        if not hasattr(layer, "lora_A") or not hasattr(layer, "get_delta_weight"):
            raise NotAvailableError(
                f"{name} has an adapter of type {type(layer).__name__}; this version merges LoRA."
            )
        leaf = getattr(layer, "parameter_name", "weight")
        weight = layer.get_base_layer()._parameters.get(leaf)
        dims = (2, 3) if hasattr(layer, "get_delta_factors") else (2,)
        if not isinstance(weight, Tensor) or weight.dim() not in dims:
            raise NotAvailableError(
                f"{name} ({type(layer.get_base_layer()).__name__}) has an adapter on something "
                f"other than matrices, which this version does not merge."
            )
        if any(adapter in layer.scaling for adapter in layer.active_adapters):
            yield MergePlace(f"{name.replace('.base_layer', '')}.{leaf}", layer, leaf)
    if not found:
        raise NotAvailableError("the model's adapters are not LoRA; this version merges LoRA.")


def merge_stack(
    merging: Any,
    place: MergePlace,
    into: str,
    original: Tensor | None,
    report: Any,
    options: dict[str, Any],
) -> Tensor:
    """Merge into a stack of experts, one expert at a time; each has a row in the report.

    Args:
        merging: the codecs' package's means of merging.
        place: the stack.
        into: as for `merge_adapter`.
        original: the full-precision stack, for "original".
        report: gets the rows.
        options: `block_size`, `double_quant`.
    """
    from ts_core.registry import codecs

    stack = place.weight
    dtype = stack.dtype if original is None else original.dtype
    result = torch.empty(stack.shape, dtype=dtype, device=stack.device)
    plain = into in ("original", "dequantized")
    for expert in range(stack.shape[0]):
        matrix, update = stack[expert], place.update_of(expert)
        merged, row = merging.merge_weight(
            matrix,
            update,
            into,
            original=None if original is None else original[expert],
            name=f"{place.name}[{expert}]",
            **options,
        )
        report.rows.append(row)
        result[expert] = merged if plain else matrix.float() + update
    if plain:
        return result
    encoded: Tensor = codecs.get(into).encode(result, name=place.name, **options)
    return encoded
