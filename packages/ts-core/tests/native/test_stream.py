"""The memory stream: every byte of a written region, and no other, in all ways of running it."""

from __future__ import annotations

import pytest
import torch

from ts_core._native_stream import stream_memory


@pytest.mark.parametrize(("parts", "per_turn"), [(1, 1), (3, 2), (50, 1), (50, 7)])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4095, 100_003])
def test_every_byte_of_written_regions_is_changed_once(
    each_level: str, many_cores: None, size: int, parts: int, per_turn: int
) -> None:
    written = torch.randint(0, 256, (size + 64,), dtype=torch.uint8)
    read = torch.randint(0, 256, (size,), dtype=torch.uint8)
    before, unchanged = written.clone(), read.clone()
    regions = [(written.data_ptr() + 5, size, True), (read.data_ptr(), size, False)]
    stream_memory(regions, parts=parts, parts_per_turn=per_turn, threads=4, flip=0x5A)
    assert torch.equal(written[5 : 5 + size], before[5 : 5 + size] ^ 0x5A)
    assert torch.equal(written[:5], before[:5])
    assert torch.equal(written[5 + size :], before[5 + size :])
    assert torch.equal(read, unchanged)
    stream_memory(regions, parts=parts, flip=0x5A)
    stream_memory(regions, parts=parts)
    assert torch.equal(written, before)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="address is a null pointer; 8 bytes"):
        stream_memory([(0, 8, True)], parts=1)
    with pytest.raises(ValueError, match="bytes=-1"):
        stream_memory([(1 << 20, -1, True)], parts=1)
    with pytest.raises(ValueError, match="parts=0, parts_per_turn=1"):
        stream_memory([], parts=0)
