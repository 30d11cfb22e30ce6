"""What reaches into a tensor's memory past every dispatch, for weights that have none.

A stored weight is a wrapper without memory of its own. PyTorch hands these few requests the address
that is not there (`apply_` and DLPack then crash the process) or refuses them for any subclass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ts_quant.errors import FrozenWeightError


def refuse_graph(source: object) -> None:
    """Refuse to copy values that autograd follows into a stored weight.

    Raises:
        FrozenWeightError: the source needs a gradient, which would not reach it.
    """
    if torch.is_grad_enabled() and isinstance(source, Tensor) and source.requires_grad:
        raise FrozenWeightError(
            "a quantized weight is frozen: the source of copy_ needs a gradient, which would not "
            "reach it. Copy source.detach(), or under torch.no_grad()"
        )


class NoMemory:
    """Mixed into the tensor classes of stored weights, before torch.Tensor."""

    def dequantize(self) -> Tensor:
        """The weight as an ordinary tensor."""
        raise NotImplementedError

    def tolist(self) -> Any:
        """The decoded values as nested lists."""
        return self.dequantize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The decoded values as a NumPy array, which refuses writes: they would be lost."""
        array = self.dequantize().numpy(force=force)
        array.flags.writeable = False
        return array

    def apply_(self, function: object) -> Any:
        """Refused: it writes."""
        raise FrozenWeightError(
            "a quantized weight is frozen: apply_ would change it in place. Change "
            "q.dequantize(), and encode the result: q.copy_(dense)"
        )

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        raise FrozenWeightError(
            "a quantized weight has no memory that DLPack could share: export q.dequantize()"
        )
