"""AdamW with decoupled weight decay whose state lives beside the device, not on it.

The update is that of torch.optim.AdamW (Loshchilov & Hutter, arXiv:1711.05101). Gradients leave as
autograd produces them; each bucket of parameters is updated when its last gradient has come, or,
with clipping, when the norm of all is known; step() returns at once, and whoever reads a parameter
that is still being updated waits for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ts_core.device import Device
from ts_core.errors import OptionError, StateError
from ts_core.interrupts import held_back
from ts_core.memory.arena import PinnedArena, default_arena
from ts_core.optim import checks
from ts_core.optim.data_parallel import join
from ts_core.optim.hooks import GradientHooks
from ts_core.optim.options import StepOptions
from ts_core.optim.resident import ResidentAdamW, move_to_device
from ts_core.optim.state_places import PlacedState
from ts_core.optim.storage import Storage
from ts_core.optim.updates import Updates
from ts_core.store.homes import TrainedHome
from ts_core.transfer import CopyEngine

# What torch.optim.AdamW keeps in a param group, so that state dicts pass both ways.
_TORCH_FLAGS = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


class OffloadAdamW(PlacedState):
    """torch.optim.AdamW with its state in host memory, or split between host and device.

    Gradients are taken from the parameters by hooks during backward (`param.grad` is None
    afterwards) and summed in the parameter's dtype, as torch sums them. Parameters that autograd
    never reaches are left alone, as in torch. bf16 and fp16 parameters have an fp32 master copy.

    step() does not wait for the updates: reading a parameter does, through any operation and from
    any thread (not through a view taken before). A parameter in flight is for that time of a
    subclass of nn.Parameter.

    Args:
        params: parameters (fp32, bf16 or fp16; on one device; FSDP2's DTensors too) or groups.
        lr, betas, eps, weight_decay: as torch.optim.AdamW.
        amsgrad, maximize, foreach, capturable, differentiable, fused: of torch.optim.AdamW, for
            code that names them; False or None, as there is one update here.
        mode: "cpu": host threads. "gpu": a kernel on the device that reads and writes state in
            pinned host memory. "hybrid": split by measured speed between state in device memory,
            state in pinned memory that the device reads and writes over the link, and host
            threads. "auto": "hybrid" on a GPU.
        max_grad_norm: clip the global gradient norm to this, exactly; None does not clip.
        compute_grad_norm: fill `last_grad_norm` without clipping.
        skip_nonfinite: leave out a step whose gradients hold NaN or infinities (they are reported
            in any case); like clipping, it needs the whole gradient before any update.
        threads: host threads of the update; None for all usable cores.
        chunk_elems: host updates of long tensors go in pieces of 16 times that, so that new values
            leave while the rest is updated.
        accumulation_steps: backward passes per step(); one more raises StateError.
        eager: start a bucket's update during backward when its last gradient has come.
            None: on, unless the norm is needed.
        pin_moments: page-lock state that host threads update. None and False: only state that the
            device reads ("gpu", "hybrid") is pinned, as nothing else gains by it.
        moment_dtype: "float32" ("fp32"), "bfloat16" ("bf16") or "int8" ("8bit"), or a torch dtype;
            the latter two in mode "cpu".
        seed: of the stochastic rounding of bf16 and 8-bit moments.
        device, copies, arena: the device, link and host memory to use; made when omitted.
        distributed: data parallel training, where a process group has several ranks: all of them
            start with the values of the first, and each step's gradients are averaged over them
            (FSDP2 does that itself). None: where there is such a group. True: also require one.
            False: train separate copies.
        homes: trained weights that live in host images of paged blocks (wrap() passes them), which
            are updated there.
        on_event: called with one line of plain words for each decision.

    Raises:
        NotAvailableError: mode "hybrid" with several processes.
        StateError: distributed=True without a process group.
        OptionError: a hyper-parameter out of range, or a parameter that cannot be trained so.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        mode: str = "cpu",
        max_grad_norm: float | None = None,
        compute_grad_norm: bool = False,
        skip_nonfinite: bool = False,
        threads: int | None = None,
        chunk_elems: int = 1 << 20,
        accumulation_steps: int = 1,
        eager: bool | None = None,
        pin_moments: bool | None = None,
        moment_dtype: Any = "float32",
        seed: int = 0,
        device: Device | None = None,
        copies: CopyEngine | None = None,
        arena: PinnedArena | None = None,
        distributed: bool | None = None,
        homes: Mapping[torch.nn.Parameter, TrainedHome] | None = None,
        on_event: Callable[[str], None] | None = None,
        **unknown: Any,
    ) -> None:
        checks.known(OffloadAdamW, unknown)
        checks.hyper(lr, betas, eps, weight_decay)
        checks.torch_flags(
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        kind = checks.moment_kind(moment_dtype)
        checks.mode(mode, kind, pin_moments)
        checks.numbers(max_grad_norm, chunk_elems, threads, seed)
        checks.flags(compute_grad_norm=compute_grad_norm, skip_nonfinite=skip_nonfinite)
        self.step_options = StepOptions(
            max_grad_norm, compute_grad_norm, skip_nonfinite, threads or 0
        )
        self.step_options.set_accumulation(accumulation_steps)
        self.step_options.set_eager(eager)
        self.mode = mode
        self.after_step: Callable[[], None] | None = None
        self.split_waits: Callable[[], bool] | None = None  # while others take device memory
        self.alone: Callable[[], AbstractContextManager[None]] = nullcontext  # around step()
        self._resident: ResidentAdamW | None = None
        self._resident_norm: float | torch.Tensor | None = None
        self._on_event = on_event
        storage = Storage(
            mode, kind, seed, chunk_elems, bool(pin_moments), lambda: self.threads, self._say
        )
        storage.use(device, copies, arena or default_arena())
        storage.homes = dict(homes or {})
        self._updates = Updates(storage, self.step_options, lambda: self.param_groups, self._say)
        self._hooks = GradientHooks()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            **_TORCH_FLAGS,
        }
        super().__init__(params, defaults)
        self._updates.ranks = join(distributed, self._params(), mode, self.step_options, self._say)
        if self._updates.ranks is not None and mode == "auto":
            self.mode = storage.mode = "cpu"
        self.attach()

    # -- set-up ----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch.optim.Optimizer.add_param_group."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            checks.group(group)
        except OptionError:
            self.param_groups.pop()
            raise
        if self._updates.ranks is not None:
            self._updates.ranks.share(group["params"])
        if self._hooks.attached:
            self._hooks.add(self, group["params"])

    def attach(self) -> None:
        """Take gradients from the parameters by hooks, during backward."""
        if not self.takes_gradients:
            self._hooks.attach(self, self._params())

    def detach(self) -> None:
        """Remove the hooks: gradients stay in `param.grad` and step() takes them from there."""
        self.synchronize()
        self._hooks.detach(self._params())

    def adopt(
        self,
        device: Device,
        copies: CopyEngine,
        on_event: Callable[[str], None],
        *,
        mode: str,
        moment_dtype: Any,
        max_grad_norm: float | None,
        accumulation_steps: int,
        eager: bool | None,
        threads: int | None,
        homes: Mapping[torch.nn.Parameter, TrainedHome],
    ) -> None:
        """Join a session: its device, link and events; its options where they are not default.

        Raises:
            StateError: the optimizer has already trained on another device, or in another mode.
        """
        storage = self._updates.storage
        kind = storage.kind if moment_dtype == "auto" else checks.moment_kind(moment_dtype)
        wanted = self.mode if mode == "cpu" else mode
        checks.mode(wanted, kind, None)
        if self._updates.buckets:
            storage.check_same_device(device)
            if (wanted, kind) != (self.mode, storage.kind):
                raise StateError(
                    f"the optimizer has state in mode {self.mode!r} with {storage.kind} moments; "
                    f"wrap() asks for {wanted!r} with {kind}. Wrap before the first step, or ask "
                    f"for the same."
                )
        else:
            self.mode = storage.mode = wanted
            storage.kind = kind
            storage.use(device, copies, storage.arena)
        self._on_event = on_event
        self.step_options.join(max_grad_norm, accumulation_steps, eager, threads)
        self.set_homes(homes)
        self.attach()

    def make_resident(self) -> None:
        """Keep state on the device from now on, under torch's fused AdamW; host state is freed.

        step() then queues a few kernels and returns; norm, clipping and skipping stay on the
        device. Gradients are in `param.grad` until step() takes them. There is no way back.

        Raises:
            StateError: in the middle of a step, or of parameters that several processes share or
                that stream.
        """
        if self._resident is not None:
            return
        made = move_to_device(self._updates, self.param_groups, self.updates, self._say)
        self.detach()
        self._resident = made
        self._show_resident()
        self._updates.clear()

    def displace(self) -> None:
        """Another OffloadAdamW has taken over parameters of this one, which stops here."""
        self.detach()
        self._updates.drop("another OffloadAdamW took over")
        self._hooks.displace()
        self._say("another OffloadAdamW was made for the same parameters and takes their gradients")

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if param.grad is None or self._updates.group_of(param) is None:
            return
        with held_back:
            grad, param.grad = param.grad, None
            if param not in self._updates.where:
                self.build()
            self._updates.take(param, grad)

    def _params(self) -> list[torch.nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    # -- step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue what is left of this step's update, and return.

        Without clipping most of it has run during backward. With clipping the updates start once
        the norm is known, in the order of the last forward (the reverse of the order in which
        gradients came). Neither order nor timing changes the values. A signal that raises (Ctrl-C)
        waits until all is queued; a second one does not.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.alone(), held_back:  # all of a step, or nothing
            self._step()
        return loss

    def _step(self) -> None:
        updates = self._updates
        self._hooks.check_not_displaced()
        if updates.ranks is not None:
            self.build()  # a process without any gradient takes part in the average too
        if self._resident is not None:
            if self._resident.take_in(self.param_groups, updates.storage.layouts):
                self._show_resident()
            updates.steps += 1
            updates.norm = None  # of a step before the state was moved
            self._resident_norm = self._resident.step(
                self.param_groups, self.step_options, updates.steps
            )
            return
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter answers slowly
            left = [param for param in self._params() if param.grad is not None]
        for param in left:
            self._on_gradient(param)
        updates.step()
        if self.after_step is not None:
            self.after_step()
        if updates.split is not None:
            if self.split_waits and self.split_waits():
                updates.split.leave_out()
            else:
                updates.split.after_step(self)

    def give_state_back(self, excess: int) -> bool:
        """A step took `excess` bytes of device memory more than it should.

        To be called between steps. Waits for updates in flight where it moves state.

        Returns:
            Whether state that is split between places has left the device for it.
        """
        split = self._updates.split
        if excess <= 0 or split is None or self._resident is not None:
            return False
        if self._updates.mid_step or not self.state_on_device():
            return False
        self.synchronize()
        return split.give_back(self, excess)

    @property
    def takes_gradients(self) -> bool:
        """Whether it updates its parameters: attached, or with its state on the device."""
        return self._hooks.attached or self._resident is not None

    def synchronize(self) -> None:
        """Wait for updates in flight: every parameter and all state hold their new values.

        Raises:
            BaseException: what an update raised.
        """
        self._updates.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, those of a started accumulation included. Does not wait for updates."""
        self._updates.drop("zero_grad() before step()")
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none=set_to_none)

    def let_go(self) -> None:
        """Gradients that updates still read, or that still leave for the host, are kept no longer.

        Later work of the device waits for those updates and copies. To be called before a forward,
        which waits for the weights that they write anyway.
        """
        self._updates.let_go()

    def weights_read(self) -> None:
        """A forward has read all weights: gradients of the last step() are kept no longer.

        Later work of the device waits for those updates, as it did for the weights that they write.
        (Earlier, it would wait for updates that the forward does not need yet.)
        """
        self._updates.weights_read()

    def drop_failed_backward(self) -> None:
        """If a backward has raised since the last step, drop what it left, and say so.

        To be called where no backward is running (a wrapped model's forward does).
        """
        if self._updates.backward_failed():
            self._updates.drop("a backward raised before step()")
