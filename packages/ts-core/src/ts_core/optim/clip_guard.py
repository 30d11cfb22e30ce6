"""torch's clipping functions see no gradients once these have streamed to the host: say so.

`torch.nn.utils.clip_grad_norm_` skips parameters whose `.grad` is None, so it would clip nothing
and say nothing. A guard around torch's functions raises for parameters of an OffloadAdamW.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ts_core.errors import StateError

_streamed_ids: dict[int, weakref.ref[torch.Tensor]] = {}
_GUARDED = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")


def mark_streamed(params: Iterable[torch.Tensor]) -> None:
    """Gradients of these parameters leave the device during backward."""
    for param in params:
        key = id(param)
        _streamed_ids[key] = weakref.ref(param, functools.partial(_forget, key))


def unmark_streamed(params: Iterable[torch.Tensor]) -> None:
    """Their gradients stay in `.grad` again."""
    for param in params:
        _streamed_ids.pop(id(param), None)


def install_clip_guard() -> None:
    """Guard torch's clipping functions once per process, wherever they were imported before.

    Each is a no_grad wrapper around the function proper, which is exchanged inside the wrapper, so
    that every reference to it is guarded. A torch without that wrapper has its names exchanged.
    """
    for name in _GUARDED:
        original = getattr(clip_grad, name, None)
        if original is None or getattr(original, "_trainstream_guard", False):
            continue
        cells = [
            cell for cell in original.__closure__ or () if inspect.isfunction(cell.cell_contents)
        ]
        if len(cells) == 1:
            cells[0].cell_contents = _guard(cells[0].cell_contents)
            original._trainstream_guard = True
            continue
        guarded = _guard(original)
        setattr(clip_grad, name, guarded)
        if hasattr(torch.nn.utils, name):
            setattr(torch.nn.utils, name, guarded)


def _forget(key: int, _: object) -> None:
    _streamed_ids.pop(key, None)


def _guard(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        else:
            parameters = list(parameters)
        if any(id(param) in _streamed_ids for param in parameters):
            raise StateError(
                f"torch.nn.utils.{original.__name__} finds no gradients: they have streamed to "
                f"host memory during backward. Pass max_grad_norm=... to trainstream.wrap() or "
                f"OffloadAdamW instead, which clips the exact global norm; with a "
                f"GradientOffloader clip what its take() returns."
            )
        return original(parameters, *args, **kwargs)

    guarded._trainstream_guard = True  # type: ignore[attr-defined]
    return guarded
