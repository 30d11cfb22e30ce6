"""Gradients in host memory as backward produces them, for an optimizer of one's own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ts_core.device import resolve_device
from ts_core.errors import OptionError, StateError
from ts_core.memory.arena import default_arena
from ts_core.optim.clip_guard import install_clip_guard, mark_streamed, unmark_streamed
from ts_core.optim.gradients import Gradients, Sealed
from ts_core.optim.layout import FlatPieces, local, partition
from ts_core.optim.ownership import disown, own, owners
from ts_core.optim.parts import PartSums, T
from ts_core.transfer import CopyEngine


class GradientOffloader:
    """Takes each gradient off the device when autograd has finished it.

    The part of OffloadAdamW that moves gradients, alone: for an update rule of one's own on the
    host, or to look at gradients that the device has no room for. `param.grad` is None afterwards,
    and `take()` hands out what has come. A large gradient crosses the link alone, small ones
    together; those of several passes are summed in the parameter's dtype, in host memory, as torch
    sums them on the device. On the host device nothing is copied.

    Args:
        params: parameters of one device; those that require no gradient are passed over.
        accumulation_steps: backward passes per `take()`; one more raises StateError in backward.
        copies: the link to use; made when omitted.

    Raises:
        OptionError: no parameter requires a gradient, or they are on several devices.
        StateError: an optimizer or another offloader takes gradients of these parameters.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        accumulation_steps: int = 1,
        copies: CopyEngine | None = None,
    ) -> None:
        self._params = list({id(p): p for p in params if p.requires_grad}.values())
        _check(self._params, accumulation_steps)
        self.accumulation_steps = accumulation_steps
        self._copies = copies or CopyEngine(resolve_device(local(self._params[0]).device))
        self._host: ThreadPoolExecutor | None = None
        arena = default_arena()
        parts = PartSums(self._copies, arena, self._on_host, self._copies.max_inflight_bytes)
        self._pieces = [
            _Piece(members, self._copies, arena, parts, accumulation_steps > 1)
            for members in partition(self._params)
        ]
        self._where = {
            param: (piece, position)
            for piece in self._pieces
            for position, param in enumerate(piece.layout.params)
        }
        hook = functools.partial(_forward_gradient, weakref.ref(self))
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(hook) for param in self._params
        ]
        own(self, self._params)
        mark_streamed(self._params)
        install_clip_guard()
        self._stopped = ""

    @torch.no_grad()
    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """Wait for the gradients that have come, and begin anew.

        Returns:
            By parameter, a CPU tensor of its shape and dtype (of a DTensor: of this process's
            part). Parameters that no backward reached are missing. The memory is used again:
            finish with a gradient, or clone it, before the next backward.

        Raises:
            StateError: an optimizer has taken over parameters of this one.
        """
        if self._stopped:
            raise StateError(self._stopped)
        started = [(piece, piece.present()) for piece in self._pieces if piece.started()]
        sealed = [piece.seal() for piece, _ in started]
        found: dict[nn.Parameter, torch.Tensor] = {}
        for (piece, present), whole in zip(started, sealed, strict=True):
            flat = whole.land(self._copies.device)
            for position in present:
                found[piece.layout.params[position]] = piece.layout.view(flat, position)
        return found

    def zero_grad(self) -> None:
        """Drop what has come since the last `take()`, after a backward that raised, say."""
        for piece in self._pieces:
            piece.reset()

    def remove(self) -> None:
        """Stop: gradients stay in `param.grad` again. What has come and was not taken is lost."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.zero_grad()
        if not self._stopped:
            unmark_streamed(self._params)
            disown(self, self._params)
            self._stopped = "the GradientOffloader was removed. Make another one."
        if self._host is not None:
            self._host.shutdown()
            self._host = None

    def displace(self) -> None:
        """An optimizer has taken over parameters of this one, which stops here."""
        self._stopped = (
            "an OffloadAdamW was made for parameters of this GradientOffloader and takes their "
            "gradients. Use one of the two for a parameter."
        )
        self.remove()

    @property
    def takes_gradients(self) -> bool:
        """Whether it has neither been removed nor displaced."""
        return not self._stopped

    def stats(self) -> dict[str, int]:
        """host_bytes (held for gradients), d2h_bytes and d2h_copies so far."""
        link = self._copies.stats()["d2h"]
        return {
            "host_bytes": sum(piece.gradients.host_bytes() for piece in self._pieces),
            "d2h_bytes": link.bytes,
            "d2h_copies": link.copies,
        }

    def _on_host(self, work: Callable[[], T]) -> Future[T]:
        if self._host is None:
            self._host = ThreadPoolExecutor(1, thread_name_prefix="trainstream-gradients")
        return self._host.submit(work)

    def _on_gradient(self, param: nn.Parameter) -> None:
        if param.grad is None:
            return
        grad, param.grad = param.grad, None
        piece, position = self._where[param]
        device = self._copies.device.torch_device
        if grad.layout is not torch.strided or local(grad).device != device:
            raise StateError(
                f"a parameter of shape {tuple(param.shape)} has a {grad.layout} gradient on "
                f"{grad.device}; a GradientOffloader takes dense ones on {device}, where the "
                f"parameters were when it was made."
            )
        piece.collect(position, grad, self.accumulation_steps)


class _Piece:
    """Gradients that cross the link as one."""

    def __init__(
        self,
        params: list[nn.Parameter],
        copies: CopyEngine,
        arena: Any,
        parts: PartSums,
        several: bool,
    ) -> None:
        self.layout = FlatPieces(params)
        self.gradients = Gradients(self.layout, copies, arena, parts, to_host=True)
        self.gradients.several = several
        self._counts = [0] * len(params)
        self._pending: dict[int, torch.Tensor] = {}

    def collect(self, position: int, grad: torch.Tensor, expected: int) -> None:
        if self._counts[position] >= expected:
            raise StateError(
                f"a parameter of shape {tuple(grad.shape)} received gradient number "
                f"{self._counts[position] + 1} before take(), but accumulation_steps={expected}. "
                f"Pass accumulation_steps=<backward passes per take()>, call take() in time, or "
                f"zero_grad() to drop what has come."
            )
        if position in self._pending:
            self._absorb()
        self._counts[position] += 1
        self._pending[position] = local(grad.detach()).to(self.layout.dtype)
        if len(self._pending) == len(self.layout.params):
            self._absorb()

    def started(self) -> bool:
        return any(self._counts)

    def present(self) -> list[int]:
        """Positions that have a gradient."""
        return [position for position, count in enumerate(self._counts) if count]

    def seal(self) -> Sealed:
        self._absorb()
        sealed, _ = self.gradients.seal(self._counts, measure=False)
        self._counts = [0] * len(self._counts)
        return sealed

    def reset(self) -> None:
        self._pending.clear()
        self._counts = [0] * len(self._counts)
        self.gradients.reset()

    def _absorb(self) -> None:
        pending, self._pending = self._pending, {}
        self.gradients.absorb(pending, self._counts)


def _check(params: list[nn.Parameter], accumulation_steps: int) -> None:
    if not params:
        raise OptionError("no parameter requires a gradient, so there is none to take.")
    if type(accumulation_steps) is not int or accumulation_steps < 1:
        raise OptionError(
            f"accumulation_steps={accumulation_steps!r} is not accepted. Use an integer of at "
            f"least 1."
        )
    devices = {str(local(param).device) for param in params}
    if len(devices) > 1 or any(param.is_meta for param in params):
        raise OptionError(
            f"the parameters are on {', '.join(sorted(devices))}. Move the model to one device "
            f"first."
        )
    if any(owner.takes_gradients for owner in owners(params)):
        raise StateError(
            "an optimizer of ts_core (or another GradientOffloader) takes gradients of these "
            "parameters already. Call its detach() or remove() first."
        )


def _forward_gradient(offloader: weakref.ref[GradientOffloader], param: nn.Parameter) -> None:
    owner = offloader()
    if owner is None:  # it went without remove()
        if not owners([param]):
            unmark_streamed([param])
    else:
        owner._on_gradient(param)
