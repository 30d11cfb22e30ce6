"""The hooks on a stack of blocks: bring a block's weights before it computes, either way.

Forward: a pre-hook enters the block. Backward: a hook on the block's outputs fires when their
gradient is known, which is before anything inside the block runs backward, and enters it again.
Tensors that view a streaming slot are not kept by autograd: a block-scoped saved-tensor hook
keeps a handle, and finds the view again wherever the block is then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ts_core.store.pager import ParamPager, SavedView

_Hook = Callable[[Any], Any]


class BlockRunner:
    """Hooks on the blocks of a wrapped model.

    Args:
        blocks: the stack, in order.
        pager: of its paged weights.
    """

    def __init__(self, blocks: Sequence[nn.Module], pager: ParamPager) -> None:
        self._pager = pager
        self._handles: list[RemovableHandle] = []
        self._open = _OpenContexts()
        self._release_queued = False
        for index, block in enumerate(blocks):
            self._hook(index, block)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, index: int, block: nn.Module) -> None:
        def guards_saved() -> bool:
            image = self._pager.images.get(index)  # a block may change place between steps
            return image is not None and image.has_plain

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._pager.enter(index, -1 if in_backward() else 1)
            if torch.is_grad_enabled() and guards_saved():
                self._open.enter(index, saved_view_hooks(self._pager))

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            self._open.exit(index)
            if guards_saved():
                output = _own_memory(output, self._pager)
            if torch.is_grad_enabled():
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(enter_backward)
            if not in_backward():
                self._pager.leave(index)
            return output

        def enter_backward(grad: torch.Tensor) -> None:
            self._pager.enter(index, -1)
            if not self._release_queued:
                self._release_queued = True
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._release)

        self._handles.append(
            block.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )
        self._handles.append(block.register_forward_hook(after, always_call=True))
        self._handles.append(block.register_state_dict_pre_hook(self._settle(index)))
        for module in block.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(self._before_load(index)))

    def new_pass(self) -> None:
        """Called before the model's own forward, outside any backward."""
        if not in_backward():
            self._release_queued = False
            self._pager.new_pass()

    def _release(self) -> None:
        """At the end of a backward: weights are those of the host images again."""
        self._release_queued = False
        self._pager.release_all()

    def _settle(self, index: int) -> Callable[..., None]:
        def settle(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            self._pager.release_all()

        return settle

    def _before_load(self, index: int) -> Callable[..., None]:
        def before_load(module: nn.Module, *args: Any) -> None:
            self._pager.invalidate(index)

        return before_load


class _OpenContexts(threading.local):
    """Contexts opened by a block's pre-hook and closed by its forward hook, per thread."""

    def __init__(self) -> None:
        self._stacks: dict[int, list[AbstractContextManager[Any]]] = {}

    def enter(self, index: int, context: AbstractContextManager[Any]) -> None:
        context.__enter__()
        self._stacks.setdefault(index, []).append(context)

    def exit(self, index: int) -> None:
        stack = self._stacks.get(index)
        if stack:
            stack.pop().__exit__(None, None, None)


def in_backward() -> bool:
    """Whether the calling thread is inside an autograd backward (a recomputation, say)."""
    return bool(torch._C._current_graph_task_id() != -1)


def saved_view_hooks(pager: ParamPager) -> AbstractContextManager[Any]:
    """Saved-tensor hooks that keep a handle instead of any tensor that views a slot.

    Hooks that are already active (activation checkpointing, a user's) keep seeing every other
    tensor.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    outer_pack, outer_unpack = outer if outer is not None else (_same, _same)

    def pack(tensor: torch.Tensor) -> Any:
        if type(tensor) in (torch.Tensor, nn.Parameter):
            view = pager.saved_view(tensor)
            if view is not None:
                return view
        return outer_pack(tensor)

    def unpack(packed: Any) -> Any:
        if isinstance(packed, SavedView):
            return packed.tensor()
        return outer_unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _same(value: Any) -> Any:
    return value


def _own_memory(output: Any, pager: ParamPager) -> Any:
    """`output` with copies in place of tensors that view a slot (a returned weight, say)."""
    if isinstance(output, torch.Tensor):
        plain = type(output) in (torch.Tensor, nn.Parameter)
        return output.clone() if plain and pager.saved_view(output) is not None else output
    if not any(
        type(tensor) in (torch.Tensor, nn.Parameter) and pager.saved_view(tensor) is not None
        for tensor in _tensors(output)
    ):
        return output
    if isinstance(output, dict):
        for key, value in output.items():
            output[key] = _own_memory(value, pager)
        return output
    items = [_own_memory(item, pager) for item in output]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, tuple | list):
        return [tensor for item in output for tensor in _tensors(item)]
    if isinstance(output, dict):
        return [tensor for item in output.values() for tensor in _tensors(item)]
    return []
