"""Host memory: the page-locked arena, what RAM there is, and ledgers of device memory by tag."""

from ts_core.memory.arena import PinnedArena, default_arena, pinned_stats, reserve_pinned
from ts_core.memory.ledger import Ledger, Reservation
from ts_core.memory.ram import page_lock_limit_bytes, ram_available_bytes, ram_limit_bytes

__all__ = [
    "Ledger",
    "PinnedArena",
    "Reservation",
    "default_arena",
    "page_lock_limit_bytes",
    "pinned_stats",
    "ram_available_bytes",
    "ram_limit_bytes",
    "reserve_pinned",
]
