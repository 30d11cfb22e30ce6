"""Streaming from staged memory and from files equals resident training bit for bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core import memory_report, pinned_stats, unwrap, wrap
from ts_core.engine import hosting
from ts_core.errors import DataError, OutOfBudgetError
from ts_core.memory.arena import PinnedArena
from ts_core.memory.budget import PageLockBudget
from ts_core.store import disk, placing
from ts_core.store.placing import ImageStore
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train
from ts_core.transfer import CopyEngine, PendingCopy

DEPTH = 6


@pytest.fixture
def keep_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int], Any]:
    """`keep_in(source, blocks)`: the budget holds that many blocks, the others go to `source`.

    Returns the value of disk_offload. "ring" and "disk through ring" behave as on a device with
    memory of its own.
    """

    def choose(source: str, blocks: int) -> Any:
        image_bytes = 21_248 if source else 0  # of a block of width 32
        budget = PageLockBudget(blocks * image_bytes + 1, "a test's")
        monkeypatch.setattr(hosting, "page_lock_budget", lambda: budget)
        store = functools.partial(ImageStore, through_ring="ring" in source)
        monkeypatch.setattr(hosting, "ImageStore", store)
        monkeypatch.setattr(placing, "_LEAST_PART_BYTES", 3000)
        monkeypatch.setattr(disk, "READ_BYTES", 1000)
        return tmp_path / "disk" if "disk" in source else None

    return choose


def run(
    param_offload: Any,
    directory: Any = None,
    *,
    steps: int = 4,
    accumulation: int = 2,
    delays: int | None = None,
    device: str = "host",
    **options: Any,
) -> tuple[TinyModel, TrainingRecord]:
    model = tiny_model(DEPTH, 32, dropout=0.1, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        param_offload=param_offload,
        accumulation_steps=accumulation,
        quantize="none",
        offload=True,
        device=device,
        disk_offload=directory,
    )
    where = "cpu" if device == "host" else device
    with contextlib.nullcontext() if delays is None else inject_delays(delays) as plan:
        record = train(model, optimizer, steps, accumulation=accumulation, device=where)
    assert plan is None or plan.pauses > 0
    return model, record


@pytest.fixture(scope="module")
def resident() -> dict[torch.dtype, TrainingRecord]:
    return {dtype: run(False, dtype=dtype)[1] for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("source", ["ring", "disk", "disk through ring"])
@pytest.mark.parametrize("in_memory", [0, 3])
@pytest.mark.parametrize(("delays", "dtype"), [(7, torch.float32), (None, torch.bfloat16)])
def test_streamed_equals_resident(
    keep_in: Callable[[str, int], Any],
    resident: dict[torch.dtype, TrainingRecord],
    source: str,
    in_memory: int,
    delays: int | None,
    dtype: torch.dtype,
) -> None:
    directory = keep_in(source, in_memory)
    model, streamed = run(True, directory, delays=delays, dtype=dtype)
    assert resident[dtype].differences(streamed) == []
    params = memory_report(model)["params"]
    beyond = params["disk_blocks"] if "disk" in source else params["staged_blocks"]
    least = DEPTH - in_memory * (2 if dtype is torch.bfloat16 else 1)  # half the bytes
    assert len(beyond) == least
    if least:
        read = params["disk_read_bytes"] if "disk" in source else params["bounce_bytes"]
        assert 0 < read <= params["load_bytes"]
        assert any("page-lock budget" in line for line in model._trainstream_session.events)
    unwrap(model)
    if directory is not None:
        assert not directory.exists() or list(directory.iterdir()) == []


@pytest.mark.parametrize("source", ["ring", "disk", "disk through ring"])
def test_a_missing_wait_is_caught(
    keep_in: Callable[[str, int], Any],
    resident: dict[torch.dtype, TrainingRecord],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
) -> None:
    whole = CopyEngine.wait_compute

    def impatient(self: CopyEngine, event: Any) -> None:
        if not isinstance(event, PendingCopy):
            whole(self, event)

    monkeypatch.setattr(CopyEngine, "wait_compute", impatient)
    _, broken = run(True, keep_in(source, 0), delays=7)
    assert resident[torch.float32].differences(broken) != []


@pytest.mark.parametrize("source", ["ring", "disk", "disk through ring"])
def test_what_the_user_writes_counts_and_survives(
    keep_in: Callable[[str, int], Any], source: str
) -> None:
    losses = []
    tokens = torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(0))
    for offload in (False, True):
        model, _ = run(offload, keep_in(source, 0) if offload else None, steps=1)
        model.eval()
        seen = [model(tokens)]
        with torch.no_grad():
            model.layers[1].up.weight.mul_(0.5)  # in place
        seen.append(model(tokens))
        model.layers[2].down.weight.data = model.layers[2].down.weight.data * 2  # replaced
        seen.append(model(tokens))
        model.layers[3].mix.data.add_(0.25)  # leaves no trace
        seen.append(model(tokens))
        state = {name: value * 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        seen.append(model(tokens))
        seen[-1].backward()
        model.zero_grad()
        unwrap(model)
        seen.append(model(tokens))
        losses.append((seen, {k: v.clone() for k, v in model.state_dict().items()}))
        copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(losses[0][0], losses[1][0], strict=True))
    assert all(torch.equal(losses[0][1][name], losses[1][1][name]) for name in losses[0][1])


def test_written_to_the_file_itself(keep_in: Callable[[str, int], Any]) -> None:
    directory = keep_in("disk", 0)
    model, _ = run(True, directory, steps=1)
    image = model._trainstream_session.pager.images[2]
    with torch.no_grad():
        model.layers[2].up.weight.fill_(3.0)
    model(torch.zeros(1, 4, dtype=torch.long))
    stored = torch.frombuffer(bytearray(image.source.file.path.read_bytes()), dtype=torch.uint8)
    assert torch.equal(stored, image.buffer_h)
    [place] = [p for p in image.placements if p.leaf.name == "up.weight"]
    assert bool((place.view(stored) == 3.0).all())


def test_a_failed_read_reaches_the_caller_and_the_next_step_is_clean(
    keep_in: Callable[[str, int], Any],
    resident: dict[torch.dtype, TrainingRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for source in ("disk", "disk through ring"):
        model, _ = run(True, keep_in(source, 0), steps=0)
        optimizer = model._trainstream_session.optimizer
        tokens = torch.randint(0, 37, (2, 7))
        whole, count = os.preadv, iter(range(10**6))

        def failing(fd: int, views: Any, at: int) -> int:
            if next(count) == 130:  # noqa: B023
                raise OSError(5, "a bad sector")
            return whole(fd, views, at)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            with pytest.raises(DataError, match=r"cannot be read from .*bad sector"):
                for _ in range(3):
                    model(tokens).backward()
                    optimizer.zero_grad()
        optimizer.zero_grad()
        record = train(model, optimizer, 4, accumulation=2)
        assert resident[torch.float32].differences(record) == []
        unwrap(model)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_leaves_the_model_as_it_was(
    keep_in: Callable[[str, int], Any], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    directory = keep_in("disk", 1)
    model = tiny_model(DEPTH, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    whole, count = getattr(os, call), iter(range(100))

    def full(*arguments: Any) -> Any:
        if next(count) == 3:
            raise OSError(28, "No space left on device")
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OutOfBudgetError, match=r"is full.*unchanged"):
            wrap(model, param_offload=True, device="host", disk_offload=directory)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert list(directory.iterdir()) == []
    model, _ = wrap(model, param_offload=True, device="host", disk_offload=directory)
    assert memory_report(model)["params"]["disk_blocks"] == [0, 1, 2, 4, 5]


def test_the_folder_goes_with_the_model(keep_in: Callable[[str, int], Any]) -> None:
    directory = keep_in("disk", 0)
    model, _ = run(True, directory, steps=1)
    state = model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    assert len(list(directory.iterdir())) == 1
    unwrap(model)
    assert list(directory.iterdir()) == []
    assert all(torch.equal(kept[name], value) for name, value in state.items())


@pytest.mark.parametrize("source", ["ring", "disk", "disk through ring"])
def test_nothing_grows_over_many_runs(
    keep_in: Callable[[str, int], Any],
    source: str,
    tmp_path: Path,
    started_threads: Callable[[], list[threading.Thread]],
    open_files: Callable[[], list[str]],
) -> None:
    """Wrapped, used in all ways, broken in the middle, and unwrapped: no thread or file is left."""
    for seed in range(5):
        model, _ = run(True, keep_in(source, seed % 3), steps=1)
        optimizer = model._trainstream_session.optimizer
        tokens = torch.randint(0, 37, (2, 7))
        model.eval()
        with torch.no_grad():
            model(tokens)
        model.train()
        loss = model(tokens)
        with pytest.raises(ZeroDivisionError):
            loss.register_hook(lambda gradient: 1 / 0)
            loss.backward()
        model(tokens)  # its loads are on the way when the model is unwrapped
        optimizer.zero_grad()
        unwrap(model)
        del model, optimizer, loss
        gc.collect()
        end = time.monotonic() + 30
        while started_threads() and time.monotonic() < end:
            time.sleep(0.01)  # threads that were told to end need a moment
        assert started_threads() == []
        assert [file for file in open_files() if file.startswith(str(tmp_path))] == []


EXIT = """
import functools, sys, torch
from ts_core import wrap
from ts_core.engine import hosting
from ts_core.memory.budget import PageLockBudget
from ts_core.testing import inject_delays, tiny_model
hosting.page_lock_budget = lambda: PageLockBudget(1, "a test's")
hosting.ImageStore = functools.partial(hosting.ImageStore, through_ring=sys.argv[2] == "ring")
model, optimizer = wrap(
    tiny_model(6, 32), device="host", param_offload=True, quantize="none", disk_offload=sys.argv[1]
)
with inject_delays(1, max_ms=20):
    model(torch.zeros(2, 7, dtype=torch.long)).backward()
    model(torch.zeros(2, 7, dtype=torch.long))
    print("left in the middle")
    sys.exit(3)
