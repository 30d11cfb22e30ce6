"""Layers whose experts are stored in a codec's format and are not paged by expert.

Their weights are wherever their block is (on the device, or in a slot while the block runs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ts_core.engine.experts_decoded import (
    ADAPTED,
    Decoded,
    Factors,
    Forwards,
    OneByOne,
    SavedView,
    fold,
    picked_factors,
    replaced,
    saved_views,
    stored_stacks,
)
from ts_core.engine.experts_layer import StackedExperts
from ts_core.store.leaves import is_wrapper


class StoredExperts:
    """Runs such layers: weights are decoded for the time of one layer only.

    Args:
        experts: modules with at least one stored stack.
    """

    def __init__(self, experts: Sequence[StackedExperts]) -> None:
        self._forwards = Forwards()
        self._decoded = Decoded()
        self._now: _Call | None = None
        for spec in experts:
            self._forwards.redirect(spec, partial(self._run, spec))

    def close(self) -> None:
        """Give the modules their own forwards back."""
        self._decoded.clear()
        self._forwards.undo()

    def decoded_for(self, call: _Call) -> Decoded:
        """What is decoded, for this call only."""
        if self._now is not call:
            self._decoded.clear()
            self._now = call
        return self._decoded

    def _run(
        self, spec: StackedExperts, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call = _Call(self, spec)
        try:
            with saved_views(call), replaced(spec.module, call.stand_ins()):
                return forward(*args, **kwargs)
        finally:
            self._decoded.clear()


class _Call:
    """One forward of one such layer; the home of its saved tensors. A key is (stack, row)."""

    def __init__(self, owner: StoredExperts, spec: StackedExperts) -> None:
        self._owner = owner
        self._spec = spec
        self._adapted: dict[int, Factors] = {}
        self._names = stored_stacks(spec)
        self._adapters = spec.adapters()
        self._names += [name for name in self._adapters if name not in self._names]

    def stand_ins(self) -> dict[str, Any]:
        """What forward reads as the stacked parameters."""
        one_by_one = self._spec.one_by_one()
        values: dict[str, Any] = {}
        for number, name in enumerate(self._names):
            adapters = self._adapters.get(name)
            if adapters:
                factors = picked_factors(adapters, None)
                self._adapted[number] = [(a.detach(), b.detach(), scale) for a, b, scale in factors]
                adapted = fold(self._base(number, None), factors)
                values[name] = self._owner.decoded_for(self).put(number, adapted)
            elif one_by_one:
                values[name] = OneByOne(self._parameter(number), partial(self._base, number))
            else:
                values[name] = self._base(number, None)
        return values

    def saved(self, tensor: Tensor) -> SavedView | None:
        key = self._owner.decoded_for(self).key_of(tensor)
        return None if key is None else SavedView(self, key, self.memory(key), tensor)

    def memory(self, key: tuple[int, int | None]) -> Tensor:
        stack, row = key
        if row != ADAPTED:
            return self._base(stack, row)
        decoded = self._owner.decoded_for(self)
        found = decoded.find(key)
        if found is not None:
            return found
        return decoded.put(stack, fold(self._base(stack, None), self._adapted[stack]).detach())

    def _base(self, stack: int, row: int | None) -> Tensor:
        parameter = self._parameter(stack)
        if not is_wrapper(parameter):
            return parameter.detach()
        return self._owner.decoded_for(self).get(parameter, stack, row)

    def _parameter(self, stack: int) -> Tensor:
        parameter = self._spec.module._parameters[self._names[stack]]
        assert parameter is not None
        return parameter
