"""Paged trained weights: updated in host memory, bit for bit what resident ones become."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from typing import Any

import pytest
import torch

from ts_core import memory_report, unwrap, wrap
from ts_core.device.host import HostDevice
from ts_core.optim.places import NAMES
from ts_core.optim.storage import Storage
from ts_core.store import ParamPager
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

DEPTH = 4


def run(
    share: Any,
    *,
    steps: int = 3,
    accumulation: int = 1,
    delays: int | None = None,
    device: str = "host",
    dtype: torch.dtype = torch.float32,
    places: int | None = None,
    width: int = 16,
    **options: Any,
) -> tuple[TinyModel, TrainingRecord]:
    """Train every parameter of a small model; `places`: seed of where state is put at random."""
    model = tiny_model(DEPTH, width, dropout=0.1, dtype=dtype, full=True)
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        param_offload=share,
        accumulation_steps=accumulation,
        quantize="none",
        offload=True,
        device=device,
        threads=1,
        **options,
    )
    if places is not None:
        draw = random.Random(places)
        optimizer.place_state([draw.choice(NAMES) for _ in optimizer.buckets])
    pauses = contextlib.nullcontext() if delays is None else inject_delays(delays, max_ms=2.0)
    with pauses as plan:
        where = "cpu" if device == "host" else device
        record = train(model, optimizer, steps, accumulation=accumulation, device=where)
    assert plan is None or plan.pauses > 0
    return model, record


@functools.cache
def resident(**options: Any) -> TrainingRecord:
    """The record of the same run with every block on the device."""
    return run(False, **options)[1]


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host device behaves as if its memory were not the host's: gradients cross a link."""
    monkeypatch.setattr(HostDevice, "separate_memory", True)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with a number of slots for the pagers made from then on."""

    def use(count: int) -> None:
        def make(images: Any, copies: Any, planned: int) -> ParamPager:
            return ParamPager(images, copies, count)

        monkeypatch.setattr("ts_core.engine.assembling.ParamPager", make)

    return use


CASES: list[tuple[Any, int, dict[str, Any]]] = [
    (True, 2, {}),
    (True, 1, {"max_grad_norm": 0.5}),
    (True, 3, {"max_grad_norm": 0.5, "accumulation": 2}),
    (0.5, 2, {"accumulation": 3}),
    ([0, 3], 2, {"eager": False}),
    ([1], 1, {"dtype": torch.bfloat16}),
    (True, 2, {"dtype": torch.bfloat16, "max_grad_norm": 0.5, "accumulation": 2}),
    (True, 4, {"dtype": torch.float16, "max_grad_norm": 1.0}),
    (0.75, 2, {"dtype": torch.bfloat16, "moment_dtype": "bf16"}),
    (True, 2, {"moment_dtype": "int8", "max_grad_norm": 0.5}),
    ([2, 3], 3, {"moment_dtype": "bfloat16", "accumulation": 2}),
    (True, 2, {"optimizer_mode": "gpu"}),
    (True, 3, {"optimizer_mode": "gpu", "max_grad_norm": 0.5, "accumulation": 2}),
    (0.5, 2, {"optimizer_mode": "gpu", "dtype": torch.bfloat16, "eager": False}),
    (True, 2, {"max_inflight_bytes": 1500, "max_grad_norm": 0.5}),
    (True, 2, {"recompute": True, "max_grad_norm": 0.5}),
    (True, 2, {"activation_offload": True, "min_offload_bytes": 0, "accumulation": 2}),
    (0.5, 3, {"recompute": (0, 1), "activation_offload": 0.5, "min_offload_bytes": 0}),
]


@pytest.mark.parametrize(("share", "count", "options"), CASES)
def test_streamed_equals_resident(share: Any, count: int, options: Any, slots: Any) -> None:
    slots(count)
    model, record = run(share, delays=count, **options)
    assert resident(**options).differences(record) == []
    params = memory_report(model)["params"]
    paged = params["paged_blocks"]
    assert len(paged) == (len(share) if isinstance(share, list) else round(DEPTH * float(share)))
    assert len(model._trainstream_session.homes) == 6 * len(paged)


@pytest.mark.parametrize(("share", "count", "options"), CASES[1:13:2] + CASES[6:7])
@pytest.mark.usefixtures("linked")
def test_over_a_link(share: Any, count: int, options: Any, slots: Any) -> None:
    """Gradients are copied to host memory, updates of what is not paged copied back."""
    slots(count)
    _, record = run(share, delays=count, **options)
    assert run(False, **options)[1].differences(record) == []


@pytest.mark.usefixtures("linked")
def test_a_step_is_the_same_whoever_measures_its_gradients() -> None:
    """Sums of several passes: of paged weights the host measures them, of others the device."""
    options: dict[str, Any] = {"optimizer_mode": "gpu", "accumulation": 2, "width": 128}
    _, record = run(True, max_grad_norm=0.05, **options)
    assert run(False, max_grad_norm=0.05, **options)[1].differences(record) == []


@pytest.mark.parametrize("seed", [1, 2])
def test_state_in_any_place(seed: int) -> None:
    options: dict[str, Any] = {"max_grad_norm": 0.5, "dtype": torch.bfloat16}
    _, record = run(True, delays=seed, places=seed, **options)
    assert resident(**options).differences(record) == []


def test_hybrid_moves_state_of_paged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "splits", lambda self: self.mode == "hybrid")  # as on a GPU
    model, record = run(True, steps=5, delays=3, optimizer_mode="hybrid")
    assert resident(steps=5).differences(record) == []
    assert any("optimizer split" in line for line in model._trainstream_session.events)


def test_a_load_that_does_not_wait_for_the_update_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tests above have teeth: without the wait the numbers are wrong."""
    monkeypatch.setattr(
        ParamPager,
        "_copy",
        lambda self, image, dst_d, behind: image.source.load(self.copies, dst_d, behind),
    )
    _, record = run(True, delays=3, max_grad_norm=0.5)
    assert resident(max_grad_norm=0.5).differences(record) != []


