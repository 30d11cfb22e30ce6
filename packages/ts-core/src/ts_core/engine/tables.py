"""Frozen tables in host memory: a step reads the rows that it needs over the link.

The weight of an input embedding stays a tensor of the device, whose bytes lie in page-locked host
memory. The device's own kernel gathers the rows from there, so results are the same bit for bit,
nothing is copied ahead and the host waits for nothing. Any other use of the weight is right, too,
at the speed of the link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ts_core.device import Device
from ts_core.errors import OutOfBudgetError
from ts_core.memory.arena import PinnedArena
from ts_core.schedule.plan import human
from ts_core.store.leaves import Leaf, is_wrapper, stored_bytes
from ts_core.store.unloaded import can_load, give_memory, values_of

# Smaller tables stay on the device.
LEAST_BYTES = 16 << 20


def lookup_tables(model: nn.Module, leaves: Sequence[Sequence[Leaf]]) -> list[nn.Parameter]:
    """Frozen weights of embeddings that no other module uses, outside of what can be paged.

    Those tied to an output layer are read as a whole in each step, and those with `max_norm` are
    written to.

    Args:
        model: the model.
        leaves: per block, what can be paged.
    """
    pageable = {id(leaf.owner) for block in leaves for leaf in block}
    holders = [
        p for module in model.modules() for p in module._parameters.values() if p is not None
    ]
    uses = Counter(map(id, holders))
    memory = Counter(
        p.untyped_storage()._cdata for p in {id(p): p for p in holders}.values() if _plain(p)
    )
    found = []
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            continue
        table = module._parameters["weight"]
        if table is None:
            continue
        alone = uses[id(table)] == 1 and id(table) not in pageable and _plain(table)
        if not alone or memory[table.untyped_storage()._cdata] > 1 or table.requires_grad:
            continue
        if table.is_contiguous() and stored_bytes(table) >= LEAST_BYTES:
            found.append(table)
    return found


def _plain(param: nn.Parameter) -> bool:
    values = not param.is_meta or can_load(param)
    return values and not is_wrapper(param) and param.layout is torch.strided


class HostTables:
    """Tables whose bytes are in host memory.

    Args:
        device: that reads them.
        arena: host memory.
    """

    def __init__(self, device: Device, arena: PinnedArena) -> None:
        self._device = device
        self._arena = arena
        self._moved: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []

    @property
    def size_bytes(self) -> int:
        """Bytes that are in host memory."""
        return sum(stored_bytes(table) for table, _, _ in self._moved)

    def take(self, tables: Sequence[nn.Parameter], say: Callable[[str], None]) -> bool:
        """Move `tables` to host memory: all of them, or none (False)."""
        for table in tables:
            why = self._take(table)
            if why:
                say(f"input embeddings stay on the device, since {why}")
                self.restore()
                return False
        return True

    def _take(self, table: nn.Parameter) -> str:
        try:
            memory = self._arena.try_pinned(stored_bytes(table), tag="tables")
        except OutOfBudgetError as error:
            return str(error)
        if memory is None:
            return f"page-locking {human(stored_bytes(table))} of host memory was refused"
        host = memory.view(table.dtype).view(table.shape)
        seen = self._device.mapped(host)
        if seen is None:
            return "the device cannot read page-locked host memory"
        if can_load(table):
            host.copy_(values_of(table))
            give_memory(table, seen)
        else:
            host.copy_(table.detach())
            table.data = seen
        self._moved.append((table, host, seen))
        return ""

    def restore(self) -> None:
        """Give the tables memory of the device."""
        target = self._device.torch_device
        for table, host, seen in self._moved:
            if table.data_ptr() == seen.data_ptr():  # not given other memory meanwhile
                table.data = host.clone() if target.type == "cpu" else host.to(target)
        self._moved.clear()
