"""Time steps and read memory, in the process of one engine."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ts_bench.activity import link_rates, profile
from ts_bench.engines import Engine, Step, UnsupportedError
from ts_bench.records import Measurement
from ts_bench.scenarios import Scenario
from ts_core.errors import NonFiniteError, OptionError

MODEL_SEED = 0


@dataclass(frozen=True)
class Counts:
    """How many steps of each kind.

    Attributes:
        warmup: not timed.
        timed: timed.
        profiled: profiled after the timed ones, on a CUDA device.
        settling: not timed, at most, for an engine that tells when it has settled.
        settling_s: seconds after which no more of these are begun.
        trace: where to keep a trace of the profiled steps: what its file's name begins with, to
            which a scenario's name is added. None keeps none.
    """

    warmup: int
    timed: int
    profiled: int = 0
    settling: int = 0
    settling_s: float = 25.0
    trace: Path | None = None

    def __post_init__(self) -> None:
        if self.warmup < 1 or self.timed < 1:
            raise OptionError(
                f"warmup and steps: {self.warmup} and {self.timed} are not accepted; use >= 1."
            )


def measure(
    engine: Engine,
    scenario: Scenario,
    variant: str,
    *,
    device: torch.device,
    warmup: int,
    steps: int,
    profiled: int = 0,
    settling: int = 0,
) -> Measurement:
    """Prepare the engine and run its steps; see `Run`.

    Args:
        engine: what to run.
        scenario: on what.
        variant: one of the engine's variants.
        device: where; the scenario's memory cap is put on a CUDA device.
        warmup: steps that are run and not timed.
        steps: timed steps.
        profiled: steps that are profiled after them.
        settling: the most steps of a warm-up, for an engine that tells when it has settled.

    Raises:
        OptionError: no warm-up or no timed step, or a cap larger than the device.
        NonFiniteError: a loss was NaN or infinite, so the figures mean nothing.
        UnsupportedError, torch.OutOfMemoryError, MemoryError: from the engine.
    """
    counts = Counts(warmup, steps, profiled, settling)
    return Run(engine, scenario, variant, device).measure(counts)


class Run:
    """An engine that has been prepared, and can be measured on scenarios of one model and cap.

    Each timed step runs from an idle device to an idle device, so work that a step leaves behind on
    streams counts, while work it leaves to host threads counts in the step that waits for it. One
    step begins when the one before it has ended: whatever threads queue in between is some step's.

    Args:
        engine, scenario, variant, device: as in `measure`.
        link: also measure the link, before anything else is on the device.
    """

    def __init__(
        self,
        engine: Engine,
        scenario: Scenario,
        variant: str,
        device: torch.device,
        *,
        link: bool = False,
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        _cap_memory(scenario, device)
        self.link_gb_s = link_rates(device) if link and self.cuda else None
        if self.cuda:
            torch.cuda.empty_cache()
        torch.manual_seed(MODEL_SEED)
        begun = time.perf_counter()
        self.step = engine.prepare(scenario, device, variant)
        _synchronize(device)
        self.prepare_s = time.perf_counter() - begun
        self.prepare_peak = torch.cuda.max_memory_allocated(device) if self.cuda else None
        self.scenario = scenario

    def use(self, scenario: Scenario) -> None:
        """Go on with another scenario.

        Raises:
            UnsupportedError: the engine cannot.
        """
        use = getattr(self.step, "use", None)
        if use is None:
            raise UnsupportedError("this engine cannot go on with other batches; run it by itself")
        use(scenario)
        self.scenario = scenario

    def measure(self, counts: Counts) -> Measurement:
        """Run and time steps."""
        device, step = self.device, self.step
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
        begun = time.perf_counter()
        losses, settled = warm_up(step, counts, lambda: _synchronize(device))
        warmup_s, warmup_steps = time.perf_counter() - begun, len(losses)
        tell = getattr(step, "transferred", None)
        before = tell() if tell is not None else {}
        times, host = [], []
        _synchronize(device)
        begun = time.perf_counter()
        for _ in range(counts.timed):
            losses.append(step())
            host.append(time.perf_counter() - begun)
            _synchronize(device)
            ended = time.perf_counter()
            times.append(ended - begun)
            begun = ended
        after = tell() if tell is not None else {}
        values = [float(loss) for loss in losses]
        wrong = [number for number, value in enumerate(values) if not math.isfinite(value)]
        if wrong:
            raise NonFiniteError(f"the loss of step {wrong[0]} (from 0) is {values[wrong[0]]}")
        rss = psutil.Process().memory_info().rss
        figures = Measurement(
            step_s=times,
            losses=values,
            prepare_s=self.prepare_s,
            warmup_s=warmup_s,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if self.cuda else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if self.cuda else None,
            prepare_peak_bytes=self.prepare_peak,
            host_rss_bytes=rss,
            host_peak_rss_bytes=_host_peak_bytes(rss),
            details=step.details(),
            host_s=host,
            transferred={way: (after[way] - before[way]) / counts.timed for way in after} or None,
            link_gb_s=self.link_gb_s,
            warmup_steps=warmup_steps,
            settled=settled,
        )
        if counts.profiled and self.cuda:
            try:
                trace = None
                if counts.trace is not None:
                    counts.trace.parent.mkdir(parents=True, exist_ok=True)
                    name = f"{counts.trace.name}-{self.scenario.name}.json.gz"
                    trace = counts.trace.with_name(name)
                activity = profile(step, counts.profiled, statistics.median(times), trace)
            except RuntimeError as error:  # the timed steps stand without it
                activity = {"error": f"{type(error).__name__}: {error}"}
            figures = dataclasses.replace(figures, activity=activity)
        return figures


def warm_up(
    step: Step, counts: Counts, synchronize: Callable[[], None]
) -> tuple[list[Tensor], bool | None]:
    """Run the steps of a warm-up, and more until the engine has settled, within bounds.

    Returns:
        Losses of the steps, and whether it has settled (None: it does not tell).
    """
    tell: Callable[[], bool] | None = getattr(step, "settled", None)
    begun = time.perf_counter()
    losses, settled = [], None
    for number in range(max(counts.warmup, counts.settling)):
        if number >= counts.warmup and (
            tell is None or settled or time.perf_counter() - begun > counts.settling_s
        ):
            break
        losses.append(step())
        if tell is not None:
            synchronize()
            settled = tell()
    synchronize()
    return losses, settled


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
