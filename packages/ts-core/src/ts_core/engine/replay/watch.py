"""Whether a block is what it was when it was recorded: its Python state and where its weights are.

A graph runs none of a block's Python, so whatever that Python looks at must be unchanged: modules,
parameters, flags such as `training` or PEFT's `_disable_adapters`, settings in plain lists and
dicts, hooks inside. What it cannot see are globals, closures and deeply nested objects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain
from operator import eq, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ts_core.engine.replay.signature import NotReplayable
from ts_core.store.leaves import Leaf, is_wrapper, tensor_leaves

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# Of the block itself, what runs around its forward.
_OUTSIDE = frozenset(("forward", "_non_persistent_buffers_set"))
_FIXED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DEPTH = 4


class ModuleWatch:
    """The Python state of a block at one moment.

    Args:
        block: the block.

    Raises:
        NotReplayable: a hook inside the block would not run in a replay, or the block is compiled.
    """

    def __init__(self, block: nn.Module) -> None:
        self._tables: list[dict[str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []
        self._states: list[_State] = []
        self._plain: list[Any] = []
        self._copies: list[Any] = []
        self._tokens: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for module in block.modules():
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
                raise NotReplayable("the block is compiled by torch.compile")
            state = module.__dict__
            if module is not block:
                self._hooks += [state[name] for name in _HOOKS]
            self._tables += [state[name] for name in _TABLES]
            # Of the block itself, `forward` comes and goes.
            self._states.append(_State(state, _OUTSIDE if module is block else frozenset()))
            for key, value in state.items():
                if key in _TABLES or "_hooks" in key or id(value) in seen:
                    continue
                if type(value) in _FIXED or callable(value):
                    continue
                seen.add(id(value))
                self._watch(value)
        self._states += [_State(table, frozenset()) for table in self._tables if table]
        self._entries = sum(map(len, self._tables))
        # Looked at all at once, without a line of Python for each: this runs before every replay.
        self._dicts = [state.table for state in self._states]
        self._size = sum(map(len, self._dicts))
        self._values = [value for state in self._states for value in state.values]
        if self._hooked():
            raise NotReplayable("modules inside the block have hooks, which a replay would not run")

    def _watch(self, value: Any) -> None:
        """What is inside an attribute of a module."""
        inside = getattr(value, "__dict__", None)
        if type(value) in _CONTAINERS and _is_plain(value):
            self._note(value)
        elif type(value) in _CONTAINERS or isinstance(value, torch.Tensor) or not inside:
            self._tokens.append((value, _token(value)))
        else:  # a config, say: its own plain values
            self._states.append(_State(inside, frozenset()))
            for item in inside.values():
                if type(item) in _CONTAINERS and _is_plain(item):
                    self._note(item)

    def _note(self, value: Any) -> None:
        self._plain.append(value)
        self._copies.append(copy.deepcopy(value))

    def unchanged(self) -> bool:
        """Whether the block is as it was."""
        if sum(map(len, self._tables)) != self._entries:
            return False
        objects = chain.from_iterable(table.values() for table in self._dicts)
        same = sum(map(len, self._dicts)) == self._size and all(map(is_, objects, self._values))
        if not same and not all(state.equal() for state in self._states):
            return False
        if not all(map(eq, self._plain, self._copies)):
            return False
        for value, token in self._tokens:
            if _token(value) != token:
                return False
        return not self._hooked()

    def _hooked(self) -> bool:
        return any(self._hooks) or torch_module._has_any_global_hook()


class _State:
    """A dict at one moment: the same keys with the same objects, or with equal plain values.

    Args:
        table: the dict.
        apart: keys that do not count.
    """

    __slots__ = ("_apart", "_keys", "table", "values")

    def __init__(self, table: dict[str, Any], apart: frozenset[str]) -> None:
        self.table = table
        self.values = tuple(table.values())
        self._apart = apart
        self._keys = tuple(table)

    def equal(self) -> bool:
        """Whether the dict is as it was."""
        then = {k: v for k, v in zip(self._keys, self.values, strict=True) if k not in self._apart}
        now = {key: value for key, value in self.table.items() if key not in self._apart}
        return now.keys() == then.keys() and all(
            now[key] is value
            or (type(now[key]) is type(value) and type(value) in _FIXED and now[key] == value)
            for key, value in then.items()
        )


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Whether it is plain data all through, which can be copied and compared."""
    if type(value) in _FIXED:
        return True
    if not depth or type(value) not in _CONTAINERS:
        return False
    items = value.values() if type(value) is dict else value
    return all(_is_plain(item, depth - 1) for item in items)


