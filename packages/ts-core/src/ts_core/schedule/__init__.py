"""Deciding where blocks live: profiles and plans are plain data, the planner a pure function."""

from __future__ import annotations

from ts_core.schedule.hardware import profile_hardware
from ts_core.schedule.plan import MachineProfile, ModelProfile, Plan, PlanOptions
from ts_core.schedule.planner import make_plan, spread
from ts_core.schedule.rates import HardwareProfile

__all__ = [
    "HardwareProfile",
    "MachineProfile",
    "ModelProfile",
    "Plan",
    "PlanOptions",
    "make_plan",
    "profile_hardware",
    "spread",
]
