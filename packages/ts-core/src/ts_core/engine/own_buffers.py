"""Buffers that a block writes in its forward (batch statistics, counters), and computing it twice.

The second forward of a recomputed block starts from the buffers that the first one started from,
and what it writes is dropped: so the numbers are those of a run that keeps its activations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ts_core.errors import StateError
from ts_core.schedule.plan import human

# Larger buffers (a mask, packed weights of another library) are not copied; a block that writes
# one in its forward is refused.
LARGEST_COPY_BYTES = 4 << 20


class OwnBuffers:
    """The buffers of a block as they were when a forward of it began.

    Copies are made on the compute stream and live as long as this object.

    Args:
        block: the block, before its forward.
    """

    def __init__(self, block: nn.Module) -> None:
        self._before: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._large: list[tuple[nn.Module, str, torch.Tensor, int]] = []
        for module in block.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.is_meta:
                    continue
                if buffer.numel() * buffer.element_size() <= LARGEST_COPY_BYTES:
                    self._before.append((module, name, buffer.detach().clone()))
                else:
                    self._large.append((module, name, buffer, buffer._version))

    def check_written(self) -> None:
        """To be called after the forward.

        Raises:
            StateError: it wrote a buffer that is too large to be copied.
        """
        for module, name, buffer, version in self._large:
            now = module._buffers.get(name)
            if now is not buffer or buffer._version != version:
                raise StateError(
                    f"a block that is to be recomputed writes its buffer {name!r} "
                    f"({type(module).__name__}, {human(buffer.numel() * buffer.element_size())}) "
                    f"in forward, so a second forward would start from other values. Pass "
                    f"recompute=False, or a list of block indices without it."
                )

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Within, the block sees the buffers of then; afterwards its own are there untouched."""
        now = [(module, name, module._buffers.get(name)) for module, name, _ in self._before]
        for module, name, before in self._before:
            module._buffers[name] = before.clone()  # a graph may be gone through again
        try:
            yield
        finally:
            for module, name, own in now:
                module._buffers[name] = own
