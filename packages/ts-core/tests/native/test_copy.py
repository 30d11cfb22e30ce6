"""Parallel host copies."""

from __future__ import annotations

import threading

import pytest
import torch

from ts_core import _native

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4097, MIB - 1, MIB + 1, 3 * MIB + 17])
@pytest.mark.parametrize(("dst", "src"), [(0, 0), (1, 0), (0, 3), (5, 11)])
def test_exactly_the_range_is_copied(nbytes: int, dst: int, src: int) -> None:
    source = torch.randint(0, 256, (nbytes + 32,), dtype=torch.uint8)
    target = torch.full((nbytes + 32,), 7, dtype=torch.uint8)
    _native.copy_bytes(target.data_ptr() + dst, source.data_ptr() + src, nbytes)
    assert torch.equal(target[dst : dst + nbytes], source[src : src + nbytes])
    assert (target[:dst] == 7).all() and (target[dst + nbytes :] == 7).all()


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_large_copies_bypass_the_cache_and_are_right(many_cores: None, threads: int) -> None:
    nbytes = 33 * MIB + 5  # beyond the size from which streaming stores are used
    source = torch.randint(0, 256, (nbytes + 3,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 70, dtype=torch.uint8)
    _native.copy_bytes(target.data_ptr() + 9, source.data_ptr() + 1, nbytes, threads)
    assert torch.equal(target[9 : 9 + nbytes], source[1 : 1 + nbytes])
    assert not target[:9].any() and not target[9 + nbytes :].any()


def test_a_reader_sees_a_finished_copy(many_cores: None) -> None:
    """Streaming stores are fenced: another thread told of the end reads the new bytes."""
    nbytes = 17 * MIB
    source, target = torch.empty(2, nbytes, dtype=torch.uint8)
    for value in range(4):
        source.fill_(value)
        seen: list[bool] = []
        done = threading.Event()

        def read(value: int = value, seen: list[bool] = seen, done: threading.Event = done) -> None:
            done.wait()
            seen.append(bool((target == value).all()))

        reader = threading.Thread(target=read)
        reader.start()
        _native.copy_bytes(target.data_ptr(), source.data_ptr(), nbytes)
        done.set()
        reader.join()
        assert seen == [True]
