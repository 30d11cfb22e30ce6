"""Engines of a third party, some of which misbehave, installed in a folder of the test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINES = """
import os, signal, time
import torch


class Step:
    def __init__(self, losses):
        self.losses = iter(losses)

    def __call__(self):
        time.sleep(0.01)
        return torch.tensor(next(self.losses))

    def details(self):
        return {"threads": torch.get_num_threads(), "seed": torch.initial_seed()}


class Engine:
    API_VERSION = 1
    description = "made for a test"
    variants = ("plain", "small")

    def __init__(self, name, behave):
        self.name, self.behave = name, behave

    def available(self):
        return "needs a licence: pip install licence" if self.name == "absent" else None

    def prepare(self, scenario, device, variant):
        return self.behave(scenario, device, variant)


def good(scenario, device, variant):
    return Step([float(scenario.tokens + i) for i in range(99)])

def greedy(scenario, device, variant):
    if variant == "plain":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")
    return good(scenario, device, variant)

def hungry(scenario, device, variant):
    raise MemoryError(f"{variant} does not fit")

def nan(scenario, device, variant):
    return Step([1.0, float("nan")] * 50)

def failing(scenario, device, variant):
    raise KeyError("gate_proj")

def choosy(scenario, device, variant):
    from ts_bench.engines import UnsupportedError
    raise UnsupportedError(f"{scenario.mode} is not for me")

def leaving(scenario, device, variant):
    print("last words", flush=True)
    os._exit(3)

def killed(scenario, device, variant):
    os.kill(os.getpid(), signal.SIGKILL)

def hanging(scenario, device, variant):
    time.sleep(600)

BEHAVIOURS = [good, greedy, hungry, nan, failing, choosy, leaving, killed, hanging]
globals().update({f.__name__.upper(): Engine(f.__name__, f) for f in BEHAVIOURS})
ABSENT = Engine("absent", good)
"""

POINTS = """
[trainstream.bench_engines]
good = bench_engines_of_test:GOOD
greedy = bench_engines_of_test:GREEDY
hungry = bench_engines_of_test:HUNGRY
nan = bench_engines_of_test:NAN
failing = bench_engines_of_test:FAILING
choosy = bench_engines_of_test:CHOOSY
leaving = bench_engines_of_test:LEAVING
killed = bench_engines_of_test:KILLED
hanging = bench_engines_of_test:HANGING
absent = bench_engines_of_test:ABSENT
broken = no_such_module_of_test:ENGINE
"""


@pytest.fixture
def odd_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes the engines above findable, here and in worker processes."""
    folder = tmp_path / "third-party"
    info = folder / "odd_engines-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "bench_engines_of_test.py").write_text(ENGINES, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-engines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    inherited = os.environ.get("PYTHONPATH")
    path = [str(folder), *([inherited] if inherited else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    yield folder
    sys.modules.pop("bench_engines_of_test", None)
