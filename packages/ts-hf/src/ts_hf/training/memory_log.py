"""Device, pinned and host memory, and traffic over the link, in the training log."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

_GB = 1e9


def memory_numbers(model: nn.Module) -> dict[str, float]:
    """The ts_* numbers of a wrapped model, in GB (1e9 bytes); {} if it is not wrapped.

    ts_vram_alloc_gb and ts_vram_peak_gb: device memory now and at most (on the host device, of the
    pool that streaming uses); ts_pinned_gb: page-locked memory in use; ts_host_state_gb: optimizer
    state and gradients on the host; ts_d2h_gb, ts_h2d_gb: bytes that crossed the link so far.
    """
    if not hasattr(model, "_trainstream_session"):
        return {}
    from ts_core import memory_report

    report = memory_report(model)
    optimizer, transfers = report["optimizer"], report["transfers"]
    return {
        "ts_vram_alloc_gb": report["gpu"]["allocated"] / _GB,
        "ts_vram_peak_gb": report["gpu"]["peak_allocated"] / _GB,
        "ts_pinned_gb": report["pinned"] / _GB,
        "ts_host_state_gb": optimizer.get("host_state_bytes", 0) / _GB,
        "ts_d2h_gb": transfers["d2h"]["bytes"] / _GB,
        "ts_h2d_gb": transfers["h2d"]["bytes"] / _GB,
    }


class TrainStreamCallback(TrainerCallback):  # type: ignore[misc]
    """Adds the memory numbers to the logs of a stock transformers.Trainer.

    Args:
        optimizer: the OffloadAdamW of the wrapped model that is being trained. With it the
            callback also sees to it that its `accumulation_steps` agree with the Trainer's.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the Trainer's accumulation."""
        if hasattr(self.optimizer, "accumulation_steps"):
            self.optimizer.accumulation_steps = args.gradient_accumulation_steps

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add the numbers to what is logged, and to the history that was just written."""
        if model is None or logs is None:
            return
        numbers = memory_numbers(model)
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)
