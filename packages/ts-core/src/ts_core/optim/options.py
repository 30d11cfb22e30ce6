"""How an OffloadAdamW takes its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ts_core.errors import OptionError
from ts_core.optim import checks


@dataclass
class StepOptions:
    """Options of a step; each may be changed between steps.

    Attributes:
        max_grad_norm: clip the global gradient norm to this; None does not clip.
        compute_grad_norm: measure the norm without clipping.
        skip_nonfinite: leave out a step whose gradients hold NaN or infinities.
        threads: host threads; 0 for all usable cores.
        accumulation: backward passes per step.
        eager_choice: True, False, or None: unless the norm is needed.
        headroom: share of the device memory that state leaves free.
    """

    max_grad_norm: float | None = None
    compute_grad_norm: bool = False
    skip_nonfinite: bool = False
    threads: int = 0
    accumulation: int = 1
    eager_choice: bool | None = None
    headroom: float = 0.10

    @property
    def needs_norm(self) -> bool:
        """Whether the whole gradient must be known before any update."""
        return self.max_grad_norm is not None or self.compute_grad_norm or self.skip_nonfinite

    @property
    def eager(self) -> bool:
        """Whether updates start during backward."""
        choice = self.eager_choice
        return not self.needs_norm and choice is not False

    @property
    def gradients_wait(self) -> bool:
        """Whether gradients for updates by the device stay there until the last backward ends."""
        return not self.eager or self.accumulation > 1

    def set_accumulation(self, value: Any) -> None:
        """Check and set `accumulation`."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(
                f"accumulation_steps={value!r} is not accepted. Use an integer of at least 1."
            )
        self.accumulation = value

    def set_eager(self, value: bool | None) -> None:
        """Check and set `eager_choice`."""
        checks.eager(value, self.needs_norm)
        self.eager_choice = value

    def join(
        self,
        max_grad_norm: float | None,
        accumulation: int,
        eager: bool | None,
        threads: int | None,
    ) -> None:
        """Take a session's options where they are not its defaults."""
        if max_grad_norm is not None:
            self.max_grad_norm = max_grad_norm
        if accumulation != 1:
            self.set_accumulation(accumulation)
        if eager is not None:
            self.set_eager(eager)
        if threads is not None:
            self.threads = threads


class Option:
    """An attribute of an optimizer that is kept in its `step_options`."""

    def __init__(self, name: str, doc: str) -> None:
        self._name = name
        self.__doc__ = doc

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else getattr(owner.step_options, self._name)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner.step_options, self._name, value)
