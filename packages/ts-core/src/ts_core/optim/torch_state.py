"""The state of an OffloadAdamW as torch's optimizers show, save and load theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ts_core.optim import state
from ts_core.optim.buckets import Bucket
from ts_core.optim.shown import ShownOptimizer


class TorchState(ShownOptimizer):
    """State in torch's layout, wherever it lies.

    Attributes:
        after_step: called at the end of each step(), and after a load of state that was resident.
    """

    after_step: Callable[[], None] | None
    _state: Any

    @property
    def state(self) -> Any:
        """Per parameter: step, and the state that is fp32 in memory, as live views.

        Waits for updates in flight. Write into the tensors between steps, in place; entries that
        are replaced or removed are not noticed (`load_state_dict` is).
        """
        updates = self.__dict__.get("_updates")
        if updates is not None and self._resident is None and updates.buckets:
            updates.finish()
            state.fill_steps(updates.buckets, self._state)
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value

    def build(self) -> None:
        """Allocate buckets and state for every parameter that has none yet."""
        for bucket in self._updates.build():
            self._show_state(bucket)

    def state_dict(self) -> dict[str, Any]:
        """State in torch.optim.AdamW's layout (plus fp32 `master` of low-precision parameters).

        fp32 moments are handed out as views of live memory, as torch's are of its own; bf16 and
        8-bit ones, and those that lie in several places, are written out in fp32, above 64 MiB to
        memory-mapped temporary files, so that saving needs no more RAM than training.

        Raises:
            StateError: in the middle of a step, whose gradients so far would be lost.
        """
        if self._resident is None:
            self._updates.refuse_mid_step("state_dict()")
            self._updates.settle()
            live, self.state = self._state, self._filled_state()
            try:
                return super().state_dict()
            finally:
                self.state = live
        self._resident.reports.flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW; copies into place.

        Raises:
            StateError: in the middle of an accumulation.
            DataError: groups, shapes or flags that do not match; nothing has been changed then.
        """
        self._updates.refuse_mid_step("load_state_dict()")
        state.check(self.param_groups, state_dict)
        if self._resident is not None:
            self._resident.load(self.param_groups, state_dict)
            return
        self.build()
        self._updates.settle()
        was_resident = any(group.get("fused") for group in state_dict["param_groups"])
        state.load(self.param_groups, self._updates.buckets, self._updates.where, state_dict)
        if was_resident and self.after_step is not None:
            self.after_step()

    def _filled_state(self) -> Any:
        return state.filled(self._updates.buckets, type(self._state))

    def _show_state(self, bucket: Bucket) -> None:
        """`optimizer.state[param]`: live views where state is fp32 and in one place (the step is
        filled on save)."""
        for param, entry in state.live(bucket):
            self._state[param] = entry

    def _hide_state(self, bucket: Bucket) -> None:
        for param in bucket.params:
            self._state.pop(param, None)

    def _show_resident(self) -> None:
        assert self._resident is not None
        for group in self.param_groups:
            group["fused"] = True
        self.state = type(self._state)(dict)
        self._state.update(self._resident.entries)
