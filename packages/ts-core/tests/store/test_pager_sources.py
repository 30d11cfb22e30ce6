"""The pager with sources that another thread loads: slots given away early, loads that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch
from torch import nn

from ts_core.store import ParamPager
from ts_core.store.images import BlockImage, image_over, lay_out, pageable_leaves
from ts_core.store.sources import MemorySource, StagedSource
from ts_core.store.staging import MemoryReader, Stager
from ts_core.transfer import CopyEngine


class GatedReader(MemoryReader):
    """Copies once its gate is open, or fails."""

    def __init__(self, buffer_h: torch.Tensor) -> None:
        super().__init__(buffer_h)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def start(self, target_h: torch.Tensor, offset: int) -> Sequence[Future[None]]:
        self.entered.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return super().start(target_h, offset)


def image(index: int, layer: nn.Linear, stager: Stager | None) -> BlockImage:
    """An image of a layer, staged where there is a stager."""
    placements, size_bytes = lay_out(pageable_leaves(layer, set()))
    buffer_h = torch.zeros(size_bytes, dtype=torch.uint8)
    placements[0].view(buffer_h).copy_(layer.weight)
    if stager is None:
        made = image_over(index, placements, MemorySource(buffer_h))
    else:
        source = StagedSource(buffer_h, stager)
        source._reader = GatedReader(buffer_h)
        made = image_over(index, placements, source)
    made.bind_host()
    return made


@pytest.fixture
def layers() -> list[nn.Linear]:
    made = [nn.Linear(32, 32, bias=False) for _ in range(2)]
    for layer in made:
        layer.requires_grad_(False)
    return made


@pytest.mark.parametrize("direct", [False, True])
def test_a_slot_given_away_is_not_written_by_the_load_before(
    copies: CopyEngine,
    new_stager: Callable[..., Stager],
    layers: list[nn.Linear],
    direct: bool,
) -> None:
    stager = new_stager(direct=direct)
    slow, quick = image(0, layers[0], stager), image(1, layers[1], None)
    reader = slow.source._reader
    expected = quick.buffer_h.clone()
    pager = ParamPager([slow, quick], copies, slot_count=1)
    pager.new_pass()  # begins to load the slow one
    reader.entered.wait()
    entering = threading.Thread(target=pager.enter, args=(1, 1))
    entering.start()
    time.sleep(0.05)
    reader.gate.set()
    entering.join()
    stager.close()
    copies.synchronize()
    assert torch.equal(pager.ring.slots[0].buffer[: expected.numel()], expected)
    assert torch.equal(layers[1].weight, quick.placements[0].view(expected))
    pager.close()


@pytest.mark.parametrize("direct", [False, True])
def test_what_a_failed_load_left_is_never_read(
    copies: CopyEngine,
    new_stager: Callable[..., Stager],
    layers: list[nn.Linear],
    direct: bool,
) -> None:
    """The block can be entered again in the same pass, and is loaded again then."""
    broken = image(0, layers[0], new_stager(direct=direct))
    reader = broken.source._reader
    values = layers[0].weight.clone()
    reader.error = OSError("gone for a moment")
    reader.gate.set()
    pager = ParamPager([broken], copies, slot_count=1)
    for _ in range(2):
        with pytest.raises(OSError, match="for a moment"):
            pager.enter(0, 1)
        assert torch.equal(layers[0].weight, values)  # of the host image
    reader.error = None
    pager.enter(0, 1)
    assert torch.equal(layers[0].weight, values)
    assert layers[0].weight.data_ptr() == pager.ring.slots[0].buffer.data_ptr()
    assert pager.stats.loads == 3
    pager.close()


def test_a_pager_closes_while_a_load_waits(
    copies: CopyEngine, new_stager: Callable[..., Stager], layers: list[nn.Linear]
) -> None:
    stager = new_stager()
    images = [image(index, layer, stager) for index, layer in enumerate(layers)]
    for made in images:
        made.source._reader.gate.set()
    images[0].source._reader.gate.clear()
    pager = ParamPager(images, copies, slot_count=2)
    pager.new_pass()
    images[0].source._reader.entered.wait()
    closing = threading.Thread(target=pager.close)
    closing.start()
    time.sleep(0.02)
    assert closing.is_alive()  # the memory may not go while it is written
    images[0].source._reader.gate.set()
    closing.join()
