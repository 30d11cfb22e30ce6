"""Paging of frozen stacked experts: wrap(moe_paging=True).

Each layer's experts stay in host memory. When the router has picked, the host learns which (the one
wait that this needs), their rows are copied to the device, and the layer's own forward runs over
them as over a smaller stack: the same products in the same order, so the same bits. Backward copies
them again, those of the layer before at the same time.

What a model's layers look like is told by the plug-ins of the group `trainstream.models` that offer
`find_experts(model) -> list[StackedExperts]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ts_core.engine.experts_calls import ExpertCalls
from ts_core.engine.experts_decoded import Forwards
from ts_core.engine.experts_layer import (
    ExpertLayer,
    StackAdapter,
    StackedExperts,
    expert_bytes,
    split_leaves,
)
from ts_core.engine.experts_slots import SLOTS, ExpertSlots
from ts_core.errors import NotAvailableError, OptionError
from ts_core.memory.arena import PinnedArena
from ts_core.registry import models
from ts_core.schedule import ModelProfile
from ts_core.schedule.plan import human
from ts_core.store.leaves import Leaf
from ts_core.transfer import CopyEngine

__all__ = ["ExpertPaging", "StackAdapter", "StackedExperts", "experts_to_page", "find_experts"]


def find_experts(model: nn.Module) -> list[StackedExperts]:
    """The modules of `model` that stack experts, in order, by the installed family plug-ins."""
    found: list[StackedExperts] = []
    for name in models.names():
        find = getattr(models.get(name), "find_experts", None)
        if find is not None:
            known = {id(spec.module) for spec in found}
            found += [spec for spec in find(model) if id(spec.module) not in known]
    return found


def experts_to_page(model: nn.Module, wanted: bool) -> list[StackedExperts]:
    """What moe_paging pages; [] when it is off.

    Raises:
        OptionError: the model has no frozen stacked experts that an installed package knows.
        NotAvailableError: experts that are adapted or stored in a way that cannot be paged.
    """
    if not wanted:
        return []
    found = find_experts(model)
    for spec in found:
        if spec.refused:
            raise NotAvailableError(f"moe_paging=True: {spec.name}: {spec.refused}")
    frozen = [spec for spec in found if spec.pageable()]
    if not frozen:
        why = (
            "its stacked experts are trained, and only frozen ones can be paged"
            if found
            else "no stacked experts were found in the model (pip install 'ts-hf>=0.8,<0.9' adds "
            "the families of transformers)"
        )
        raise OptionError(f"moe_paging=True: {why}. Use moe_paging=False.")
    for spec in frozen:
        for name in spec.pageable():
            split_leaves(f"{spec.name}.{name}", spec.module._parameters[name])  # type: ignore[arg-type]
    return frozen


def parameters_of(experts: Sequence[StackedExperts]) -> set[int]:
    """`id`s of the parameters that are paged by expert, and so by nothing else."""
    return {id(spec.module._parameters[name]) for spec in experts for name in spec.pageable()}


def without_experts(
    profile: ModelProfile, experts: Sequence[StackedExperts], per_weight: float | None = None
) -> ModelProfile:
    """`profile` with paged experts off the device, but for the slots they may grow to.

    Args:
        profile: with the experts as they are.
        experts: those that are paged.
        per_weight: bytes per weight in the codec that plain ones will be stored in, or None.
    """
    if not experts:
        return profile
    sizes = [expert_bytes(spec) for spec in experts]
    copied = [expert_bytes(spec, per_weight) for spec in experts]
    slots = min(len(sizes), SLOTS) * max(copied)
    unloaded = [k for k, spec in enumerate(experts) if _on_meta(spec)]  # takes host memory yet
    return replace(
        profile,
        fixed_device=profile.fixed_device - sum(sizes) + slots,
        host_state=profile.host_state + sum(copied[k] for k in unloaded),
        to_load=profile.to_load - sum(sizes[k] for k in unloaded),
    )


def _on_meta(spec: StackedExperts) -> bool:
    return any(spec.module._parameters[name].is_meta for name in spec.pageable())  # type: ignore[union-attr]


class ExpertPaging:
    """The paged experts of a wrapped model.

    Args:
        experts: from `experts_to_page`.
        copies: the session's copy engine.
        arena: host memory.
    """

    def __init__(
        self, experts: Sequence[StackedExperts], copies: CopyEngine, arena: PinnedArena
    ) -> None:
        self.layers = [ExpertLayer(index, spec, arena) for index, spec in enumerate(experts)]
        self.slots = ExpertSlots(copies, self.layers)
        most = max(layer.count for layer in self.layers)
        self._hit_h = arena.empty((most + 1,), torch.uint8, tag="experts")
        self.calls = ExpertCalls(self.slots, self.layers, self._hit_h)
        self._forwards = Forwards()
        for layer in self.layers:
            self._forwards.redirect(layer.spec, partial(self.calls.run, layer))

    def leaves(self) -> list[Leaf]:
        """The plain tensors that stay in host memory."""
        return [part.placement.leaf for layer in self.layers for part in layer.parts]

    def in_words(self) -> str:
        """What is paged, for the events."""
        total = sum(layer.image.size_bytes for layer in self.layers)
        return (
            f"moe_paging: the experts of {len(self.layers)} layers ({human(total)}) stay in host "
            f"memory; each layer copies those its tokens pick"
        )

    def new_pass(self) -> None:
        """Before the model's forward."""
        self.calls.new_pass()

    def report(self) -> dict[str, Any]:
        """Counters and sizes: layers, experts per layer, host and slot bytes, what was copied."""
        return {
            "layers": len(self.layers),
            "experts": [layer.count for layer in self.layers],
            "host_bytes": sum(layer.image.size_bytes for layer in self.layers),
            "slot_bytes": self.slots.size_bytes,
            **asdict(self.slots.stats),
        }

    def close(self) -> None:
        """Give the modules their own forwards back, and the device its memory."""
        self._forwards.undo()
        self.calls.forget()
        self.slots.close()
        for layer in self.layers:
            layer.image.take_writes()
            layer.image.bind_host()
