"""AdamW with decoupled weight decay whose state lives beside the device, not on it.

The update is that of torch.optim.AdamW (Loshchilov & Hutter, arXiv:1711.05101). Gradients leave as
autograd produces them; each bucket of parameters is updated when its last gradient has come, or,
with clipping, when the norm of all is known; step() returns at once, and whoever reads a parameter
that is still being updated waits for that one.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ts_core.device import Device
from ts_core.errors import OptionError, StateError
from ts_core.memory.arena import PinnedArena, default_arena
from ts_core.optim import checks, read_guard, state
from ts_core.optim.backwards import BackwardWatch
from ts_core.optim.buckets import Bucket
from ts_core.optim.clip_guard import install_clip_guard, mark_streamed, unmark_streamed
from ts_core.optim.hybrid import HybridSplit
from ts_core.optim.layout import Hyper
from ts_core.optim.norms import Verdict
from ts_core.optim.pipeline import UpdatePipeline
from ts_core.optim.rates import measure_rates
from ts_core.optim.resident import ResidentAdamW
from ts_core.optim.storage import Storage
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
        on_event: called with one line of plain words for each decision.

    Raises:
        OptionError: a hyper-parameter out of range, or a parameter that cannot be trained so.
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
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        checks.hyper(lr, betas, eps, weight_decay)
        kind = checks.moment_kind(moment_dtype)
        checks.mode(mode, kind, pin_moments)
        checks.numbers(max_grad_norm, chunk_elems, threads, seed)
        self.mode = mode
        self.max_grad_norm = max_grad_norm
        self.compute_grad_norm = compute_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.accumulation_steps = accumulation_steps
        checks.eager(eager, self._needs_norm())
        self._eager = eager
        self.threads = threads or 0
        self.after_step: Callable[[], None] | None = None
        self.steps_done = 0
        self._norm: Future[Verdict] | float | torch.Tensor | None = None
        self._resident: ResidentAdamW | None = None
        self._warned_late = False
        self._on_event = on_event
        self._storage = Storage(
            mode, kind, seed, chunk_elems, bool(pin_moments), lambda: self.threads, self._say
        )
        self._storage.use(device, copies, arena or default_arena())
        self.headroom = 0.10
        self._split: HybridSplit | None = None
        self._buckets: list[Bucket] = []
        self._place: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self._handles: list[RemovableHandle] = []
        self._attached = False
        self._arrivals = 0
        self._backwards = BackwardWatch()
        self._pipeline = UpdatePipeline()
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
        """Global gradient norm of the last step, before clipping; None if it was not needed.

        Waits for it, if it is still being measured.
        """
        if isinstance(self._norm, Future):
            self._norm = self._norm.result().norm
        elif isinstance(self._norm, torch.Tensor):
            self._norm = self._norm.item()
        return self._norm

    @property
    def updates(self) -> int:
        """Updates so far of the most updated parameter, those before a resume included."""
        if self._resident is not None:
            return self.steps_done
        return max((max(bucket.steps) for bucket in self._buckets if bucket.steps), default=0)

    @property
    def resident(self) -> bool:
        """Whether state is on the device under torch's own kernel (see `make_resident`)."""
        return self._resident is not None

    @property
    def moments(self) -> str:
        """How moments are kept: "float32", "bfloat16" or "int8"."""
        return self._storage.kind

    @property
    def guard_params(self) -> bool:
        """Whether reads of a parameter wait for its update, wherever they happen.

        Without it only `synchronize()` waits (a wrapped model's forward calls it).
        """
        return self._pipeline.guard_reads

    @guard_params.setter
    def guard_params(self, value: bool) -> None:
        self.synchronize()
        self._pipeline.guard_reads = value

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise StateError(
            "torch.amp.GradScaler cannot work with OffloadAdamW: gradients leave the device before "
            "it could unscale them. Train in bfloat16 (autocast needs no scaler there)."
        )

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
        mode: str,
        moment_dtype: Any,
        max_grad_norm: float | None,
        accumulation_steps: int,
        eager: bool | None,
        threads: int | None,
    ) -> None:
        """Join a session: its device, link and events; its options where they are not default.

        Raises:
            StateError: the optimizer has already trained on another device, or in another mode.
        """
        storage = self._storage
        kind = storage.kind if moment_dtype == "auto" else checks.moment_kind(moment_dtype)
        wanted = self.mode if mode == "cpu" else mode
        checks.mode(wanted, kind, None)
        if self._buckets:
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
        if max_grad_norm is not None:
            self.max_grad_norm = max_grad_norm
        if accumulation_steps != 1:
            self.accumulation_steps = accumulation_steps
        if eager is not None:
            checks.eager(eager, self._needs_norm())
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
        self._refuse_mid_step("make_resident()")
        self._resident = ResidentAdamW(self.param_groups, self._filled_state())
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
        params = [param for group in self.param_groups for param in group["params"]]
        if len(self._place) == len(params):
            return
        checks.memory(params)
        for group_index, group in enumerate(self.param_groups):
            new = [param for param in group["params"] if param not in self._place]
            for bucket in self._storage.buckets(new, group_index, len(self._buckets)):
                index = len(self._buckets)
                self._buckets.append(bucket)
                for position, param in enumerate(bucket.params):
                    self._place[param] = (index, position)
                self._show_state(bucket)
        storage = self._storage
        assert storage.copies is not None and storage.device is not None
        self._pipeline.prepare_norms(len(self._buckets), storage.copies, storage.arena)
        if self._split is None and (
            self.mode == "hybrid"
            or (
                self.mode == "auto" and storage.device.separate_memory and storage.kind == "float32"
            )
        ):
            self._split = HybridSplit(
                storage.device,
                functools.partial(measure_rates, storage.copies, storage.arena, self.threads),
                self._room_bytes,
                self._say,
            )

    # -- during backward ----------------------------------------------------------------------

    def _needs_norm(self) -> bool:
        return self.max_grad_norm is not None or self.compute_grad_norm or self.skip_nonfinite

    @property
    def eager(self) -> bool:
        """Whether updates start during backward."""
        return not self._needs_norm() if self._eager is None else self._eager

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise OptionError(
                f"a parameter of shape {tuple(param.shape)} has a {grad.layout} gradient. "
                f"OffloadAdamW takes dense gradients: turn sparse=True off."
            )
        if param not in self._place:
            self.build()
        self._backwards.note()
        self._arrivals += 1
        index, position = self._place[param]
        bucket = self._buckets[index]
        bucket.collect(position, grad, self.accumulation_steps, self._arrivals)
        if bucket.complete(self.accumulation_steps):
            self._close(index)

    def _close(self, index: int) -> None:
        bucket = self._buckets[index]
        norm = self._needs_norm()
        self._pipeline.close(bucket, index, self.steps_done, norm, self.threads)
        if self.eager and not norm:
            bucket.used = self._hyper(bucket)
            if bucket.place.on_device:
                self._pipeline.hold_back(bucket, self._storage.device_inflight_bytes())
            self._pipeline.launch(bucket, bucket.used, None)

    def _hyper(self, bucket: Bucket) -> Hyper:
        group = self.param_groups[bucket.group_index]
        beta1, beta2 = group["betas"]
        return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])

    # -- step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue what is left of this step's update, and return.

        Without clipping most of it has run during backward. With clipping the updates start once
        the norm is known, in the order of the last forward (the reverse of the order in which
        gradients came). Neither order nor timing changes the values.

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
            self._norm = self._resident.step(
                self.max_grad_norm, self._needs_norm(), self.skip_nonfinite, self._say
            )
            self.steps_done += 1
            return loss
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._on_gradient(param)
        active = [index for index, bucket in enumerate(self._buckets) if bucket.started()]
        for index in active:
            if not self._buckets[index].closed:
                self._close(index)
        if self.eager and not self._needs_norm():
            self._check_unchanged([self._buckets[index] for index in active])
        else:
            self._launch_all([self._buckets[index] for index in active])
        for index in active:
            bucket = self._buckets[index]
            if self._pipeline.guard_reads and not read_guard.can_guard(bucket.params):
                bucket.finish()
            bucket.reset()
        self._backwards.clear()
        self.steps_done += 1
        if self.after_step is not None:
            self.after_step()
        if self._split is not None and self._resident is None:
            self._split.after_step(self)
        return loss

    def _launch_all(self, active: Sequence[Bucket]) -> None:
        verdict = None
        if self._needs_norm():
            verdict = self._pipeline.verdict(
                self._buckets,
                self.steps_done,
                self.max_grad_norm,
                self.skip_nonfinite,
                self._say,
            )
            self._norm = verdict
        for bucket in sorted(active, key=lambda bucket: -bucket.order):
            self._pipeline.launch(bucket, self._hyper(bucket), verdict)

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

    def synchronize(self) -> None:
        """Wait for updates in flight: every parameter and all state hold their new values.

        Raises:
            BaseException: what an update raised.
        """
        for bucket in self._buckets:
            bucket.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, those of a started accumulation included. Does not wait for updates."""
        self._drop("zero_grad() before step()")
        super().zero_grad(set_to_none=set_to_none)

    def drop_failed_backward(self) -> None:
        """If a backward has raised since the last step, drop what it left, and say so.

        To be called where no backward is running (a wrapped model's forward does).
        """
        if self._backwards.unfinished():
            self._drop("a backward raised before step()")

    def _drop(self, why: str) -> None:
        self._pipeline.drop_measures()
        started = [bucket for bucket in self._buckets if bucket.started()]
        written = [param for b in started if b.used is not None for param in b.params]
        for bucket in started:
            bucket.reset()
        self._backwards.clear()
        if written:
            shapes = ["x".join(map(str, param.shape)) or "scalar" for param in written]
            more = ", ..." if len(shapes) > 8 else ""
            self._say(
                f"{why}: {len(written)} parameters had already been updated during backward "
                f"(eager updates), of shapes {', '.join(shapes[:8])}{more}; the others keep their "
                f"values"
            )

    def _say(self, text: str) -> None:
        if self._on_event is not None:
            self._on_event(text)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State in torch.optim.AdamW's layout (plus fp32 `master` of low-precision parameters).

        fp32 moments are handed out as views of live memory, as torch's are of its own; bf16 and
        8-bit ones expanded to fp32, above 64 MiB in memory-mapped temporary files, so that saving
        needs no more RAM than training.

        Raises:
            StateError: in the middle of a step, whose gradients so far would be lost.
        """
        if self._resident is None:
            self._refuse_mid_step("state_dict()")
            self.synchronize()
            self._storage.settle()
            live, self.state = self.state, self._filled_state()
            try:
                return super().state_dict()
            finally:
                self.state = live
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW; copies into place.

        Raises:
            StateError: in the middle of an accumulation.
            DataError: groups, shapes or flags that do not match; nothing has been changed then.
        """
        self._refuse_mid_step("load_state_dict()")
        self.synchronize()
        state.check(self.param_groups, state_dict)
        if self._resident is not None:
            self.param_groups = self._resident.load(state_dict)
            self.state = self._resident.inner.state
            return
        self.build()
        self._storage.settle()
        was_resident = any(group.get("fused") for group in state_dict["param_groups"])
        state.load(self.param_groups, self._buckets, self._place, state_dict)
        if was_resident and self.after_step is not None:
            self.after_step()

    def _refuse_mid_step(self, what: str) -> None:
        if any(bucket.started() for bucket in self._buckets):
            raise StateError(
                f"{what} in the middle of a step or accumulation: gradients that have come would "
                f"be lost or counted twice. Call step() or zero_grad() first."
            )

    def _filled_state(self) -> Any:
        return state.filled(self._buckets, type(self.state))

    def _show_state(self, bucket: Bucket) -> None:
        """`optimizer.state[param]`: live views where state is fp32 (the step is filled on save)."""
        for param, entry in state.live(bucket):
            self.state[param] = entry

    def place_state(self, places: Sequence[str]) -> None:
        """Move the state of each bucket, in order of `buckets`.

        Places are "host", "zero_copy" and "resident". Values are kept bit
        for bit. Between steps; waits for updates in flight.

        Raises:
            StateError: in the middle of a step.
            OptionError: a place that does not exist, or another number of them.
        """
        self.build()
        self._refuse_mid_step("place_state()")
        self.synchronize()
        self._storage.settle()
        self._storage.move(self._buckets, places)
        for bucket in self._buckets:
            self._show_state(bucket)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The pieces that are transferred and updated as one, in the order of the groups."""
        return self._buckets

    def _room_bytes(self) -> int:
        """Device memory that state may take: what a step's peak leaves below the headroom."""
        device = self._storage.device
        usable = None if device is None else device.usable_bytes()
        if device is None or usable is None:
            return 0
        return int(usable * (1.0 - self.headroom)) - device.memory()["peak_allocated"]

    def stats(self) -> dict[str, Any]:
        """mode, steps, eager, buckets, parameters, values by place, host and device bytes of state,
        grad_norm, resident, link counters."""
        copies = self._storage.copies
        link = {} if copies is None else copies.stats()
        values: dict[str, int] = {}
        for bucket in self._buckets:
            name = bucket.place.name
            values[name] = values.get(name, 0) + bucket.layout.numel
        return {
            "mode": self.mode if self._resident is None else "resident",
            "moments": self._storage.kind,
            "steps": self.steps_done,
            "eager": self.eager,
            "buckets": len(self._buckets),
            "parameters": sum(len(bucket.params) for bucket in self._buckets),
            "values_by_place": values,
            "host_state_bytes": sum(bucket.host_bytes() for bucket in self._buckets),
            "device_state_bytes": sum(b.place.device_bytes() for b in self._buckets),
            "grad_norm": self.last_grad_norm,
            "resident": self.resident,
            "d2h_bytes": link["d2h"].bytes if link else 0,
            "h2d_bytes": link["h2d"].bytes if link else 0,
        }


def _forward_gradient(optimizer: weakref.ref[OffloadAdamW], param: torch.nn.Parameter) -> None:
    owner = optimizer()
    if owner is not None:
        owner._on_gradient(param)
