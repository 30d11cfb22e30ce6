"""What autograd keeps in place of a tensor that views a streaming slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ts_core.store.leaves import Leaf

if TYPE_CHECKING:
    from ts_core.store.images import BlockImage
    from ts_core.store.pager import ParamPager

# After torch's words for a weight that was written between its forward and its backward.
WRITTEN = (
    "Finish the backward before the weight is updated or written. By default the optimizer updates "
    "it during the backward: for several backward passes in a step (retain_graph=True, say), pass "
    "accumulation_steps=<backward passes per step> to wrap()."
)


@dataclass(frozen=True)
class SavedView:
    """What autograd keeps instead of a tensor that views a slot: how to find it again.

    `offset` counts elements from the start of the slot.
    """

    pager: ParamPager
    image: BlockImage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    leaf: Leaf | None = None
    version: int = 0

    def tensor(self) -> torch.Tensor:
        """The same view, in whatever slot the block is in now (it is loaded if in none).

        A copy in memory of its own when the backward itself is recorded (create_graph=True), as
        its nodes keep what they read.

        Raises:
            RuntimeError: the weight was written since, in place or by an optimizer, as torch raises
                for weights that do not stream.
        """
        if self.leaf is not None and self.leaf.version() != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.leaf.name} of block {self.image.index} (streamed) is "
                f"at version {self.leaf.version()}; expected version {self.version} instead. "
                f"{WRITTEN}"
            )
        slot = self.pager.require(self.image)
        empty = torch.empty(0, dtype=self.dtype, device=slot.buffer.device)
        start = slot.buffer.storage_offset() // empty.element_size()
        storage = slot.buffer.untyped_storage()
        view = empty.set_(storage, start + self.offset, self.shape, self.stride)
        return view.clone() if torch.is_grad_enabled() else view