def test_auto_pages_trained_blocks_under_a_limit() -> None:
    """A full fine-tune over the limit is paged without being asked for, and within it."""
    model = tiny_model(DEPTH, 32, full=True)
    block_bytes = sum(p.numel() * 4 for p in model.layers[0].parameters() if p.dim() > 1)
    limit = int(3.4 * block_bytes / 0.9)  # two slots and one block, with 10 % left free
    model, optimizer = wrap(model, lr=1e-2, device="host", quantize="none", vram_limit=limit)
    session = model._trainstream_session
    assert len(session.plan.paged) == DEPTH - 1
    assert session.device.memory()["peak_allocated"] <= limit
    plain = tiny_model(DEPTH, 32, full=True)
    plain, other = wrap(plain, lr=1e-2, device="host", quantize="none", param_offload=False)
    assert train(plain, other, 3).differences(train(model, optimizer, 3)) == []
    unwrap(model)


def test_adapters_and_small_tensors_stay() -> None:
    """LoRA beside a frozen base is no reason to page adapters; norms and biases never are."""
    model, _ = wrap(tiny_model(DEPTH), param_offload=True, device="host", quantize="none", lr=1e-2)
    assert model._trainstream_session.homes == []
    full, _ = wrap(
        tiny_model(DEPTH, full=True), param_offload=True, device="host", quantize="none", lr=1e-2
    )
    homed = {id(home.param) for home in full._trainstream_session.homes}
    for name, parameter in full.named_parameters():
        assert (id(parameter) in homed) == ("layers" in name and parameter.dim() > 1), name


