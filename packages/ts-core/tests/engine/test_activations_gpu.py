"""Activations on a GPU: the same bits, less memory, and no waits of the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ts_core import memory_report, unwrap
from ts_core.device import resolve_device
from ts_core.device.limits import kept_by_graphs
from ts_core.testing import inject_delays
from ts_core.testing.activations import in_short, resident, run
from ts_core.transfer import edges

GPU: dict[str, Any] = {"device": "cuda", "depth": 6, "width": 256, "length": 256}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("param_offload", [False, True])
@pytest.mark.parametrize("policy", [(True, False), (False, True), (0.5, [1]), (True, [0, 2])])
def test_policies_on_the_gpu(policy: Any, param_offload: bool, dtype: torch.dtype) -> None:
    offload, recompute = policy
    for autocast in (None, torch.bfloat16):
        model, record = run(
            activation_offload=offload,
            recompute=recompute,
            param_offload=param_offload,
            accumulation=2,
            dtype=dtype,
            autocast=autocast,
            prefetch_depth=2,
            **GPU,
        )
        expected = resident(accumulation=2, dtype=dtype, autocast=autocast, **GPU)
        assert expected.differences(record) == []
        found = memory_report(model)["activations"]
        assert (found["fetches"] > 0) == bool(offload)
        assert found["host_bytes_in_use"] == 0


@pytest.mark.gpu
def test_missing_waits_are_caught_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = resident(**GPU)
    monkeypatch.setattr(edges, "wait", lambda device, stream, event: None)
    options = {**GPU, "max_inflight_bytes": 2 << 20}
    found: list[str] = []
    for seed in range(3):
        with inject_delays(seed, max_ms=5.0, share=1.0):
            _, broken = run(activation_offload=True, recompute=False, delays=False, **options)
        found += expected.differences(broken)
    assert found != []


LARGE: dict[str, Any] = {**GPU, "depth": 12, "length": 2048}


def peak_of(shape: dict[str, Any], **options: Any) -> int:
    """Most bytes allocated on the GPU in a step of that shape."""
    model, _ = run(steps=2, delays=False, **shape, **options)
    model._trainstream_session.optimizer.synchronize()
    model._trainstream_session.device.reset_peak()
    tokens = torch.randint(0, 37, (2, shape["length"]), device="cuda")
    model(tokens).backward()
    torch.cuda.synchronize()
    peak = int(memory_report(model)["gpu"]["peak_allocated"])
    model.zero_grad()
    unwrap(model)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return peak


@pytest.mark.gpu
def test_pages_and_recomputation_save_memory_on_the_gpu() -> None:
    gc.collect()
    resolve_device("cuda").take_workspaces()  # torch's own are no part of what is compared
    before = torch.cuda.memory_allocated()
    fixed = {"max_inflight_bytes": 1 << 20, "cuda_graphs": False}
    kept = peak_of(LARGE, activation_offload=False, recompute=False, **fixed)
    paged = peak_of(LARGE, activation_offload=True, recompute=False, **fixed)
    recomputed = peak_of(LARGE, activation_offload=False, recompute=True, **fixed)
    assert paged - before < 0.7 * (kept - before)
    assert recomputed - before < 0.7 * (kept - before)


# Large enough for the headroom to be several of the 20 MiB that torch's allocator takes at a time.
LITTLE: dict[str, Any] = {**LARGE, "length": 8192}


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["auto", False])
def test_auto_trains_in_little_memory_on_the_gpu(recompute: Any) -> None:
    """A limit between what recomputing and what keeping everything needs, without recordings."""
    shape = {**LITTLE, "steps": 60, "cuda_graphs": False}
    kept = peak_of(LITTLE, activation_offload=False, recompute=False, cuda_graphs=False)
    least = peak_of(LITTLE, activation_offload=False, recompute=True, cuda_graphs=False)
    limit = int((least + 0.4 * (kept - least)) / 0.9)
    limit += kept_by_graphs(torch.cuda.current_device())  # of other tests: no room of this one
    model, record = run(
        recompute=recompute,
        vram_limit=limit,
        check_memory=False,
        max_inflight_bytes=64 << 20,
        min_offload_bytes=1 << 16,
        delays=False,
        **shape,
    )
    report = memory_report(model)
    found = report["activations"]
    assert found["offloaded_blocks"] or found["recompute_blocks"]
    assert found["policy"].count("keep") > 1
    assert report["gpu"]["peak_allocated"] <= limit
    assert not model._trainstream_session.activations.adapting
    unwrap(model)  # which lifts the limit: the reference needs more
    assert resident(**shape).differences(record) == []


@pytest.mark.gpu
def test_auto_keeps_what_fits_on_the_gpu_and_leaves_no_hooks() -> None:
    model, record = run(steps=8, delays=False, cuda_graphs=False, **GPU)
    assert resident(steps=8, **GPU).differences(record) == []
    assert in_short(model) == "k" * 6
    assert not any("forward" in layer.__dict__ for layer in model.layers)


@pytest.mark.gpu
def test_pages_make_no_host_wait_on_the_gpu(no_host_waits: Callable[[], None]) -> None:
    model, _ = run(
        steps=4,
        accumulation=2,
        delays=False,
        activation_offload=True,
        recompute=[1],
        **{**GPU, "max_inflight_bytes": 1 << 30},
    )
    tokens = torch.randint(0, 37, (2, 256), device="cuda")
    torch.cuda.synchronize()
    no_host_waits()
    for _ in range(2):  # one step's passes
        model(tokens).backward()
