"""One quantized activation for all the weights it meets: q, k and v; gate and up.

The last activation of each device and thread is kept with its quantized form, for as long as the
activation itself lives and is not changed. It is found again by identity and version, on the same
stream, and within the same CUDA graph capture (or outside any).

A replayed CUDA graph writes into its output without a new version, so that a layer behind it gets
the same tensor with other values. Such a layer meets its activation for the second time, and then
it is quantized anew.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ts_quant.codecs.operators import eager
from ts_quant.matmul.capture import capture_id


@dataclass
class _Entry:
    x: weakref.ref[Tensor]
    key: tuple[Any, ...]
    made: list[Tensor]
    users: set[int]


class _Entries(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, _Entry] = {}


_ENTRIES = _Entries()


def shared(
    x: Tensor, user: object, kind: tuple[Any, ...], make: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """What `make` returned for this very tensor and another user just before, else a new result.

    Args:
        x: the activation as the model passes it, before any cast.
        user: the weight that x is multiplied with.
        kind: everything beside x that `make` depends on.
        make: quantizes x.
    """
    # Inference tensors have no version, and compiled code merges equal calls by itself.
    if not eager(x) or x.is_inference():
        return make()
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    key = (kind, x._version, x.data_ptr(), x.shape, stream, capture_id(x.device, stream))
    entries = _ENTRIES.by_device
    entry = entries.get(x.device)
    if entry is not None and entry.x() is x and entry.key == key and id(user) not in entry.users:
        entry.users.add(id(user))
        return entry.made
    made = make()
    device = x.device

    def forget(reference: weakref.ref[Tensor]) -> None:
        entry = entries.get(device)
        if entry is not None and entry.x is reference:
            del entries[device]

    entries[device] = _Entry(weakref.ref(x, forget), key, made, {id(user)})
    return made
