"""Time steps and read memory, in the process of one engine."""

from __future__ import annotations

import math
import sys
import time

import psutil
import torch

from ts_bench.engines import Engine
from ts_bench.records import Measurement
from ts_bench.scenarios import Scenario
from ts_core.errors import NonFiniteError, OptionError

MODEL_SEED = 0


def measure(
    engine: Engine,
    scenario: Scenario,
    variant: str,
    *,
    device: torch.device,
    warmup: int,
    steps: int,
) -> Measurement:
    """Prepare the engine and run its steps.

    Each timed step runs from an idle device to an idle device (synchronized before and after),
    so work that a step leaves behind on streams counts, while work it leaves to host threads
    counts in the step that waits for it.

    Args:
        engine: what to run.
        scenario: on what.
        variant: one of the engine's variants.
        device: where; the scenario's memory cap is put on a CUDA device.
        warmup: steps that are run and not timed.
        steps: timed steps.

    Raises:
        OptionError: no warm-up or no timed step, or a cap larger than the device.
        NonFiniteError: a loss was NaN or infinite, so the figures mean nothing.
        UnsupportedError, torch.OutOfMemoryError, MemoryError: from the engine.
    """
    if warmup < 1 or steps < 1:
        raise OptionError(f"warmup and steps: {warmup} and {steps} are not accepted; use >= 1.")
    _cap_memory(scenario, device)
    torch.manual_seed(MODEL_SEED)
    begun = time.perf_counter()
    step = engine.prepare(scenario, device, variant)
    _synchronize(device)
    prepare_s = time.perf_counter() - begun
    prepare_peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    begun = time.perf_counter()
    losses = [step() for _ in range(warmup)]
    _synchronize(device)
    warmup_s = time.perf_counter() - begun
    times = []
    for _ in range(steps):
        _synchronize(device)
        begun = time.perf_counter()
        loss = step()
        _synchronize(device)
        times.append(time.perf_counter() - begun)
        losses.append(loss)
    values = [float(loss) for loss in losses]
    wrong = [number for number, value in enumerate(values) if not math.isfinite(value)]
    if wrong:
        raise NonFiniteError(f"the loss of step {wrong[0]} (from 0) is {values[wrong[0]]}")
    cuda = device.type == "cuda"
    rss = psutil.Process().memory_info().rss
    return Measurement(
        step_s=times,
        losses=values,
        prepare_s=prepare_s,
        warmup_s=warmup_s,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if cuda else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if cuda else None,
        prepare_peak_bytes=prepare_peak,
        host_rss_bytes=rss,
        host_peak_rss_bytes=_host_peak_bytes(rss),
        details=step.details(),
    )


def _cap_memory(scenario: Scenario, device: torch.device) -> None:
    """Let torch's allocator take no more than the scenario allows (a CUDA context comes on top)."""
    if scenario.limit_bytes is None or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if scenario.limit_bytes > total:
        raise OptionError(
            f"limit: {scenario.limit_bytes} bytes are more than the device has ({total}). "
            f"Use a smaller --limit, or --limit none."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(scenario.limit_bytes / total, index)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_peak_bytes(rss: int) -> int | None:
    """The most that was ever resident. The system's own count lags behind what is now."""
    try:
        import resource
    except ImportError:  # Windows has no such module
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(rss, peak if sys.platform == "darwin" else peak * 1024)
