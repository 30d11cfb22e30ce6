"""Imported by the process that workers are forked from: does their common imports.

The environment variable TS_BENCH_PRELOAD says which, and what there is to know of GPUs, as JSON:
{"modules": [...], "facts": as from `cuda_facts.gather` or null}. A module that is not installed is
left out; one that fails is left to the workers, which tell in their records what came of it.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from contextlib import nullcontext

from ts_bench.cuda_facts import answering

VARIABLE = "TS_BENCH_PRELOAD"


def preload(told: str) -> None:
    """Do the imports that `told` asks for."""
    wanted = json.loads(told)
    facts = wanted["facts"]
    with nullcontext() if facts is None else answering(facts):
        for name in wanted["modules"]:
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(f"not preloaded: {error}", flush=True)
            except Exception:  # a rival's package may raise anything
                traceback.print_exc()


if VARIABLE in os.environ:
    preload(os.environ.pop(VARIABLE))
