"""Device, pinned and host memory, and traffic over the link, in the training log."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ts_hf.training.finite import FiniteGuard

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
    """Lets a stock transformers.Trainer train a wrapped model, and logs the memory numbers.

    The Trainer's accumulation and clipping settings are handed to the optimizer, which clips by
    the exact norm in its step and whose norm is then logged; the Trainer itself sees no gradients,
    since they have streamed away. On a GPU use TrainStreamTrainer: a stock Trainer moves the whole
    model onto the device.

    Args:
        optimizer: the OffloadAdamW that `wrap_hf` returned, given to the Trainer as
            `optimizers=(optimizer, None)`.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._finite = FiniteGuard()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hand over accumulation and clipping."""
        from ts_core.optim.clip_guard import unmark_streamed

        self._finite = FiniteGuard()
        self.optimizer.accumulation_steps = args.gradient_accumulation_steps
        if args.max_grad_norm and args.max_grad_norm > 0:
            self.optimizer.max_grad_norm = float(args.max_grad_norm)
        # ts_core refuses clip_grad_norm_ on gradients that have left; here the optimizer clips.
        unmark_streamed(self._parameters())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let ts_core refuse clip_grad_norm_ again.

        Raises:
            NonFiniteError: the last norm is NaN or infinite.
        """
        from ts_core.optim.clip_guard import mark_streamed

        mark_streamed(self._parameters())
        self._finite.settle()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop at a gradient norm that is not finite: a step later, so that nothing waits.

        Raises:
            NonFiniteError: that of the step before is NaN or infinite.
        """
        self._finite.settle()
        self._finite.watch_norm(self.optimizer.pending_grad_norm, state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the norm before anything is logged, evaluated or saved.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        if control.should_log or control.should_evaluate or control.should_save:
            self._finite.settle()

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
        if "grad_norm" in logs and self.optimizer.last_grad_norm is not None:
            numbers["grad_norm"] = self.optimizer.last_grad_norm
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)

    def _parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]
