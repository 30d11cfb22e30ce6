"""The hooks on a stack of blocks: weights come before a block computes, activations go after.

Forward: a pre-hook enters the block, then its own forward runs under saved-tensor hooks, or as a
checkpoint that is computed again in backward. Backward: a hook on the block's outputs fires when
their gradient is known, which is before anything inside the block runs backward, and enters it
again. Tensors that view a streaming slot are not kept by autograd: a handle finds them again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from ts_core.engine.activation_meter import tensors_in
from ts_core.engine.activations import Activations
from ts_core.engine.casts import Casts
from ts_core.engine.own_buffers import OwnBuffers
from ts_core.engine.own_forward import OwnForward
from ts_core.engine.replay.policy import BlockReplay
from ts_core.engine.saved_tensors import PLAIN_TYPES, saved_tensor_hooks
from ts_core.engine.turns import Turns, in_backward
from ts_core.schedule.plan import KEEP, OFFLOAD, RECOMPUTE
from ts_core.store.pager import ParamPager


class BlockRunner:
    """Hooks on the blocks of a model.

    Args:
        blocks: the stack, in order.
        pager: of its paged weights; None when none stream.
        activations: decides where activations are; None leaves them alone.
        replay: replays blocks that were recorded; None never does.
        turns: whose pass it is; None makes them for these blocks alone.
        casts: lets go of autocast's copies; None makes it for these blocks alone.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        pager: ParamPager | None,
        activations: Activations | None = None,
        replay: BlockReplay | None = None,
        turns: Turns | None = None,
        casts: Casts | None = None,
    ) -> None:
        self._pager = pager
        self._activations = activations
        self._replay = replay
        self._handles: list[RemovableHandle] = []
        self._forwards: list[OwnForward] = []
        self._removed = False
        self._blocks = [weakref.ref(block) for block in blocks]
        self._turns = turns
        self._casts = casts or Casts(blocks)
        self._replace_forwards()
        if pager is not None:
            self._turns = turns or Turns(pager.copies.device)
            for index, block in enumerate(blocks):
                self._hook(index, block, pager, self._turns)

    def remove(self) -> None:
        """Take the hooks off."""
        self._removed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._restore_forwards()

    def new_pass(self, args: Any = (), kwargs: Any = None) -> None:
        """Called before the model's own forward, with its arguments."""
        if not in_backward():
            if self._pager is not None:
                self._pager.new_pass()
            self._casts.new_pass()
            if self._activations is not None:
                self._activations.new_pass(args, kwargs)
                if self._removed:
                    return  # blocks have changed place, and another runner has taken over
                if self._activations.done and self._pager is None and self._replay is None:
                    self._restore_forwards()
                else:
                    self._replace_forwards()

    def run(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block's own forward with its activations treated as decided."""
        guard = self._guard(index)
        activations = self._activations
        if activations is None or activations.done or in_backward() or not torch.is_grad_enabled():

            def plainly() -> Any:
                if guard is None or not torch.is_grad_enabled():
                    return forward(*args, **kwargs)
                with saved_tensor_hooks(guard):
                    return forward(*args, **kwargs)

            return self._perhaps_replayed(index, KEEP, forward, args, kwargs, plainly)
        if activations.store.went_back:
            self._casts.new_pass()
            activations.new_pass()  # the caller does not go through the model's own forward
        span = activations.begin(index, args, kwargs)
        failed = True
        try:

            def as_decided() -> Any:
                if span.mode == RECOMPUTE:
                    again = self._recomputation(index, forward, guard, span.observe)
                    try:
                        return checkpoint(again, *args, use_reentrant=False, **kwargs)
                    finally:
                        self._casts.computed(index, activations.device_type)
                page = span.call.page if span.mode == OFFLOAD else None
                if page is None and span.observe is None and guard is None:
                    return forward(*args, **kwargs)
                with saved_tensor_hooks(guard, page, span.observe):
                    return forward(*args, **kwargs)

            output = self._perhaps_replayed(index, span.mode, forward, args, kwargs, as_decided)
            failed = False
        finally:
            activations.end(index, span, failed)
        if span.watch_output:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(span.call.reached)
        return output

    def _perhaps_replayed(
        self,
        index: int,
        mode: str,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        eager: Callable[[], Any],
    ) -> Any:
        if self._replay is None or in_backward():
            return eager()
        if self._turns is not None:  # a recording's buffers are for one pass at a time
            with self._turns.alone():
                return self._replayed(index, mode, forward, args, kwargs, eager)
        return self._replayed(index, mode, forward, args, kwargs, eager)

    def _replayed(
        self,
        index: int,
        mode: str,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        eager: Callable[[], Any],
    ) -> Any:
        assert self._replay is not None
        if mode == OFFLOAD:
            return self._replay.paged(eager)
        enter = functools.partial(self._enter_again, index)
        guard = self._guard(index)
        return self._replay.call(index, mode, forward, args, kwargs, eager, enter, guard)

    def _enter_again(self, index: int) -> None:
        """Before the backward of a replayed block."""
        if self._activations is not None:
            self._activations.store.went_back = True
        if self._turns is not None:
            self._turns.backward(self._release)
        if self._pager is not None:
            self._pager.enter(index, -1)

    def _recomputation(
        self,
        index: int,
        forward: Callable[..., Any],
        guard: ParamPager | None,
        observe: Callable[[torch.Tensor], None] | None,
    ) -> Callable[..., Any]:
        """What checkpoint() calls: the block's forward, which its backward calls once more."""
        first = True
        block = self._blocks[index]()
        assert block is not None
        buffers = OwnBuffers(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if first:
                output = run_once(*args, **kwargs)
                buffers.check_written()
                return output
            with buffers.put_back():
                return run_once(*args, **kwargs)

        def run_once(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            watch = observe if first else None
            if not first and self._activations is not None:
                self._activations.store.went_back = True
            if not first and self._pager is not None and self._turns is not None:
                self._turns.backward(self._release)
                self._pager.enter(index, -1)
            first = False
            if guard is None and watch is None:
                return forward(*args, **kwargs)
            with saved_tensor_hooks(guard, observe=watch):
                return forward(*args, **kwargs)

        return run

    def _replace_forwards(self) -> None:
        if not self._forwards:
            blocks = [(index, reference()) for index, reference in enumerate(self._blocks)]
            self._forwards = [
                OwnForward(block, functools.partial(_run, weakref.ref(self), index))
                for index, block in blocks
                if block is not None
            ]

    def _restore_forwards(self) -> None:
        for forward in reversed(self._forwards):  # a module may be in the stack twice
            forward.remove()
        self._forwards.clear()

    def _guard(self, index: int) -> ParamPager | None:
        """The pager, when the block has plain weights that stream (it may change place)."""
        image = None if self._pager is None else self._pager.images.get(index)
        return self._pager if image is not None and image.has_plain else None

    def _hook(self, index: int, block: nn.Module, pager: ParamPager, turns: Turns) -> None:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if in_backward():
                turns.backward(self._release)
                pager.enter(index, -1)
            else:
                turns.enter_block()
                pager.enter(index, 1)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            try:
                if self._guard(index) is not None:
                    output = _own_memory(output, pager)
                if torch.is_grad_enabled():
                    for tensor in tensors_in(output):
                        if tensor.requires_grad:
                            tensor.register_hook(enter_backward)
                if not in_backward():
                    pager.leave(index)
            finally:
                if not in_backward():
                    turns.leave()
            return output

        def enter_backward(grad: torch.Tensor) -> None:
            turns.backward(self._release)
            pager.enter(index, -1)

        self._handles.append(
            block.register_forward_pre_hook(
                torch.compiler.disable(before), with_kwargs=True, prepend=True
            )
        )
        self._handles.append(
            block.register_forward_hook(torch.compiler.disable(after), always_call=True)
        )
        self._handles.append(block.register_state_dict_pre_hook(self._settle(index)))
        for module in block.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(self._before_load(index)))

    def _release(self) -> None:
        """At the end of a backward: weights are those of the host images again."""
        if self._pager is not None:
            self._pager.release_all()

    def _settle(self, index: int) -> Callable[..., None]:
        def settle(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if self._pager is not None and self._turns is not None:
                with self._turns.alone():
                    self._pager.release_all()

        return settle

    def _before_load(self, index: int) -> Callable[..., None]:
        def before_load(module: nn.Module, *args: Any) -> None:
            if self._pager is not None and self._turns is not None:
                with self._turns.alone():
                    self._pager.invalidate(index)

        return before_load


def _run(
    runner: weakref.ref[BlockRunner], index: int, own: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    here = runner()
    if here is None:
        return own(*args, **kwargs)
    try:
        return here.run(index, own, args, kwargs)
    except Exception:
        raise
    except BaseException:  # torch calls no hooks then
        if here._turns is not None:
            here._turns.end_pass()
        raise


def _own_memory(output: Any, pager: ParamPager) -> Any:
    """`output` with copies in place of tensors that view a slot (a returned weight, say)."""
    if isinstance(output, torch.Tensor):
        plain = type(output) in PLAIN_TYPES
        return output.clone() if plain and pager.saved_view(output) is not None else output
    if not any(
        type(tensor) in PLAIN_TYPES and pager.saved_view(tensor) is not None
        for tensor in tensors_in(output)
    ):
        return output
    if isinstance(output, dict):
        for key, value in output.items():
            output[key] = _own_memory(value, pager)
        return output
    items = [_own_memory(item, pager) for item in output]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
