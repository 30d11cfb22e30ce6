"""Minutes of streamed training with random delays, failures, evaluations and saves.

    python packages/ts-core/benchmarks/soak.py [--minutes 3] [--device cuda]

A model whose blocks stream and whose activations are kept, paged and recomputed trains beside its
resident twin. Random steps accumulate, raise in the middle of forward or backward, evaluate, or
save and load. No evaluation may differ, at the end no bit of weights or state may, and nothing may
have grown since the first fifth, with nothing under way: resident memory, threads, open files,
page-locked memory, device memory. Everything that is wrong is printed, with what there was after
three fifths; exit status 1 if anything is.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import sys
import threading
import time
import traceback
from typing import Any

import psutil
import torch
from torch import nn

from ts_core import pinned_stats, wrap
from ts_core.engine.host_buffers import TAG
from ts_core.testing import inject_delays, tiny_model

STREAMED = {
    "param_offload": 0.75,
    "activation_offload": 0.5,
    "recompute": [1],
    "min_offload_bytes": 1,
}
RESIDENT = {"param_offload": False, "activation_offload": False}
RSS_ROOM = 64 << 20
VOCABULARY = 37


class Raised(Exception):
    """What the failures raise."""


class Soak:
    """The pair of models and what is done to them.

    Args:
        device: "cuda" or "host".
        trained: train everything instead of adapters.
    """

    def __init__(self, device: str, trained: bool) -> None:
        self.device = device
        self.trained = trained
        wide = 256 if device == "cuda" else 16
        pair: list[tuple[nn.Module, Any]] = []
        for options in (STREAMED, RESIDENT):
            torch.manual_seed(0)
            made = tiny_model(depth=6, width=wide, dropout=0.1)
            if trained:
                made.requires_grad_(True)
            pair.append(
                wrap(
                    made,
                    lr=1e-3,
                    device=device,
                    max_grad_norm=1.0,
                    eager=False,
                    offload=True if trained else "auto",  # both by the same optimizer
                    **options,
                )
            )
        (self.model, self.optimizer), (self.twin, self.theirs) = pair
        self.rows = (8, 64) if device == "cuda" else (2, 7)
        self.done = {"steps": 0, "failures": 0, "evaluations": 0, "saves": 0}
        self.wrong: list[str] = []

    def batch(self, seed: int) -> torch.Tensor:
        drawn = torch.randint(
            0, VOCABULARY, self.rows, generator=torch.Generator().manual_seed(seed)
        )
        return drawn.to("cpu" if self.device == "host" else self.device)

    def step(self, model: nn.Module, optimizer: Any, seed: int, passes: int) -> None:
        torch.manual_seed(seed)  # dropout
        for part in range(passes):
            (model(self.batch(7 * seed + part)) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()

    def fail(self, seed: int, in_backward: bool) -> None:
        layers: Any = self.model.layers
        layer = layers[seed % len(layers)]

        def raise_(*_: Any) -> None:
            raise Raised

        def hook(_module: nn.Module, _args: Any, out: torch.Tensor) -> None:
            if in_backward:
                out.register_hook(raise_)
            else:
                raise_()

        handle = layer.lora_b.register_forward_hook(hook)
        try:
            self.model(self.batch(seed)).backward()
            raise RuntimeError("a failure that did not fail")
        except Raised:
            pass
        finally:
            handle.remove()
        self.optimizer.zero_grad()
        self.done["failures"] += 1

    def round(self, number: int, chance: float) -> None:
        """One step of both, and maybe something before it."""
        if chance < 0.06:
            self.fail(number, in_backward=chance >= 0.03)
        elif chance < 0.09:
            with torch.no_grad():
                batch = self.batch(number)
                found, wanted = self.model.eval()(batch), self.twin.eval()(batch)
            if not torch.equal(found, wanted):
                self.wrong.append(f"step {number}: an evaluation differs")
            self.model.train()
            self.twin.train()
            self.done["evaluations"] += 1
        elif chance < 0.11:
            saved = {name: value.clone() for name, value in self.model.state_dict().items()}
            state = copy.deepcopy(self.optimizer.state_dict())
            self.step(self.model, self.optimizer, 5000 + number, 1)  # undone by what follows
            self.model.load_state_dict(saved)
            self.optimizer.load_state_dict(state)
            self.done["saves"] += 1
        passes = 2 if chance > 0.9 else 1
        self.optimizer.accumulation_steps = self.theirs.accumulation_steps = passes
        self.step(self.model, self.optimizer, number, passes)
        self.step(self.twin, self.theirs, number, passes)
        self.done["steps"] += 1

    def different(self) -> list[str]:
        """Names of weights and optimizer state that are not the twin's.

        Weights that stream are CPU tensors outside their block, so all are compared there.
        """
        theirs = self.twin.state_dict()
        names = [
            name
            for name, found in self.model.state_dict().items()
            if not torch.equal(found.cpu(), theirs[name].cpu())
        ]
        states = [each.state_dict()["state"] for each in (self.optimizer, self.theirs)]
        for number, mine in states[0].items():
            wanted = states[1][number]
            names += [
                f"{key} of parameter {number}"
                for key, value in mine.items()
                if not torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(wanted[key]).cpu())
            ]
        return names

    def footprint(self) -> dict[str, int]:
        """What may not grow, with nothing under way."""
        for optimizer in (self.optimizer, self.theirs):
            optimizer.synchronize()
        self.model._trainstream_session.copies.synchronize()
        return footprint(self.device)


def footprint(device: str) -> dict[str, int]:
    """What may not grow."""
    gc.collect()
    process, stats = psutil.Process(), pinned_stats()
    found = {
        "threads": threading.active_count(),
        "arena bytes": stats["arena_bytes"],
        "arena used": stats["arena_used"] - stats.get(TAG, 0),
        "paged activations": stats.get(TAG, 0),
        "RSS": process.memory_info().rss,
    }
    if os.name == "posix":
        found["files"] = min(_open_files(process) for _ in range(5))
    if device == "cuda":
        torch.cuda.synchronize()
        found["device bytes"] = torch.cuda.memory_allocated()
    return found


def _open_files(process: psutil.Process) -> int:
    time.sleep(0.01)  # the watch on RAM opens files of /proc for a moment
    return process.num_fds()


def soak(device: str, trained: bool, seconds: float, steps: int | None) -> list[str]:
    """Run one; returns what is wrong."""
    both = Soak(device, trained)
    choose = random.Random(0)
    looks: list[dict[str, int]] = []
    begun = time.monotonic()
    number = 0
    with inject_delays(3, max_ms=0.3, share=0.05):
        while number < (steps or sys.maxsize) and time.monotonic() - begun < seconds:
            both.round(number, choose.random())
            number += 1
            share = number / steps if steps else (time.monotonic() - begun) / seconds
            while len(looks) < 2 and share >= (0.2, 0.6)[len(looks)]:
                looks.append(both.footprint())
    first, middle, last = *looks, both.footprint()
    growth = {name: last[name] - first[name] for name in last}
    what = "everything" if trained else "adapters"
    print(f"{device}, {what} trained: {both.done}; growth {growth}", flush=True)
    wrong = both.wrong + [f"{name} differs" for name in both.different()]
    # Buffers of a step that failed may still be held when the next one asks for its own.
    if growth.pop("paged activations") > first["paged activations"]:
        wrong.append("paged activations grew by more than another step's")
    if growth.pop("RSS") > RSS_ROOM:
        wrong.append("resident memory grew")
    wrong += [
        f"{name} grew from {first[name]} by way of {middle[name]} to {last[name]}"
        for name in growth
        if first[name] < last[name]
    ]
    return [f"{what} trained: {line}" for line in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--minutes", type=float, default=3.0, help="for both runs together")
    parser.add_argument("--steps", type=int, help="at most so many of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = []
    for trained in (False, True):
        try:
            wrong += soak(options.device, trained, options.minutes * 30, options.steps)
        except Exception as error:  # the other run goes on
            traceback.print_exc()
            wrong.append(f"{'everything' if trained else 'adapters'} trained: {error!r}")
    for line in wrong:
        print("wrong:", line)
    print("nothing differs, nothing grew" if not wrong else f"{len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
