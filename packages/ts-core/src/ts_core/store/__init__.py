"""Where the bytes of a block's weights live, and which of them are on the device now."""

from __future__ import annotations

from ts_core.store.homes import TrainedHome
from ts_core.store.images import BlockImage, build_image, pageable_leaves
from ts_core.store.leaves import Leaf, tensor_leaves
from ts_core.store.pager import ParamPager
from ts_core.store.placing import ImageStore

__all__ = [
    "BlockImage",
    "ImageStore",
    "Leaf",
    "ParamPager",
    "TrainedHome",
    "build_image",
    "pageable_leaves",
    "tensor_leaves",
]
