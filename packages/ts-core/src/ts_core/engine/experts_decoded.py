"""Full-precision values of stored stacks of experts, for as long as one layer computes with them.

Autograd would keep every decoded expert until backward. A layer of stored experts therefore runs
with saved-tensor hooks that keep a handle in place of each tensor that views decoded values, and
decodes them again when backward asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ts_core.engine.experts_layer import StackAdapter, StackedExperts
from ts_core.engine.turns import in_backward
from ts_core.store.leaves import is_wrapper


class Home(Protocol):
    """What can say which memory of its own a tensor views, and find the same values again."""

    def saved(self, tensor: Tensor) -> SavedView | None:
        """A handle for a tensor that views memory of this home; None for another."""

    def memory(self, key: Any) -> Tensor:
        """The memory that a handle with `key` views, as it is now."""


class SavedView:
    """Kept by autograd in place of a tensor: where its values come from. Offsets in elements."""

    __slots__ = ("dtype", "home", "key", "offset", "shape", "stride")

    def __init__(self, home: Home, key: Any, memory: Tensor, tensor: Tensor) -> None:
        self.home = home
        self.key = key
        self.dtype = tensor.dtype
        self.offset = int(tensor.storage_offset()) - _start(memory, tensor.dtype)
        self.shape = tensor.shape
        self.stride = tuple(int(step) for step in tensor.stride())

    def tensor(self) -> Tensor:
        """The same values; memory of their own when the backward itself is recorded."""
        memory = self.home.memory(self.key)
        start = _start(memory, self.dtype)
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        view = empty.set_(memory.untyped_storage(), start + self.offset, self.shape, self.stride)
        return view.clone() if torch.is_grad_enabled() else view


def _start(memory: Tensor, dtype: torch.dtype) -> int:
    return memory.storage_offset() * memory.element_size() // dtype.itemsize


@contextmanager
def saved_views(home: Home) -> Iterator[None]:
    """Saved-tensor hooks that keep a handle instead of any tensor that views `home`'s memory.

    Hooks that are already active keep seeing every other tensor.
    """
    if not torch.is_grad_enabled():
        yield
        return
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    outer_pack, outer_unpack = outer if outer is not None else (_same, _same)

    def pack(tensor: Tensor) -> Any:
        saved = home.saved(tensor) if type(tensor) is Tensor else None
        return outer_pack(tensor) if saved is None else saved

    def unpack(packed: Any) -> Any:
        return packed.tensor() if isinstance(packed, SavedView) else outer_unpack(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _same(value: Any) -> Any:
    return value


def _plain(values: Tensor) -> Tensor:
    """The same memory as an ordinary tensor (a codec may guard what it has decoded)."""
    if type(values) is Tensor:
        return values
    empty = torch.empty(0, dtype=values.dtype, device=values.device)
    start, step = values.storage_offset(), values.stride()
    return empty.set_(values.untyped_storage(), start, values.shape, step)


@contextmanager
def replaced(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """Let reads of these attributes see `values`; parameters of that name stay as they are."""
    before = {name: module.__dict__[name] for name in values if name in module.__dict__}
    module.__dict__.update(values)
    try:
        yield
    finally:
        for name in values:
            del module.__dict__[name]
        module.__dict__.update(before)


ADAPTED = -1
"""In place of a row: the whole stack with what adapters add."""


Factors = list[tuple[Tensor, Tensor, float]]


def picked_factors(adapters: Sequence[StackAdapter], order: Tensor | None) -> Factors:
    """The factors of the experts `order` [rows] names, or of all."""
    if order is None:
        return [(a.left, a.right, a.scale) for a in adapters]
    return [(_select(a.left, order), _select(a.right, order), a.scale) for a in adapters]


def _select(matrices: Tensor, order: Tensor) -> Tensor:
    """matrices[order], its dimensions in memory in the same order: products then round alike."""
    dims = sorted(range(matrices.dim()), key=matrices.stride, reverse=True)
    back = sorted(range(len(dims)), key=dims.__getitem__)
    return matrices.permute(dims).index_select(dims.index(0), order).permute(back)


def fold(values: Tensor, factors: Factors) -> Tensor:
    """A new stack: values + sum of scale * left @ right, in the stack's own dtype."""
    with torch.autocast(values.device.type, enabled=False):
        for left, right, scale in factors:
            values = torch.baddbmm(values, left, right, alpha=scale)
    return values


