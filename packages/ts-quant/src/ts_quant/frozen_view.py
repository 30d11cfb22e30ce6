"""Views of a stored weight, which are decoded copies: they can be read, and refuse to be written.

A view of an ordinary tensor shares its memory, so a write into it changes the tensor. A stored
weight has no such memory: `q[0]`, `q.t()` or `q.view(-1)` show a decoded copy, and what is written
into that would be lost. Such results are therefore `FrozenView`s. They have memory of their own
and compute like ordinary tensors (results are ordinary tensors, views of them are FrozenViews);
an operation that writes into one raises FrozenWeightError.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ts_quant.errors import FrozenWeightError

_REFUSED = (
    "a view of a quantized weight is a decoded copy, so what {what} writes into it would be lost. "
    "Write new values into the whole weight: dense = q.dequantize(), change dense, q.copy_(dense) "
    "(encodes again); or take .clone() of the view for an ordinary tensor"
)


class FrozenView(torch.Tensor):
    """An ordinary tensor that refuses writes; made by `shown`."""

    _plain: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if written(func, args, kwargs, FrozenView):
            raise FrozenWeightError(_REFUSED.format(what=func))
        args, kwargs = tree_map(_plain_of, (args, kwargs))
        return shown(func, lambda: func(*args, **kwargs))

    @property
    def data(self) -> Tensor:
        """Another FrozenView of the same memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise FrozenWeightError(_REFUSED.format(what="an assignment to .data"))

    # What reads memory directly; PyTorch refuses these for subclasses.

    def numpy(self, *, force: bool = False) -> Any:
        """A NumPy array of the values that refuses writes, too."""
        array = self._plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def apply_(self, function: Any) -> Any:
        """Refused: it writes."""
        raise FrozenWeightError(_REFUSED.format(what="apply_"))

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self._plain.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = copy.deepcopy(self._plain, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"FrozenView({self._plain!r})"


def shown(func: Any, compute: Callable[[], Any]) -> Any:
    """What an operation gives for a stored weight's decoded copy: frozen where it is a view.

    Args:
        func: the operation.
        compute: runs it on the decoded copy. Tensors in its result that are not plain (fake ones,
            those that torch.compile records) are left alone.
    """
    if not _is_view(func):
        return compute()
    if torch.is_inference_mode_enabled():
        # PyTorch gives a view its base's version count, which an inference tensor cannot have.
        with torch.inference_mode(False):
            result = compute()
    else:
        result = compute()
    if isinstance(result, (list, tuple)):
        return type(result)([_frozen(value) for value in result])
    return _frozen(result)


def _frozen(value: Any) -> Any:
    if type(value) is not Tensor:
        return value
    make: Any = torch.Tensor._make_subclass
    view: FrozenView = make(FrozenView, value)
    view._plain = value
    return view


def _plain_of(value: Any) -> Any:
    return value._plain if isinstance(value, FrozenView) else value


_VIEWS: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    """Whether the operation's results alias an argument that it does not write."""
    known = _VIEWS.get(func)
    if known is None:
        infos = [result.alias_info for result in func._schema.returns]
        known = any(info is not None and not info.is_write for info in infos)
        _VIEWS[func] = known
    return known


def written(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], kind: type
) -> bool:
    """Whether the operation writes into an argument of that type."""
    schema = func._schema  # type: ignore[attr-defined]
    if not schema.is_mutable:
        return False
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if any(isinstance(leaf, kind) for leaf in tree_leaves(value)):
            return True
    return False
