"""How many labels count: in a batch, in an accumulation window, over an evaluation.

A mean over tokens does not depend on how the tokens were split into batches; a mean of the means of
batches does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_IGNORED = -100


def count_targets(inputs: Mapping[Any, Any]) -> Tensor | None:
    """Labels of a causal model's batch that are predicted: 0-d int64 on their device.

    Args:
        inputs: with labels [..., T], of which the first of each row is not predicted, or
            shift_labels [..., T].

    Returns:
        The count, or None if the batch has no such tensor.
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        labels = labels[..., 1:] if torch.is_tensor(labels) and labels.dim() else None
    return labels.ne(_IGNORED).sum() if torch.is_tensor(labels) else None


class WindowTargets:
    """The counts of the micro-batches of one accumulation window, known on the host.

    Batches come from the data loader in host memory, so counting stalls no GPU; a window with
    batches that lie elsewhere has no counts.
    """

    def __init__(self, batches: list[Any]) -> None:
        self._counts: list[int] = []
        self._next = 0
        self._mean_over: float | None = None  # the labels of a process on average, if several
        for batch in batches:
            count = (
                count_targets(batch) if isinstance(batch, dict) or hasattr(batch, "get") else None
            )
            if count is None or count.device.type != "cpu":
                self._counts = []
                return
            self._counts.append(int(count))

    @property
    def total(self) -> int | None:
        """Of the whole window; None if unknown."""
        return sum(self._counts) if self._counts else None

    def count_over(self, accelerator: Any) -> None:
        """Let the shares be those of the mean over every process's tokens."""
        processes = accelerator.num_processes
        if processes > 1:
            own = torch.tensor(float(sum(self._counts)), device=accelerator.device)
            self._mean_over = accelerator.reduce(own, reduction="sum").item() / processes

    def take(self) -> tuple[int, float] | None:
        """(count, share of the mean) of the next micro-batch; None if unknown.

        The mean over the window's tokens is the sum of micro-batch means, each times its share
        (over several processes, the mean of such sums); the share of an empty window is 0.
        """
        if self._next >= len(self._counts):
            return None
        count = self._counts[self._next]
        self._next += 1
        total = sum(self._counts) if self._mean_over is None else self._mean_over
        return count, count / (total or 1)


class TokenMean:
    """The mean of a loss over all tokens of an evaluation, summed on the loss's device."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count: Tensor | None = None

    def add(self, loss: Tensor, count: Tensor, divisor: Tensor | float | None = None) -> None:
        """Add a batch.

        Args:
            loss: 0-d, the batch's sum over its tokens divided by `divisor`.
            count: 0-d, its tokens.
            divisor: None for `count`.
        """
        count = count.to(loss.device)
        weight = count if divisor is None else divisor
        total = torch.where(count > 0, loss.detach().double() * weight, 0.0)
        self._sum = total if self._sum is None else self._sum + total
        self._count = count if self._count is None else self._count + count

    def result(self, accelerator: Any) -> float | None:
        """The mean over every process's tokens; None before any was added."""
        if self._sum is None or self._count is None:
            return None
        both = torch.stack((self._sum, self._count.double()))
        total, count = accelerator.reduce(both, reduction="sum").tolist()
        return float(total / count) if count else 0.0
