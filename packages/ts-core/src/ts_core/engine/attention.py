"""Which of torch's attention kernels a wrapped model uses.

`scaled_dot_product_attention` picks the first kernel of a priority order that can run. Here the
order is changed while the model's forward runs, and while a block is computed again in backward, so
that both use the same kernel.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ts_core.device import Device
from ts_core.engine.attention_order import attention_order, settle_torchs_order
from ts_core.engine.own_forward import OwnForward
from ts_core.engine.turns import in_backward

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# Device time below which a call matters too little for another choice, and timings are noise.
WORTH_MS = 0.2
GAIN = 0.95
_TRIALS = 5
# The device begins this much later with what is timed, so that the host has queued all of it: other
# work of the host, or of other processes on a GPU, then counts in few of the trials, or in none.
_AHEAD_S = 2e-3
# Training forwards in which "auto" looks for a call to time. A mode that looks also stands in the
# way of others (block replay), so a model without such calls is let go.
_LOOKS = 3


class _Entered(threading.local):
    """What forwards of the calling thread have opened and not closed yet."""

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []


class AttentionChoice:
    """The order of kernels for one wrapped model.

    Args:
        asked: a name of BACKENDS, which comes first; "auto": the fastest on the shape of the first
            training forward, where that is worth while; None: torch's own order.
        device: of the session.
        say: told what was chosen.

    Attributes:
        mode: as asked.
        backend: the name that comes first; None for torch's own order.
        timings_ms: forward and backward of each kernel on the model's shape, once measured.
    """

    def __init__(self, asked: str | None, device: Device, say: Callable[[str], None]) -> None:
        self.mode = asked
        self.backend = asked if asked in BACKENDS else None
        if not device.separate_memory and self.backend in ("efficient", "cudnn"):
            say(f"attention={asked!r}: torch's own order, as that kernel needs a GPU")
            self.backend = None
        if not device.separate_memory and self.backend == "flash":
            say("attention='flash': torch's own order, which has its flash kernel first on the CPU")
            self.backend = None
        self.timings_ms: dict[str, float] = {}
        self._device = device
        self._say = say
        self._undecided = asked == "auto" and device.separate_memory
        self._looks = 0
        if asked == "auto" and not self._undecided:
            say("attention='auto': torch's own order, as there is no GPU to time")
        self._order: list[SDPBackend] | None = None
        self._here = _Entered()
        self._handles: list[RemovableHandle] = []
        self._forwards: list[OwnForward] = []
        self._left_out: set[str] = set()

    def install(self, model: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
        """Change the order around every forward of `model`.

        Args:
            model: the whole.
            blocks: what backward may compute again, under the order of the last training forward.
        """
        if self.mode is None or (self.backend is None and not self._undecided):
            return
        settle_torchs_order(self._device.torch_device)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            plain = kwargs.get("attention_mask") is None and kwargs.get("position_ids") is None
            context: AbstractContextManager[Any] = attention_order(None)
            training = module.training and torch.is_grad_enabled()
            if plain and training and self._looks_again():
                context = _FirstShape(self._decide)
            elif plain:
                order = self._order_now()
                context = attention_order(order)
                if training:
                    self._order = order
            elif training:
                self._order = None
            if not self._undecided and self.backend is None:
                self._restore_forwards()
            context.__enter__()
            self._here.contexts.append(context)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._here.contexts:
                self._here.contexts.pop().__exit__(None, None, None)

        self._handles.append(
            model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )
        self._handles.append(model.register_forward_hook(after, always_call=True))
        again = functools.partial(_again, weakref.ref(self))
        self._forwards = [OwnForward(block, again) for block in blocks]

    def again(self) -> AbstractContextManager[Any]:
        """The order of the last training forward, for what backward computes again."""
        return attention_order(self._order)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._restore_forwards()

    def report(self) -> dict[str, Any]:
        """For memory_report()."""
        return {"mode": self.mode, "backend": self.backend, "timings_ms": dict(self.timings_ms)}

    def _restore_forwards(self) -> None:
        """Take what is around the blocks' forwards off."""
        for forward in reversed(self._forwards):
            forward.remove()
        self._forwards.clear()

    def _looks_again(self) -> bool:
        """Whether a forward is to be searched for a call to time."""
        if self._undecided and self._looks == _LOOKS:
            self._undecided = False
            self._say("attention='auto': torch's own order, as no call without a mask was found")
        self._looks += 1
        return self._undecided

    def _order_now(self) -> list[SDPBackend] | None:
        """The order under the determinism asked for now."""
        if self.backend is None:
            return None
        left_out = not_deterministic()
        hidden = left_out & {self.backend}
        if hidden - self._left_out:
            self._say(
                f"attention: {self.backend} is left out, since deterministic algorithms are asked "
                f"for and it is not one"
            )
        self._left_out = hidden
        if not self._device.separate_memory and self.backend == "math":
            return [BACKENDS["math"]]  # on the CPU torch knows no order
        names = [self.backend, *(name for name in BACKENDS if name != self.backend)]
        return [BACKENDS[name] for name in names if name not in left_out]

    def _decide(self, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
        """Time the kernels on the shape of a call (once)."""
        self._undecided = False
        with self._device.trial():  # the scores of the "math" kernel may take gigabytes
            self.timings_ms = time_backends(query, key, options, self._device)
        own = self.timings_ms.pop("torch", None)
        allowed = {n: t for n, t in self.timings_ms.items() if n not in not_deterministic()}
        words = ", ".join(f"{name} {ms:.3f} ms" for name, ms in sorted(self.timings_ms.items()))
        if own is None or own < WORTH_MS or not allowed:
            self._say(
                f"attention='auto': torch's own order; a call takes too little to matter ({words})"
            )
            return
        fastest = min(allowed, key=lambda name: allowed[name])
        if allowed[fastest] < GAIN * own:
            self.backend = fastest
            self._say(f"attention='auto': {fastest} first ({words}; torch's own choice {own:.3f})")
        else:
            self._say(f"attention='auto': torch's own order is as fast as any ({words})")


def _again(
    choice: weakref.ref[AttentionChoice], own: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    here = choice()
    if here is None or not in_backward():
        return own(*args, **kwargs)
    with here.again():
        return own(*args, **kwargs)


class _FirstShape(TorchFunctionMode):
    """Sees the first attention call without a mask that asks for gradients, and hands it on."""

    def __init__(self, found: Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]) -> None:
        super().__init__()
        self._found: Callable[..., None] | None = found

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and self._found is not None:
            masked = len(args) > 3 or kwargs.get("attn_mask") is not None
            if not masked and len(args) == 3 and args[0].requires_grad:
                found, self._found = self._found, None
                named = ("is_causal", "scale", "enable_gqa")
                found(args[0], args[1], {k: kwargs[k] for k in named if k in kwargs})
        return func(*args, **kwargs)


def not_deterministic() -> set[str]:
    """Kernels that torch's determinism setting rules out now.

    Flash attention has a deterministic backward, and so has the memory-efficient kernel unless
    warn_only is set, when it uses its faster one.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return set()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return {"cudnn", "efficient"} if warn_only else {"cudnn"}


def time_backends(
    query: torch.Tensor, key: torch.Tensor, options: dict[str, Any], device: Device
) -> dict[str, float]:
    """Milliseconds that the device needs for forward and backward, per kernel that runs this call,
    and "torch" for its own choice.

    Args:
        query, key: [batch, heads, tokens, head size] on the device; only shape, strides and dtype
            count, and under autocast the dtype to which it would cast them.
        options: keywords of scaled_dot_product_attention.
    """
    dtype, kind = query.dtype, query.device.type
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    # Not random: the generators belong to the model's dropout.
    q, k, v = (torch.full_like(t, 0.01, dtype=dtype, requires_grad=True) for t in (query, key, key))

    def once() -> None:
        functional.scaled_dot_product_attention(q, k, v, **options).sum().backward()
        q.grad = k.grad = v.grad = None

    def best() -> float:
        once()
        stream = device.compute_stream()
        found = []
        for _ in range(_TRIALS):
            stream.synchronize()
            device.delay(stream, _AHEAD_S)
            begin = device.timestamp()
            once()
            end = device.timestamp()
            stream.synchronize()
            seconds = end.seconds_since(begin)
            assert seconds is not None  # both lie behind
            found.append(seconds * 1e3)
        return min(found)

    timings: dict[str, float] = {}
    with (
        torch.enable_grad(),
        torch.autocast(q.device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),  # no paging of these
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch explains there why a kernel cannot run
        timings["torch"] = best()
        for name, backend in BACKENDS.items():
            try:
                with sdpa_kernel(backend):
                    timings[name] = best()
            except RuntimeError:  # torch's way of saying that it cannot run this call
                continue
    return timings


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