"""


@pytest.mark.parametrize("way", ["ring", "straight"])
def test_exit_with_loads_on_the_way(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]], way: str
) -> None:
    done = run_python(EXIT, str(tmp_path), way, status=3)
    assert done.stdout == "left in the middle\n" and done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["ring", "disk through ring"])
@pytest.mark.parametrize("in_memory", [0, 3])
def test_streamed_equals_resident_on_the_gpu(
    keep_in: Callable[[str, int], Any], source: str, in_memory: int
) -> None:
    _, expected = run(False, device="cuda")
    directory = keep_in(source, in_memory)
    model, streamed = run(True, directory, device="cuda", delays=3)
    assert expected.differences(streamed) == []
    params = memory_report(model)["params"]
    assert len(params["disk_blocks"]) + len(params["staged_blocks"]) >= DEPTH - in_memory
    unwrap(model)
    assert all(p.is_cuda for p in model.parameters())


@pytest.mark.gpu
def test_only_what_the_budget_holds_is_page_locked_on_the_gpu(
    keep_in: Callable[[str, int], Any],
) -> None:
    keep_in("ring", 0)
    model, _ = run(True, device="cuda", steps=1)
    store, pager = model._trainstream_session.store, model._trainstream_session.pager
    assert store.blocks_in("staged") == list(range(DEPTH))
    assert not any(image.buffer_h.is_pinned() for image in pager.images.values())
    assert all(slot.buffer_h.is_pinned() for slot in store._stager._state.slots)
    unwrap(model)


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["ring", "disk through ring"])
def test_staged_loads_make_torch_wait_nowhere(
    keep_in: Callable[[str, int], Any], source: str, no_host_waits: Callable[[], None]
) -> None:
    model, _ = run(True, keep_in(source, 0), device="cuda", steps=2)
    optimizer = model._trainstream_session.optimizer
    tokens = torch.zeros(2, 7, dtype=torch.long, device="cuda")
    torch.cuda.synchronize()
    no_host_waits()
    for _ in range(2):
        model(tokens)  # nothing here may block on the device but the stager's own waits
    torch.cuda.set_sync_debug_mode("default")
    optimizer.zero_grad()
    unwrap(model)


@pytest.mark.gpu
def test_where_nothing_can_be_page_locked_training_is_exact_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, expected = run(False, device="cuda")
    monkeypatch.setattr(PinnedArena, "try_pinned", lambda self, nbytes, *, tag: None)
    model, record = run(True, device="cuda", delays=5)
    assert expected.differences(record) == []
    assert any("several times slower" in line for line in model._trainstream_session.events)
    unwrap(model)


@pytest.mark.gpu
def test_host_arena_is_reserved_on_the_gpu() -> None:
    before = pinned_stats()["arena_bytes"]
    model, _ = wrap(
        tiny_model(DEPTH, 32),
        device="cuda",
        param_offload=True,
        quantize="none",
        host_arena="48MiB",
    )
    after = pinned_stats()
    assert after["arena_largest_free"] >= 40 << 20
    assert after["arena_bytes"] >= before and after["arena_refusal"] == ""
    calls = after["host_alloc_calls"]
    train(model, model._trainstream_session.optimizer, 3, device="cuda")
    assert pinned_stats()["host_alloc_calls"] == calls
    unwrap(model)