def test_nothing_is_allocated_on_the_steady_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step no host memory is asked of the arena, and no slot changes its place."""
    model = tiny_model(DEPTH, full=True)
    model, optimizer = wrap(
        model, lr=1e-2, param_offload=True, device="host", quantize="none", max_grad_norm=0.5
    )
    train(model, optimizer, 1)
    session = model._trainstream_session
    before = [slot.buffer.data_ptr() for slot in session.pager.ring.slots]
    homes = [home.values_h.data_ptr() for home in session.homes]
    monkeypatch.setattr("ts_core.memory.arena.PinnedArena.empty", None)
    train(model, optimizer, 2)
    optimizer.synchronize()
    assert [slot.buffer.data_ptr() for slot in session.pager.ring.slots] == before
    assert [home.values_h.data_ptr() for home in session.homes] == homes
    assert [home.param.data_ptr() for home in session.homes] == homes


def test_step_does_not_wait_and_a_forward_waits_per_block() -> None:
    """An update that hangs holds up its own block only: the blocks before it run."""
    import threading

    model = tiny_model(DEPTH, full=True)
    model, optimizer = wrap(
        model, lr=1e-2, param_offload=True, device="host", quantize="none", max_grad_norm=0.5
    )
    train(model, optimizer, 1)
    optimizer.synchronize()
    home = next(h for h in model._trainstream_session.homes if h.image.index == 2)
    bucket = next(b for b in optimizer.buckets if b.home is home)
    gate, proper = threading.Event(), bucket.place.update

    def held(update: Any, scale: float) -> Any:
        gate.wait(30)
        return proper(update, scale)

    bucket.place.update = held  # type: ignore[method-assign]
    reached: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, k=k: reached.append(k))  # type: ignore[misc]
        for k, layer in enumerate(model.layers)
    ]
    tokens = torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(5))
    model(tokens).backward()
    optimizer.step()  # returns although block 2's update hangs, and with it those queued after it
    reached.clear()
    thread = threading.Thread(target=lambda: model(tokens))
    thread.start()
    for _ in range(500):
        if 1 in reached:
            break
        threading.Event().wait(0.01)
    assert reached == [0, 1]
    gate.set()
    thread.join(30)
    assert reached == [0, 1, 2, 3]
    for handle in handles:
        handle.remove()


@pytest.mark.gpu
@pytest.mark.parametrize(("share", "count", "options"), CASES)
def test_on_the_gpu(share: Any, count: int, options: Any, slots: Any) -> None:
    slots(count)
    given = {"device": "cuda", "width": 128, **options}
    model, record = run(share, delays=count, **given)
    assert resident(**given).differences(record) == []
    for home in model._trainstream_session.homes:
        assert home.param.device.type == "cpu"
        assert home.param.data_ptr() == home.values_h.data_ptr()


@pytest.mark.gpu
def test_hybrid_on_the_gpu() -> None:
    given: dict[str, Any] = {"device": "cuda", "width": 128, "steps": 8}
    _, record = run(True, delays=3, optimizer_mode="hybrid", **given)
    assert resident(optimizer_mode="gpu", **given).differences(record) == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cpu", "gpu"])
def test_steady_steps_never_wait_for_the_gpu(mode: str, no_host_waits: Any) -> None:
    """(The wait for a block's update by host threads is no wait for the device.)"""
    model = tiny_model(DEPTH, 128, full=True).cuda()
    model, optimizer = wrap(
        model,
        lr=1e-2,
        param_offload=True,
        quantize="none",
        offload=True,
        device="cuda",
        max_grad_norm=0.5,
        optimizer_mode=mode,
    )
    tokens = torch.randint(0, 37, (2, 7)).cuda()
    for step in range(5):
        if step == 3:
            torch.cuda.synchronize()
            no_host_waits()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("mode", ["cpu", "gpu"])
def test_a_model_beyond_the_limit_trains_within_it(mode: str, accumulation: int) -> None:
    """12 blocks of 45 MiB, and as many bytes of gradients, in 400 MiB.

    (torch's allocator takes 20 MiB at a time, of which the headroom is to be some; and about 64 MiB
    are its workspaces for products of matrices. What the process holds already comes on top, with
    what torch cannot give to others of it: rests of pieces, and memory of recorded graphs.)
    """
    limit = 400 << 20
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    model = tiny_model(12, 1536, full=True)
    assert sum(p.numel() * 4 for p in model.parameters()) > 520 << 20
    model, optimizer = wrap(
        model,
        lr=1e-3,
        quantize="none",
        device="cuda",
        vram_limit=limit + held,
        vram_headroom=0.1 * limit / (limit + held),
        max_grad_norm=1.0,
        accumulation_steps=accumulation,
        optimizer_mode=mode,
        max_inflight_bytes=32 << 20,
        cuda_graphs=False,  # recordings would want as many bytes again
    )
    assert len(model._trainstream_session.homes) > 0
    tokens = torch.randint(0, 37, (2, 7)).cuda()
    losses = []
    for _ in range(10):  # not `train`, whose record keeps every gradient on the device
        for _ in range(accumulation):
            loss = model(tokens)
            (loss / accumulation).backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert torch.cuda.max_memory_allocated() <= limit + held
    optimizer.synchronize()
    model._trainstream_session.close()
