"""Streams that belong to one owner at a time."""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict, deque
from typing import Any

import pytest
import torch

from ts_core.device import own_streams
from ts_core.device.own_streams import own_stream

GPU0 = torch.device("cuda", 0)


class FakeStream:
    """As torch.cuda.Stream: attributes may be set, and weak references are of no use."""

    __slots__ = ("__dict__",)

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams have numbers, and nobody has a GPU."""
    numbers = itertools.count(1)
    monkeypatch.setattr(own_streams, "_FREE", defaultdict(deque))
    monkeypatch.setattr(own_streams, "_create", lambda index: next(numbers))
    monkeypatch.setattr(own_streams, "_wrap", lambda handle, index: FakeStream(handle))


@pytest.mark.usefixtures("driver")
def test_a_stream_has_one_owner_and_goes_to_a_later_one_of_its_role() -> None:
    held: list[Any] = [own_stream(GPU0) for _ in range(40)]
    assert [stream.cuda_stream for stream in held] == list(range(1, 41))
    del held[3]
    gc.collect()
    other: Any = own_stream(GPU0, "captured")
    again: Any = own_stream(GPU0)
    assert (other.cuda_stream, again.cuda_stream) == (41, 4)
    elsewhere: Any = own_stream(torch.device("cuda", 1))
    assert elsewhere.cuda_stream == 42


@pytest.mark.gpu
def test_streams_of_torch_never_come_again_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32, and gives them out in turn."""
    theirs = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    ours = [own_stream(GPU0) for _ in range(40)]
    assert len({stream.cuda_stream for stream in ours}) == 40
    assert theirs.isdisjoint(stream.cuda_stream for stream in ours)
    ours.clear()
    gc.collect()

    def refuse(index: int) -> int:
        raise AssertionError("a stream is made, though 40 are free")

    monkeypatch.setattr(own_streams, "_create", refuse)
    again = [own_stream(GPU0) for _ in range(40)]  # those, or what sessions before have left
    assert len({stream.cuda_stream for stream in again}) == 40
    assert theirs.isdisjoint(stream.cuda_stream for stream in again)


@pytest.mark.gpu
def test_a_process_that_used_them_ends_in_order(run_python: Any) -> None:
    run_python(
        """
import torch
from ts_core.device.own_streams import own_stream

device = torch.device("cuda", 0)
handles = set()
for _ in range(500):
    streams = [own_stream(device) for _ in range(3)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(8, device=device).add_(1)
        stream.synchronize()
        handles.add(stream.cuda_stream)
    del stream, streams
assert len(handles) <= 4, len(handles)
"""
    )


@pytest.mark.gpu
def test_work_runs_and_is_captured_on_one() -> None:
    stream, x = own_stream(GPU0), torch.arange(8.0, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 2
    stream.synchronize()
    assert torch.equal(y, x * 2)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        y += x
        graph.capture_end()
    graph.replay()
    graph.replay()
    assert torch.equal(y, x * 4)


@pytest.mark.gpu
def test_sessions_in_a_row_leave_no_more_workspaces_than_one() -> None:
    """cuBLAS's workspaces (32 MiB each on Hopper) are kept for each stream that ran a product."""
    from ts_core import unwrap, wrap
    from ts_core.testing import tiny_model, train

    def session() -> int:
        model = tiny_model(3, 64, full=True).cuda()
        model, optimizer = wrap(model, lr=1e-2, device="cuda", quantize="none", cuda_graphs=True)
        train(model, optimizer, 10, device="cuda")
        optimizer.synchronize()
        assert model._trainstream_session.replay.report()["replayed_forwards"] > 0
        unwrap(model)
        del model, optimizer
        gc.collect()
        return int(torch.cuda.memory_allocated())

    session()
    first = session()
    assert max(session() for _ in range(3)) <= first + (1 << 20)
