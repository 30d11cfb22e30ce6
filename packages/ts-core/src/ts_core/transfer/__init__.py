"""Copies between host and device, and every wait between streams."""

from __future__ import annotations

from ts_core.transfer.copies import CopyEngine
from ts_core.transfer.edges import DelayPlan, inject_delays, wait
from ts_core.transfer.pending import PendingCopy
from ts_core.transfer.slots import Slot, SlotRing
from ts_core.transfer.totals import transfer_stats

__all__ = [
    "CopyEngine",
    "DelayPlan",
    "PendingCopy",
    "Slot",
    "SlotRing",
    "inject_delays",
    "transfer_stats",
    "wait",
]