def _token(value: Any, depth: int = _DEPTH) -> Any:
    """Equal for equal plain data; the identity of anything else."""
    kind = type(value)
    if kind in _FIXED:
        return (kind, value)
    if depth:
        if kind in (list, tuple):
            return (kind, *[_token(item, depth - 1) for item in value])
        if kind is dict:
            return (kind, *[(key, _token(item, depth - 1)) for key, item in value.items()])
        if kind in (set, frozenset):
            return (kind, frozenset(value))
    if isinstance(value, torch.Tensor):
        return (id(value), 0 if is_wrapper(value) else value.data_ptr())
    return id(value)


class Weights:
    """The tensors of a block that a graph reads where they are.

    Args:
        block: the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self.params: list[nn.Parameter] = list(block.parameters())
        self.buffers: list[torch.Tensor] = list(block.buffers())
        self.leaves: list[Leaf] = []
        self._plain: list[torch.Tensor] = []
        self._inner: list[Leaf] = []
        for tensor in (*self.params, *self.buffers):
            found = list(tensor_leaves("", tensor))
            self.leaves += found
            if is_wrapper(tensor):
                self._inner += found
            else:
                self._plain.append(tensor)

    def addresses(self) -> tuple[int, ...]:
        """Where they are now; waits for updates of trained ones that are still in flight."""
        plain = [tensor.data_ptr() for tensor in self._plain]
        return (
            *plain,
            *[getattr(leaf.holder, leaf.attribute or "").data_ptr() for leaf in self._inner],
        )

    def trained(self) -> tuple[bool, ...]:
        """Which parameters ask for a gradient now."""
        return tuple([param.requires_grad for param in self.params])

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Their memory, as it is now."""
        for leaf in self.leaves:
            yield leaf.get().untyped_storage()


def parameter_tables(block: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """By `id` of a parameter: the entries of the module tables that hold it."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in block.modules():
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append((module._parameters, name))
    return found


class StandIns:
    """Aliases of trained parameters, put into the block in their place for a while.

    Autograd then finds leaves (or views) of its own: the parameters' hooks do not fire, and no
    accumulator that belongs to another stream is met during a capture.

    Args:
        block: the block.
        params: the parameters to replace.
        make: gives the alias of one.
    """

    def __init__(
        self,
        block: nn.Module,
        params: list[nn.Parameter],
        make: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        where = parameter_tables(block)
        self._entries = [(where[id(param)], param) for param in params]
        self._make = make
        self.tensors: list[torch.Tensor] = []

    def __enter__(self) -> list[torch.Tensor]:
        self.tensors = [self._make(param) for _, param in self._entries]
        for (places, _), tensor in zip(self._entries, self.tensors, strict=True):
            for table, name in places:
                table[name] = tensor
        return self.tensors

    def __exit__(self, *_: object) -> None:
        for places, param in self._entries:
            for table, name in places:
                table[name] = param
        self.tensors = []


def leaf_alias(param: torch.Tensor) -> torch.Tensor:
    """A leaf over the same memory, with the same version counter."""
    return nn.Parameter(param.detach(), requires_grad=True)


def view_alias(param: torch.Tensor) -> torch.Tensor:
    """A differentiable view of all of it."""
    return param.view_as(param)
