"""Data parallel training: every process has the whole model, gradients are averaged in host memory.

Gradients are on their way to the host anyway, so they are averaged there, by gloo, in one fixed
order of buckets, behind the caller's back. Every process then holds the same bits, measures the
same norm and makes the same update, so parameters stay equal without being sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ts_core import _native
from ts_core.errors import NotAvailableError, OptionError, StateError
from ts_core.memory.ram import local_processes
from ts_core.optim.layout import is_sharded
from ts_core.optim.options import StepOptions


class Ranks:
    """The processes that train together. To be made by all of them at the same point.

    Two groups of their own, so that nothing here meets a collective of the user's: one for the
    calling thread, one for the worker thread that averages.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._calling = dist.new_group(backend="gloo")
        self._worker = dist.new_group(backend="gloo")
        self._staging: torch.Tensor | None = None

    @torch.no_grad()
    def share(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Give every process the values of the first (calling thread).

        Raises:
            StateError: the processes have parameters of other shapes or dtypes, or in another
                order.
        """
        words = [f"{tuple(param.shape)} {param.dtype}" for param in params]
        digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
        digests: list[str | None] = [None] * self.size
        dist.all_gather_object(digests, digest, group=self._calling)
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise StateError(
                f"processes {different} train other parameters than process 0 (shapes, dtypes or "
                f"order; {len(params)} here, on process {self.rank}). Build and freeze the model, "
                f"and add adapters, in the same way on every process."
            )
        for param in params:
            values_h = param.detach().to("cpu", copy=True).contiguous()
            dist.broadcast(values_h, 0, group=self._calling)
            if self.rank != 0:
                param.copy_(values_h)

    def any_has(self, flags: Sequence[bool]) -> list[bool]:
        """Per flag, whether it is set on any process (calling thread)."""
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._calling)
        return [bool(flag) for flag in found.tolist()]

    @torch.no_grad()
    def average_(self, flat: torch.Tensor) -> torch.Tensor:
        """Replace `flat` by its mean over the processes, summed in fp32 (worker thread).

        Args:
            flat: 1-D, contiguous, final on every process.

        Returns:
            The mean in host memory: `flat` itself where it is fp32 there, else a buffer that holds
            until the next call.
        """
        direct = flat.device.type == "cpu" and flat.dtype is torch.float32
        mean_h = flat if direct else self._staging_for(flat)
        if not direct:
            mean_h.copy_(flat)
        mean_h.div_(self.size)
        dist.all_reduce(mean_h, group=self._worker)
        if not direct:
            flat.copy_(mean_h)
            mean_h.copy_(flat)  # rounded, as the update will read it
        return mean_h

    def _staging_for(self, flat: torch.Tensor) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < flat.numel():
            self._staging = torch.empty(flat.numel())
        return self._staging[: flat.numel()]


def several_processes(distributed: bool | None, mode: str, eager: bool | None) -> bool:
    """Whether these options of wrap() and OffloadAdamW mean more than one process here.

    Raises:
        StateError: distributed=True without a process group.
        NotAvailableError: a mode that places state by each process's own measurements.
        OptionError: updates before the average were asked for.
    """
    there = dist.is_available() and dist.is_initialized()
    if distributed is True and not there:
        raise StateError(
            "distributed=True needs a process group, and there is none. Start the script with "
            "torchrun and call torch.distributed.init_process_group() first, or leave "
            "distributed out."
        )
    if not there or distributed is False or dist.get_world_size() == 1:
        return False
    if mode == "hybrid":
        raise NotAvailableError(
            "optimizer_mode='hybrid' splits state by what each process measures, which cannot be "
            "averaged over processes in this version. Use 'cpu' or 'gpu'."
        )
    if eager:
        raise OptionError(
            "eager=True updates parameters during backward, before gradients are averaged over "
            "the processes. Use eager=None or False, or distributed=False."
        )
    return True


def join(
    distributed: bool | None,
    params: Sequence[torch.nn.Parameter],
    mode: str,
    options: StepOptions,
    say: Callable[[str], None],
) -> Ranks | None:
    """Start training together with the other processes; None to train alone.

    Args:
        distributed: None: where a process group of several ranks exists. True: also require one.
            False: never.
        params: all trained ones. FSDP2's DTensors are averaged by FSDP2 itself.
        mode: of the optimizer.
        options: get their host threads, and no updates during backward.
        say: told what it means.

    Raises:
        NotAvailableError: only some parameters are DTensors.
        Exception: as `several_processes`.
    """
    if all(is_sharded(param) for param in params):
        return None
    if not several_processes(distributed, mode, options.eager_choice):
        return None
    if any(is_sharded(param) for param in params):
        raise NotAvailableError(
            "some trained parameters are DTensors and others are not. Shard the whole model "
            "(fully_shard), or none of it."
        )
    options.set_eager(False)
    if not options.threads:
        options.threads = max(1, _native.usable_cores() // local_processes())
    ranks = Ranks()
    ranks.share(params)
    say(
        f"data parallel over {ranks.size} processes: parameters are those of process 0, gradients "
        f"are averaged in host memory, {options.threads} host threads each"
    )
    return ranks
