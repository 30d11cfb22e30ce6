"""What is compared: one object per training stack, found as entry points.

An engine of the group `trainstream.bench_engines` is any object like `Engine`. Each runs in a
process of its own, so it may import, patch and configure what it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ts_bench.scenarios import Scenario
from ts_core.errors import TrainStreamError

API_VERSION = 1


class UnsupportedError(TrainStreamError, NotImplementedError):
    """The engine cannot run this scenario at all; the message says why."""


class Step(Protocol):
    """One optimizer step: forward, backward, update, gradients cleared."""

    def __call__(self) -> Tensor:
        """Run it; returns the loss, a detached 0-d tensor that need not have been computed yet."""

    def details(self) -> dict[str, Any]:
        """What a reader of the record should know about the set-up, as plain data."""


class Engine(Protocol):
    """A training stack that `compare` can run.

    Attributes:
        API_VERSION: 1.
        name: as in the entry point.
        description: one line for people, settings included.
        variants: settings, from the fastest to the one that needs least memory. When one runs
            out of memory, `compare` tries the next in a new process, and records both.
    """

    API_VERSION: int
    name: str
    description: str
    variants: Sequence[str]

    def available(self) -> str | None:
        """None if it can run here, else what is missing and the line that installs it."""

    def prepare(self, scenario: Scenario, device: torch.device, variant: str) -> Step:
        """Build the model, its adapters and its optimizer on `device`.

        Any memory cap is already in force. Random numbers are seeded by the caller.

        Raises:
            UnsupportedError: the scenario is none of this engine's.
        """
