"""Which param group holds a parameter now, and what hyper-parameters it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ts_core.errors import StateError
from ts_core.optim.layout import Hyper

if TYPE_CHECKING:
    from ts_core.optim.buckets import Bucket


class GroupTable:
    """A table of the optimizer's param groups, made anew when the user has changed one.

    Args:
        groups: returns the param groups.
    """

    def __init__(self, groups: Callable[[], list[dict[str, Any]]]) -> None:
        self._groups = groups
        self._signature: tuple[tuple[int, int, int], ...] = ()
        self._by_id: dict[int, dict[str, Any]] = {}

    def group_of(self, param: torch.nn.Parameter) -> dict[str, Any] | None:
        """The param group that holds `param` now; None if the user took it out."""
        self._refresh()
        return self._by_id.get(id(param))

    def hyper(self, bucket: Bucket) -> Hyper:
        """The hyper-parameters of one bucket at present."""
        return self.hypers([bucket])[bucket]

    def hypers(self, buckets: Sequence[Bucket]) -> dict[Bucket, Hyper]:
        """Those of each bucket.

        Raises:
            StateError: parameters of one bucket are in different groups by now.
        """
        self._refresh()
        by_group: dict[int, Hyper] = {}
        found: dict[Bucket, Hyper] = {}
        for bucket in buckets:
            group = self._only_group(bucket)
            if id(group) not in by_group:
                by_group[id(group)] = _hyper(group)
            found[bucket] = by_group[id(group)]
        return found

    def _refresh(self) -> None:
        groups = self._groups()
        signature = tuple(
            (id(group), id(group["params"]), len(group["params"])) for group in groups
        )
        if signature != self._signature:
            self._signature = signature
            self._by_id = {id(p): group for group in groups for p in group["params"]}

    def _only_group(self, bucket: Bucket) -> dict[str, Any]:
        found = [self._by_id.get(id(param)) for param in bucket.params]
        groups = [group for group in found if group is not None]
        if any(group is not groups[0] for group in groups):
            raise StateError(
                "parameters were moved between param groups after their optimizer state was made. "
                "Build the optimizer with the groups as they are to be."
            )
        return groups[0]


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