class Decoded:
    """Decoded (or adapted) stacks and single experts: of each stack the last that was asked for.

    Nothing is kept beyond a backward.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, int | None], Tensor] = {}
        self._ends = False

    def get(self, stored: Tensor, stack: int, row: int | None, count: int | None = None) -> Tensor:
        """Values of a stored stack, or of one expert of it.

        Args:
            stored: the stack, of a class that decodes itself.
            stack: its number.
            row: one expert, or None for all.
            count: of all, how many have values; the rest becomes zero.
        """
        found = self._values.get((stack, row))
        if found is not None:
            return found
        self._drop(stack)
        with torch.no_grad():
            if row is not None:
                values = _plain(stored[row])
            elif count is None or count == stored.shape[0]:
                values = stored.dequantize()
            else:
                part: Tensor = stored.stack_part(0, count).dequantize()  # type: ignore[attr-defined]
                values = part.new_zeros(stored.shape)
                values[:count] = part
        return self._keep((stack, row), values)

    def put(self, stack: int, values: Tensor) -> Tensor:
        """Keep an adapted stack in place of what was there of it."""
        self._drop(stack)
        return self._keep((stack, ADAPTED), values)

    def find(self, key: tuple[int, int | None]) -> Tensor | None:
        """What is kept under `key`."""
        return self._values.get(key)

    def _keep(self, key: tuple[int, int | None], values: Tensor) -> Tensor:
        self._values[key] = values
        if in_backward() and not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self.clear)
        return values

    def _drop(self, stack: int) -> None:
        for other in [key for key in self._values if key[0] == stack]:
            del self._values[other]

    def key_of(self, tensor: Tensor) -> tuple[int, int | None] | None:
        """Stack and row of the values that `tensor` views, if it does."""
        address = tensor.untyped_storage().data_ptr()
        for key, values in self._values.items():
            if values.untyped_storage().data_ptr() == address:
                return key
        return None

    def __getitem__(self, key: tuple[int, int | None]) -> Tensor:
        return self._values[key]

    def clear(self) -> None:
        """Let the memory go."""
        self._ends = False
        self._values.clear()


class OneByOne:
    """Stands for a stored stack in a forward that reads one expert at a time.

    Args:
        like: the stack, for its shape, dtype and device.
        decode: gives the values of one expert (an int) or of all (None).
    """

    def __init__(self, like: Tensor, decode: Callable[[int | None], Tensor]) -> None:
        self._decode = decode
        self.shape = like.shape
        self.dtype = like.dtype
        self.device = like.device

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0):
            return self._decode(int(index))
        return self._decode(None)[index]


def stored_stacks(spec: StackedExperts) -> list[str]:
    """Names of the stacks that are stored in a codec's format."""
    found = [name for name in spec.parameters if is_wrapper(spec.module._parameters[name])]  # type: ignore[arg-type]
    return [name for name in found if hasattr(spec.module._parameters[name], "dequantize")]


class Forwards:
    """Replaced forwards of modules, and the way back."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def redirect(self, spec: StackedExperts, run: Callable[..., Any]) -> None:
        """Let calls of the spec's module go to `run(own forward, args, kwargs)`.

        The modules around it get the forwards that the spec gives them.
        """
        own = spec.module.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(own, args, kwargs)

        # Compiled code could not wait for what was picked, nor decode twice.
        self._put(spec.module, torch.compiler.disable(forward))
        for module, instead in spec.around:
            self._put(module, instead)

    def undo(self) -> None:
        """Every module has its own forward again."""
        for module, before in self._before:
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before
        self._before.clear()

    def _put(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward
