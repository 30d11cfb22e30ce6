"""The package's face: its names, and what importing it costs."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import ts_bench


def test_all_names_are_the_objects_and_stay_so() -> None:
    """Also once every module is imported: a module of the same name would take a name's place."""
    for module in pkgutil.walk_packages(ts_bench.__path__, "ts_bench."):
        if module.name not in ("ts_bench.__main__", "ts_bench.engines.bnb"):
            importlib.import_module(module.name)
    assert sorted(ts_bench._HOMES) == sorted(ts_bench.__all__)
    for name, home in ts_bench._HOMES.items():
        assert getattr(ts_bench, name) is getattr(importlib.import_module(home), name)


def test_importing_the_command_loads_no_torch() -> None:
    program = "import sys, ts_bench, ts_bench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
