"""What torch says about the GPUs, told without starting CUDA in the process that asks.

A process that is to be forked must not have started CUDA, and some libraries ask torch for the
properties of the GPU while they are imported. So another process is asked (`gather`), and torch's
questions are answered from what it said (`answering`) for as long as the imports take.

    python -m ts_bench.cuda_facts     # prints the facts as JSON
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

Facts = list[dict[str, Any]]  # properties of each GPU


def gather() -> Facts:
    """The facts of this machine's GPUs, from a process of its own; empty where there is none.

    Raises:
        RuntimeError: that process failed.
    """
    command = [sys.executable, "-m", "ts_bench.cuda_facts"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    found: Facts = json.loads(done.stdout.splitlines()[-1])
    return found


def read() -> Facts:
    """The facts of this machine's GPUs; starts CUDA in this process."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names = [name for name in dir(properties) if not name.startswith("_")]
        values = {name: getattr(properties, name) for name in names}
        kept = {k: v for k, v in values.items() if isinstance(v, bool | int | float | str)}
        found.append(kept)
    return found


@contextmanager
def answering(facts: Facts) -> Iterator[None]:
    """Answer torch.cuda's questions about devices from `facts`; afterwards torch does again.

    A function of torch.cuda that was kept somewhere meanwhile goes back to torch's own, too.
    """
    import torch

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: bool(facts),
        "device_count": lambda: len(facts),
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: SimpleNamespace(**facts[_index(device)]),
    }
    own = {name: getattr(torch.cuda, name) for name in answers}
    now = {"answering": True}

    def told(name: str) -> Callable[..., Any]:
        @functools.wraps(own[name])
        def function(*args: Any, **kwargs: Any) -> Any:
            return (answers if now["answering"] else own)[name](*args, **kwargs)

        return function

    for name in answers:
        setattr(torch.cuda, name, told(name))
    try:
        yield
    finally:
        now["answering"] = False
        for name, function in own.items():
            setattr(torch.cuda, name, function)
        interface = sys.modules.get("torch._dynamo.device_interface")
        if interface is not None:  # it keeps properties; the real ones are better
            getattr(interface, "caching_worker_device_properties", {}).clear()


def _index(device: Any) -> int:
    import torch

    if device is None or isinstance(device, int):
        return device or 0
    return torch.device(device).index or 0


if __name__ == "__main__":
    print(json.dumps(read()))
