"""Stacked experts of transformers models: where they are and how their layers read them.

transformers 5 keeps the experts of a mixture-of-experts layer as parameters whose first dimension
counts them, in a module of their own whose forward takes (hidden states, expert indices, routing
weights). All its families follow this form, so it is found by shape and not by name.
"""

from __future__ import annotations

from ts_hf.experts.families import StackedExpertsPlugin, find_experts

__all__ = ["EXPERTS", "find_experts"]

EXPERTS = StackedExpertsPlugin()
