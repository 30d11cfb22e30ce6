"""The device kernel gives the host kernel's bits: under Triton's interpreter, and on a GPU."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.memory.arena import default_arena
from ts_core.optim.device_update import DeviceState, scalars, update_on_device
from ts_core.optim.layout import Hyper

HYPER = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1)
INTERPRETED = """
import torch
from ts_core.optim import device_update as d
from ts_core.optim.adamw_triton import adamw_kernel
from ts_core.optim.layout import Hyper
worst = 0
launches = ((2, d._BLOCK), (d.LINK_PROGRAMS, d._LINK_BLOCK))
counts = (1, 1500, d._LINK_BLOCK + 1, d.LINK_PROGRAMS * d._LINK_BLOCK + 1025)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for n, beta1 in zip(counts, (.9, .9, .3, .9)):
        hyper = Hyper(1e-2, beta1, .999, 1e-8, .1)
        g = torch.Generator().manual_seed(n)
        start, *grads = (torch.randn(n, generator=g).to(dtype) for _ in range(4))
        def run(update):
            masters = dtype is not torch.float32
            p, master = start.clone(), start.float() if masters else None
            state = d.DeviceState(torch.zeros(n), torch.zeros(n), master)
            for step, grad in enumerate(grads, 1):
                update(p, grad, state, step)
            return [*state.tensors(), p]
        def on_host(p, grad, state, step):
            d.update_on_device(p, grad, state, hyper, step, 0.7)
        def launched(programs, block):
            def update(p, grad, state, step):
                s = d.scalars(hyper, step, 0.7)
                masters = state.master is not None
                adamw_kernel[(programs,)](p, grad, state.exp_avg, state.exp_avg_sq,
                    state.master if masters else p, n, s.decay, s.grad_scale, s.lerp_factor,
                    s.beta2, s.one_minus_beta2, s.correction2, s.eps, s.step_size,
                    HAS_MASTER=masters, LERP_FROM_M=s.lerp_from_m, BLOCK=block)
            return update
        host = run(on_host)
        near, link = (run(launched(*each)) for each in launches)
        assert all(map(torch.equal, near, link)), (dtype, n)
        # The interpreter cuts bits off where it stores bfloat16, so its masters are compared.
        for ours, theirs in zip(link[:3], host[:3]):
            worst = max(worst, (ours - theirs).abs().max().item())
print(worst)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it is optional)"
)
def test_triton_source_agrees_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # numpy's fused multiply-add rounds twice, so the last bits may differ here.
    assert float(done.stdout) <= 3e-7


def test_scalars_are_rounded_once() -> None:
    s = scalars(HYPER, 3, 1.0)
    assert s.step_size == torch.tensor(1e-2 / (1 - 0.9**3), dtype=torch.float32).item()
    assert s.lerp_from_m and s.lerp_factor == torch.tensor(1 - 0.9, dtype=torch.float32).item()
    assert not scalars(Hyper(1e-2, 0.3, 0.999, 1e-8, 0.1), 1, 1.0).lerp_from_m
    assert s.correction2 == torch.tensor(math.sqrt(1 - 0.999**3), dtype=torch.float32).item()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 1023, 1 << 20, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pinned", [False, True])
def test_gpu_kernel_gives_the_host_kernels_bits(
    count: int, dtype: torch.dtype, pinned: bool
) -> None:
    torch.manual_seed(0)
    start = torch.randn(count).to(dtype)
    gradients = [torch.randn(count).to(dtype) for _ in range(3)]
    master = start.float() if dtype is not torch.float32 else None
    host, host_state = start.clone(), DeviceState(torch.zeros(count), torch.zeros(count), master)

    def made() -> torch.Tensor:
        if pinned:
            tensor = default_arena().empty((count,), torch.float32, tag="test")
            return tensor.zero_()
        return torch.zeros(count, device="cuda")

    device = start.cuda()
    device_master = None
    if master is not None:
        device_master = made()
        device_master.copy_(start)
        host_state = DeviceState(host_state.exp_avg, host_state.exp_avg_sq, start.float())
    device_state = DeviceState(made(), made(), device_master)
    torch.cuda.synchronize()
    for step, gradient in enumerate(gradients, 1):
        update_on_device(host, gradient, host_state, HYPER, step, 0.7)
        update_on_device(device, gradient.cuda(), device_state, HYPER, step, 0.7, over_link=pinned)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), host)
    for ours, theirs in zip(device_state.tensors(), host_state.tensors(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["host", "zero_copy", "resident", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"eager": False}])
def test_every_place_on_the_gpu_gives_the_same_bits(
    lab: Any, place: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    from ts_core.testing import inject_delays

    results = []
    for where in ("host", place):
        model = lab.model(dtype).cuda()
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, chunk_elems=4096, **options)
        optimizer.build()
        optimizer.place_state([where] * len(optimizer.buckets))
        with inject_delays(3, max_ms=1.0, share=0.3):
            lab.run(model, optimizer, 4, accumulation=options.get("accumulation_steps", 1))
            optimizer.synchronize()
        torch.cuda.synchronize()
        results.append(model)
    assert lab.distance(*results) == 0.0
    assert lab.distance(results[0], lab.model(dtype)) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cpu", "gpu", "hybrid", "auto"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_modes_match_torch_on_the_gpu(
    lab: Any, mode: str, clip: float | None, accumulation: int
) -> None:
    from ts_core.testing import inject_delays

    ours, theirs = lab.model().cuda(), lab.model().cuda()
    optimizer = OffloadAdamW(
        lab.groups(ours, True),
        lr=2e-3,
        mode=mode,
        max_grad_norm=clip,
        accumulation_steps=accumulation,
    )
    reference = torch.optim.AdamW(lab.groups(theirs, True), lr=2e-3)
    with inject_delays(5, max_ms=1.0, share=0.2):
        lab.run(ours, optimizer, 20, accumulation=accumulation)
        optimizer.synchronize()
    lab.run(theirs, reference, 20, accumulation=accumulation, clip=clip)
    torch.cuda.synchronize()
    assert lab.distance(ours, theirs) <= 3e-7


@pytest.mark.gpu
def test_step_on_the_gpu_does_not_wait_and_another_stream_reads_right(lab: Any) -> None:
    model, twin = lab.model().cuda(), lab.model().cuda()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    optimizer.build()
    lab.loss(model, 0).backward()
    optimizer.step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = model.large.detach().clone()
    stream.synchronize()
    lab.run(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 1, clip=0.5)
    assert (found - twin.large.detach()).abs().max() <= 3e-7
    optimizer.synchronize()
    torch.cuda.synchronize()
    assert lab.distance(model, twin) <= 3e-7
