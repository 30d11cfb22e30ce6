"""AdamW with decoupled weight decay whose moments live in host memory.

The update is that of torch.optim.AdamW (Loshchilov & Hutter, arXiv:1711.05101). Gradients leave
the device as autograd produces them; host threads update a bucket when its last gradient has
landed, and the new values go back over the link.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ts_core.device import Device, resolve_device
from ts_core.errors import OptionError, StateError
from ts_core.memory.arena import PinnedArena, default_arena
from ts_core.optim import checks, state
from ts_core.optim.buckets import Bucket, Hyper, partition
from ts_core.optim.clip_guard import install_clip_guard, mark_streamed, unmark_streamed
from ts_core.optim.resident import ResidentAdamW
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


class OffloadAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with its state and arithmetic on the host.

    Gradients are taken from the parameters by hooks during backward (`param.grad` is None
    afterwards) and summed in the parameter's dtype, as torch sums them. Parameters that autograd
    never reaches are left alone, as in torch. bf16 and fp16 parameters have an fp32 master copy.

    Args:
        params: parameters (fp32, bf16 or fp16; on one device) or param groups.
        lr, betas, eps, weight_decay: as torch.optim.AdamW.
        mode: "cpu"; other modes are not available in this version.
        max_grad_norm: clip the global gradient norm to this, exactly; None does not clip.
        compute_grad_norm: fill `last_grad_norm` without clipping.
        threads: host threads of the update; None for all usable cores.
        accumulation_steps: backward passes per step(); one more raises StateError.
        eager: start a bucket's update during backward when its last gradient has landed.
            None: on, unless the norm is needed.
        moment_dtype: "float32"; others are not available in this version.
        device, copies, arena: the device, link and host memory to use; made when omitted.
        on_event: called with one line of plain words for each decision.

    Raises:
        OptionError: a hyper-parameter out of range, or a parameter that cannot be trained so.
        NotAvailableError: a mode or moment dtype of the interface that is not built yet.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        mode: str = "cpu",
        max_grad_norm: float | None = None,
        compute_grad_norm: bool = False,
        threads: int | None = None,
        accumulation_steps: int = 1,
        eager: bool | None = None,
        moment_dtype: Any = "float32",
        device: Device | None = None,
        copies: CopyEngine | None = None,
        arena: PinnedArena | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        checks.hyper(lr, betas, eps, weight_decay)
        checks.mode(mode, moment_dtype)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise OptionError(
                f"max_grad_norm={max_grad_norm!r} is not accepted. Use a number above 0, or None."
            )
        self.max_grad_norm = max_grad_norm
        self.compute_grad_norm = compute_grad_norm
        self.accumulation_steps = accumulation_steps
        if eager is True and self._needs_norm():
            raise OptionError(
                "eager=True starts updates before the whole gradient is known, which clipping "
                "and compute_grad_norm need. Use eager=None or False with them."
            )
        self._eager = eager
        self.threads = threads or 0
        self._last_norm: float | torch.Tensor | None = None
        self._resident: ResidentAdamW | None = None
        self._warned_late = False
        self.after_step: Callable[[], None] | None = None
        self.steps_done = 0
        self._device = device
        self._copies = copies
        self._arena = arena or default_arena()
        self._on_event = on_event
        self._buckets: list[Bucket] = []
        self._place: dict[torch.nn.Parameter, tuple[Bucket, int]] = {}
        self._handles: list[RemovableHandle] = []
        self._attached = False
        self._jobs: dict[int, Future[None]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainstream-adamw")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            **_TORCH_FLAGS,
        }
        super().__init__(params, defaults)
        self.attach()

    # -- set-up ----------------------------------------------------------------------------

    @property
    def accumulation_steps(self) -> int:
        """Backward passes per step(); may be changed between steps."""
        return self._accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(
                f"accumulation_steps={value!r} is not accepted. Use an integer of at least 1."
            )
        self._accumulation_steps = value

    @property
    def last_grad_norm(self) -> float | None:
        """Global gradient norm of the last step, before clipping; None if it was not needed."""
        if isinstance(self._last_norm, torch.Tensor):
            self._last_norm = self._last_norm.item()
        return self._last_norm

    @property
    def updates(self) -> int:
        """Updates so far of the most updated parameter, those before a resume included."""
        if self._resident is not None:
            return self.steps_done
        return max((max(bucket.steps) for bucket in self._buckets if bucket.steps), default=0)

    @property
    def resident(self) -> bool:
        """Whether state is on the device (see `make_resident`)."""
        return self._resident is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch.optim.Optimizer.add_param_group."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            checks.group(group)
        except OptionError:
            self.param_groups.pop()
            raise
        if self._attached:
            self._hook(group["params"])

    def attach(self) -> None:
        """Take gradients from the parameters by hooks, during backward."""
        if self._attached:
            return
        self._attached = True
        for group in self.param_groups:
            self._hook(group["params"])
        install_clip_guard()

    def detach(self) -> None:
        """Remove the hooks: gradients stay in `param.grad` and step() takes them from there."""
        self.synchronize()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for group in self.param_groups:
            unmark_streamed(group["params"])
        self._attached = False

    def adopt(
        self,
        device: Device,
        copies: CopyEngine,
        on_event: Callable[[str], None],
        *,
        max_grad_norm: float | None,
        accumulation_steps: int,
        eager: bool | None,
        threads: int | None,
    ) -> None:
        """Join a session: its device, link and events; its options where they are not default.

        Raises:
            StateError: the optimizer has already trained on another device.
        """
        if self._buckets and self._device is not None:
            if self._device.torch_device != device.torch_device:
                raise StateError(
                    f"the optimizer has state for {self._device.torch_device}, the session runs "
                    f"on {device.torch_device}. Wrap before the first step, or move the model "
                    f"there first."
                )
        else:
            self._device, self._copies = device, copies
        self._on_event = on_event
        if max_grad_norm is not None:
            self.max_grad_norm = max_grad_norm
        if accumulation_steps != 1:
            self.accumulation_steps = accumulation_steps
        if eager is not None:
            if eager and self._needs_norm():
                raise OptionError(
                    "eager=True cannot be combined with clipping or compute_grad_norm, which need "
                    "the whole gradient first. Use eager=None or False."
                )
            self._eager = eager
        if threads is not None:
            self.threads = threads
        self.attach()

    def make_resident(self) -> None:
        """Move moments to the device and go on with torch's fused AdamW; host state is freed.

        Every parameter must be fp32 (`resident.can_be_resident`). Gradients stay in `param.grad`
        from now on. There is no way back.

        Raises:
            StateError: in the middle of a step.
        """
        if self._resident is not None:
            return
        self.build()
        self.detach()
        if any(bucket.started() for bucket in self._buckets):
            raise StateError(
                "make_resident() in the middle of a step: call step() or zero_grad() first."
            )
        self._write_steps()
        self._resident = ResidentAdamW(self.param_groups, self.state)
        self.state = self._resident.inner.state
        self._buckets.clear()
        self._place.clear()

    def _hook(self, params: Sequence[torch.nn.Parameter]) -> None:
        # A weak reference: a hook that held the optimizer would keep both alive for ever.
        hook = functools.partial(_forward_gradient, weakref.ref(self))
        for param in params:
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(hook))
        mark_streamed(params)

    def build(self) -> None:
        """Allocate buckets and state for every parameter that has none yet."""
        checks.memory([param for group in self.param_groups for param in group["params"]])
        for index, group in enumerate(self.param_groups):
            new = [p for p in group["params"] if p not in self._place]
            for params in partition(new):
                device = self._device_of(params[0])
                assert self._copies is not None
                bucket = Bucket(params, index, device, self._copies, self._arena)
                self._buckets.append(bucket)
                for position, param, views in bucket.state_views():
                    self._place[param] = (bucket, position)
                    self.state[param] = {"step": torch.tensor(0.0), **views}

    def _device_of(self, param: torch.nn.Parameter) -> Device:
        if self._device is None:
            self._device = resolve_device(param.device)
        if self._copies is None:
            self._copies = CopyEngine(self._device)
        if param.device != self._device.torch_device:
            raise StateError(
                f"a parameter of shape {tuple(param.shape)} is on {param.device}, the optimizer "
                f"works for {self._device.torch_device}. Move the model before the first step."
            )
        return self._device

    # -- during backward ----------------------------------------------------------------------

    def _needs_norm(self) -> bool:
        return self.max_grad_norm is not None or self.compute_grad_norm

    @property
    def eager(self) -> bool:
        """Whether updates start during backward."""
        return not self._needs_norm() if self._eager is None else self._eager

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        grad, param.grad = param.grad, None
        if grad is None:
            return
        self._take(param, grad)

    def _take(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            raise OptionError(
                f"a parameter of shape {tuple(param.shape)} has a {grad.layout} gradient. "
                f"OffloadAdamW takes dense gradients: turn sparse=True off."
            )
        if param not in self._place:
            self.build()
        bucket, position = self._place[param]
        bucket.collect(position, grad, self.accumulation_steps)
        if bucket.complete(self.accumulation_steps):
            self._close(bucket)

    def _close(self, bucket: Bucket) -> None:
        bucket.close()
        norm = self._needs_norm()
        eager = self.eager and not norm
        hyper = self._hyper(bucket)
        if eager:
            bucket.used = hyper
            bucket.mark_written()

        def job() -> None:
            bucket.land()
            if norm:
                bucket.measure(self.threads)
            elif eager:
                bucket.update(hyper, 1.0, self.threads, None)

        self._jobs[id(bucket)] = self._worker.submit(job)

    def _hyper(self, bucket: Bucket) -> Hyper:
        group = self.param_groups[bucket.group_index]
        beta1, beta2 = group["betas"]
        return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])

    # -- step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the update of this step's gradients.

        Returns when the new values are in host memory and their copies to the device are queued;
        the compute stream waits for those. Bucket order and arithmetic do not depend on timing.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._resident is not None:
            self._last_norm = self._resident.step(self.max_grad_norm, self._needs_norm())
            self.steps_done += 1
            return loss
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._on_gradient(param)
        active = [bucket for bucket in self._buckets if bucket.started()]
        for bucket in active:
            if not bucket.closed:
                self._close(bucket)
        self._join()
        updated_during_backward = self.eager and not self._needs_norm()
        if updated_during_backward:
            self._check_unchanged(active)
        else:
            scale = self._clip_scale(active)
            behind = self._copies.record_compute() if self._copies is not None else None
            for bucket in active:
                bucket.mark_written()
                hyper = self._hyper(bucket)
                self._jobs[id(bucket)] = self._worker.submit(
                    bucket.update, hyper, scale, self.threads, behind
                )
            self._join()
        self._await_writes(active)
        for bucket in active:
            bucket.reset()
        self.steps_done += 1
        if self.after_step is not None:
            self.after_step()
        return loss

    def _check_unchanged(self, active: Sequence[Bucket]) -> None:
        """Eager updates ran during backward: a value set since then came too late for them."""
        late = [bucket for bucket in active if bucket.used not in (None, self._hyper(bucket))]
        if late and not self._warned_late:
            self._warned_late = True
            text = (
                "lr or another hyper-parameter was changed between backward and step(), but "
                "eager updates had already used the old value during backward. Set it before "
                "backward, or pass eager=False."
            )
            self._say(text)
            warnings.warn(text, UserWarning, stacklevel=3)

    def _clip_scale(self, active: Sequence[Bucket]) -> float:
        if not self._needs_norm():
            return 1.0
        norm = math.sqrt(math.fsum(bucket.sum_of_squares for bucket in active))
        self._last_norm = norm
        bad = sum(bucket.nonfinite for bucket in active)
        if bad:
            self._say(
                f"step {self.steps_done + 1}: {bad} gradient values are NaN or infinite; the "
                f"update is applied as torch.optim.AdamW would"
            )
        if self.max_grad_norm is None:
            return 1.0
        scale = self.max_grad_norm / (norm + 1e-6)
        return scale if math.isnan(scale) else min(1.0, scale)

    def _join(self) -> None:
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.result()

    def _await_writes(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.written is not None:
                assert self._copies is not None
                self._copies.wait_compute(bucket.written)
                bucket.written = None

    def synchronize(self) -> None:
        """Wait for updates in flight, so that parameters and state may be read."""
        self._join()
        self._await_writes(self._buckets)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, those of a started accumulation included."""
        self._join()
        self._await_writes(self._buckets)
        written = 0
        for bucket in self._buckets:
            if bucket.closed and self.eager:
                written += len(bucket.params)
            bucket.reset()
        if written:
            self._say(
                f"zero_grad() before step(): {written} parameters had already been updated "
                f"during backward (eager updates); the others keep their values"
            )
        super().zero_grad(set_to_none=set_to_none)

    def _say(self, text: str) -> None:
        if self._on_event is not None:
            self._on_event(text)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State in torch.optim.AdamW's layout (plus fp32 `master` of low-precision parameters).

        Tensors are views of live host memory, as torch's are of its own.
        """
        self.synchronize()
        self._write_steps()
        return super().state_dict()

    def _write_steps(self) -> None:
        for bucket in self._buckets:
            for position, param in enumerate(bucket.params):
                self.state[param]["step"].fill_(float(bucket.steps[position]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW; copies into place.

        Raises:
            StateError: in the middle of an accumulation.
            DataError: groups, shapes or flags that do not match; nothing has been changed then.
        """
        self.synchronize()
        if any(bucket.started() for bucket in self._buckets):
            raise StateError(
                "load_state_dict() in the middle of an accumulation would mix two steps. Call "
                "step() or zero_grad() first."
            )
        state.check(self.param_groups, state_dict)
        if self._resident is not None:
            self.param_groups = self._resident.load(state_dict)
            self.state = self._resident.inner.state
            return
        self.build()
        was_resident = any(group.get("fused") for group in state_dict["param_groups"])
        state.load(self.param_groups, self._place, state_dict)
        if was_resident and self.after_step is not None:
            self.after_step()

    def stats(self) -> dict[str, Any]:
        """host_state_bytes, buckets, parameters, steps, eager, grad_norm, link counters."""
        link = {} if self._copies is None else self._copies.stats()
        return {
            "mode": "cpu" if self._resident is None else "resident",
            "steps": self.steps_done,
            "eager": self.eager,
            "buckets": len(self._buckets),
            "parameters": sum(len(bucket.params) for bucket in self._buckets),
            "host_state_bytes": sum(bucket.host_bytes() for bucket in self._buckets),
            "grad_norm": self.last_grad_norm,
            "resident": self.resident,
            "d2h_bytes": link["d2h"].bytes if link else 0,
            "h2d_bytes": link["h2d"].bytes if link else 0,
        }


def _forward_gradient(optimizer: weakref.ref[OffloadAdamW], param: torch.nn.Parameter) -> None:
    owner = optimizer()
    if owner is not None:
        owner._on_gradient(param)
