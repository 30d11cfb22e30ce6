"""ts_bench: trainstream beside its rivals, measured in one run.

Importing this loads neither torch nor any engine; each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ts_bench.records import Measurement as Measurement
    from ts_bench.records import Record as Record
    from ts_bench.rounds import Settings as Settings
    from ts_bench.rounds import compare as compare
    from ts_bench.scenarios import SCENARIOS as SCENARIOS
    from ts_bench.scenarios import Scenario as Scenario
    from ts_bench.scenarios import get_scenario as get_scenario
    from ts_bench.summary import summarize as summarize

__version__ = "0.8.0"

_HOMES = {
    "Measurement": "ts_bench.records",
    "Record": "ts_bench.records",
    "SCENARIOS": "ts_bench.scenarios",
    "Scenario": "ts_bench.scenarios",
    "Settings": "ts_bench.rounds",
    "compare": "ts_bench.rounds",
    "get_scenario": "ts_bench.scenarios",
    "summarize": "ts_bench.summary",
}

__all__ = [
    "SCENARIOS",
    "Measurement",
    "Record",
    "Scenario",
    "Settings",
    "compare",
    "get_scenario",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ts_bench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
