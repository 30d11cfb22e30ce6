"""Parameters of one flat stretch of device memory with their AdamW state beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ts_core.errors import OptionError
from ts_core.optim.layout import FlatLayout

MOMENTS = ("exp_avg", "exp_avg_sq")
# Fills `out` (fp32, host) with the stored values of this name.
ReadState = Callable[[str, torch.Tensor], None]


@dataclass
class Lists:
    """Arguments of one call of torch's fused kernel; all fp32, on one device."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    exp_avgs: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)


class ResidentPiece:
    """One bucket's parameters under a device optimizer.

    A step takes the gradients out of `param.grad`. Where every parameter has one, and all have had
    the same number of updates, the whole stretch is one tensor of the update; else each is one.

    Args:
        layout: the parameters; small ones lie back to back in one buffer.
        group_index: their param group.
        steps: updates so far, per parameter.
        read: gives the state there is; None for zeros.

    Attributes:
        steps: fp32 [parameters] on the device.
        exp_avg, exp_avg_sq: fp32 [numel] on the device.
        master: fp32 [numel] copy of low-precision parameters, else None.
        scales_late: the gradient is converted when its update comes, and clipped then.
        stage: fp32 [numel] where small parameters' gradients are gathered; None for a large one.
        left_out: positions of parameters that are in no param group any more.
    """

    def __init__(
        self,
        layout: FlatLayout,
        group_index: int,
        steps: Sequence[int] = (),
        read: ReadState | None = None,
    ) -> None:
        self.layout = layout
        self.params = layout.params
        self.group_index = group_index
        flat = layout.flat()
        device, numel = flat.device, layout.numel
        self.steps = torch.zeros(len(self.params), device=device)
        self.exp_avg = torch.zeros(numel, device=device)
        self.exp_avg_sq = torch.zeros(numel, device=device)
        self.master = None if flat.dtype is torch.float32 else flat.float()
        self._low = flat.dtype is not torch.float32
        self.scales_late = self._low and not layout.many
        self.stage = torch.zeros(numel, device=device) if layout.many else None
        self._views = [] if self.stage is None else layout.split(self.stage)
        self._parts: dict[int, list[torch.Tensor]] = {}
        self._single: torch.Tensor | None = None
        self._present: list[int] = []
        self._equal_steps = True
        self.left_out: frozenset[int] = frozenset()
        self._seen: list[int] = []
        self.set_steps(steps or [0] * len(self.params))
        if read is not None:
            values = torch.empty(numel)
            for name, target in self.state().items():
                read(name, values)
                target.copy_(values)
        self._look()

    # -- state ---------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Flat fp32 state by name."""
        found = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return found if self.master is None else {**found, "master": self.master}

    def entry(self, position: int) -> dict[str, torch.Tensor]:
        """A parameter's state as torch.optim.AdamW keeps it; live views."""
        views = {n: self.layout.view(flat, position) for n, flat in self.state().items()}
        return {"step": self.steps[position], **views}

    def set_steps(self, steps: Sequence[int]) -> None:
        """Set the number of updates per parameter."""
        self.steps.copy_(torch.tensor([float(step) for step in steps]))
        self._equal_steps = len(set(steps)) <= 1

    def device_bytes(self) -> int:
        """Of state and staged gradients."""
        held = [self.steps, *self.state().values()]
        held += [] if self.stage is None else [self.stage]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    # -- a step --------------------------------------------------------------------------------

    def gather(self) -> bool:
        """Take the gradients out of `param.grad`, `stage` being zero; whether there are any.

        Raises:
            OptionError: a sparse gradient.
        """
        grads = [param.grad for param in self.params]
        for position in self.left_out:
            grads[position] = None
        self._present = [k for k, grad in enumerate(grads) if grad is not None]
        if not self._present:
            return False
        self._take_foreign_values()
        found = [grad for grad in grads if grad is not None]
        for grad in found:
            if grad.layout is not torch.strided:
                raise OptionError(
                    f"a parameter of shape {tuple(grad.shape)} has a {grad.layout} gradient. "
                    f"OffloadAdamW takes dense gradients: turn sparse=True off."
                )
        if self.stage is None:
            single = found[0].detach().contiguous().view(-1)
            self._single = single if self._low else single.to(torch.float32)
        else:
            views = self._views
            if len(found) < len(views):
                views = [views[k] for k in self._present]
            torch._foreach_copy_(views, found)
        for position in self._present:
            self.params[position].grad = None
        return True

    def gradient(self) -> torch.Tensor:
        """The gathered gradient, 1-D; 0 where a parameter has none."""
        found = self._single if self.stage is None else self.stage
        assert found is not None
        return found

    def add_to(self, lists: Lists, gradient: torch.Tensor) -> None:
        """Enter this step's update; `gradient` is fp32 [numel]."""
        target = self.layout.flat() if self.master is None else self.master
        columns = (target, gradient, self.exp_avg, self.exp_avg_sq)
        filled = (lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs)
        if len(self._present) < len(self.params):
            self._equal_steps = False
        if self._equal_steps:
            for column, flat in zip(filled, columns, strict=True):
                column.append(flat)
            lists.steps.append(self.steps[0])
            return
        for position in self._present:
            for column, view in zip(filled, self._apart(position, columns), strict=True):
                column.append(view)
            lists.steps.append(self.steps[position])

    def _apart(self, position: int, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One parameter's views of parameter, gradient and moments; kept where memory stays."""
        if self.stage is None:
            return [self.layout.view(flat, position) for flat in columns]
        found = self._parts.get(position)
        if found is None:
            found = self._parts[position] = [self.layout.view(flat, position) for flat in columns]
        return found

    def counted(self) -> list[torch.Tensor]:
        """The step counts that this step's update raises."""
        if len(self._present) == len(self.params):
            return [self.steps]
        return [self.steps[position] for position in self._present]

    def updated(self) -> None:
        """The update has been queued: low-precision values follow, autograd is told."""
        if self.master is not None:
            self._write_rounded()
        torch.autograd.graph.increment_version([self.params[k] for k in self._present])
        if self.master is not None:
            self._look()
        self._single = None

    def _write_rounded(self) -> None:
        flat, master = self.layout.flat(), self.master
        assert master is not None
        if len(self._present) == len(self.params):
            flat.copy_(master)
            return
        for position in self._present:
            self.layout.view(flat, position).copy_(self.layout.view(master, position))

    # -- what the user writes ------------------------------------------------------------------

    def _look(self) -> None:
        self._seen = self._now()

    def _now(self) -> list[int]:
        """What changes when somebody writes; a value without a master copy may change freely."""
        found = [param.data_ptr() for param in self.params]
        return found if self.master is None else found + [p._version for p in self.params]

    def _take_foreign_values(self) -> None:
        """Values written by somebody else since the last update count; replaced memory is ours."""
        if self._now() == self._seen:
            return
        changed = self.layout.foreign_writes()
        if self.master is not None:
            for position in changed:
                self.take_value(position)
        self._look()

    def doubt_value(self, position: int) -> None:
        """State was loaded, perhaps for other values: look at the parameter before its update."""
        self.layout.doubt_values(position)
        self._seen = []

    def take_value(self, position: int) -> None:
        """The master copy follows the parameter, but where it rounds to that very value."""
        assert self.master is not None
        held = self.layout.view(self.master, position)
        written = self.layout.view(self.layout.flat(), position)
        held.copy_(torch.where(held.to(written.dtype) == written, held, written.float()))
