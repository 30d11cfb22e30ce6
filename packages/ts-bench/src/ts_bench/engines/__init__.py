"""What is compared: one object per training stack, found as entry points.

An engine of the group `trainstream.bench_engines` is any object like `Engine`. Each runs in a
process of its own, so it may import, patch and configure what it likes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ts_bench.scenarios import Scenario
from ts_core.errors import OptionError, TrainStreamError

API_VERSION = 1


class UnsupportedError(TrainStreamError, NotImplementedError):
    """The engine cannot run this scenario at all; the message says why."""


class Step(Protocol):
    """One optimizer step: forward, backward, update, gradients cleared.

    It may also have `use(scenario)`, which goes on with batches of another scenario with the same
    model, `transferred()`, which tells the bytes copied between host and device so far, and
    `settled()`, asked once after each step, whether it has stopped changing how it runs: the
    warm-up goes on until then, within bounds.
    """

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

    It may also have `with_options(options)`, which returns the engine with these settings of its
    own (as in `trainstream[kernels=True]`), and `own_interpreter = True` if it must be imported
    before anything else is.
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


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of an engine given as `name` or `name[option=value,...]`.

    Values are Python literals, or else text.

    Raises:
        OptionError: it is neither.
    """
    found = re.fullmatch(r"([^\[\]]+)(?:\[([^\[\]]*)\])?", spec)
    options: dict[str, Any] = {}
    for part in filter(None, (found.group(2) or "").split(",") if found else []):
        name, equals, value = part.partition("=")
        if not (name.strip().isidentifier() and equals):
            found = None
            break
        try:
            options[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[name.strip()] = value.strip()
    if found is None:
        raise OptionError(
            f"engine: {spec!r} is not accepted; use a name, or name[option=value,option=value]."
        )
    return found.group(1).strip(), options


def split_specs(text: str) -> list[str]:
    """The engines of a comma-separated list, with their options."""
    return [spec.strip() for spec in re.split(r",(?![^\[]*\])", text)]


def get_engine(spec: str) -> Engine:
    """The engine of `name` or `name[option=value,...]`.

    Raises:
        OptionError: the engine takes no options, or `spec` cannot be read.
        RegistryError: there is no such engine, or it is broken.
    """
    from ts_core.registry import bench_engines

    name, options = parse_spec(spec)
    engine = cast(Engine, bench_engines.get(name))
    if not options:
        return engine
    with_options = getattr(engine, "with_options", None)
    if with_options is None:
        raise OptionError(f"engine: {name!r} takes no options, and {spec!r} gives it some.")
    return cast(Engine, with_options(options))
