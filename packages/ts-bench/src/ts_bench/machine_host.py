"""Host AdamW alone and beside the link, CPU time of waits, and time of imports."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from statistics import median

import torch
from torch import Tensor, nn

from ts_bench.adam_updates import FP32, NativeState, torch_fused
from ts_bench.machine_link import lanes, queue
from ts_bench.machine_rows import MIB, Row
from ts_core import OffloadAdamW, _native, wrap
from ts_core.device import Device
from ts_core.errors import StateError

PAUSE_S = 0.05
WIDTH = 512  # of the model whose update is waited for


def adamw(device: Device, count: int, rounds: int, beside_bytes: int) -> Iterator[Row]:
    """Host AdamW on fp32 state against torch's fused one, then beside a link busy both ways.

    Args:
        device: whose link is kept busy.
        count: parameters of one update.
        rounds: timed turns of each.
        beside_bytes: bytes of each direction that are queued while updates run.
    """
    threads, before = _native.usable_cores(), torch.get_num_threads()
    level = _native.simd_level()
    state, rival = NativeState(count, FP32, "float32", threads), torch_fused(count)

    def ours() -> None:
        state.update(level)

    torch.set_num_threads(threads)
    try:
        found: dict[str, list[float]] = {"trainstream": [], "torch fused": []}
        turns = [("trainstream", ours), ("torch fused", rival.run)]
        for turn in range(-2, rounds):  # the first two warm up
            for name, update in random.sample(turns, len(turns)):
                # OpenMP's threads spin for a while and would take cores from who comes next.
                time.sleep(PAUSE_S)
                begun = time.perf_counter()
                update()
                if turn >= 0:
                    found[name].append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(before)
    rates = {name: count / median(times) / 1e9 for name, times in found.items()}
    pairs = zip(found["torch fused"], found["trainstream"], strict=True)
    ratio = median(theirs / own for theirs, own in pairs)
    note = f"{ratio:.2f}x torch's, {28 * rates['trainstream']:.0f} GB/s, {threads} threads, {level}"
    yield Row("host AdamW, fp32", "G params/s", rates, note)
    rate, link = _beside(device, ours, count, beside_bytes)
    yield Row(
        "host AdamW beside the link",
        "G params/s",
        {"trainstream": rate, "link both ways, GB/s": link},
        f"{rate / rates['trainstream']:.0%} of the rate alone",
    )


def _beside(
    device: Device, update: Callable[[], None], count: int, beside_bytes: int
) -> tuple[float, float]:
    """(10^9 parameters, 10^9 bytes) per second of updates and of copies at the same time."""
    size = min(256 * MIB, beside_bytes // 4)
    copies = beside_bytes // size
    used = lanes(device, size)
    queue(device, used, 1)
    for stream, _, _ in used:
        stream.synchronize()
    ended: list[float] = []

    def wait() -> None:
        for event in events:
            device.host_wait(event)
        ended.append(time.perf_counter())

    begun = time.perf_counter()
    queue(device, used, copies)
    events = [stream.record() for stream, _, _ in used]
    waiting = threading.Thread(target=wait)
    waiting.start()
    first, done = time.perf_counter(), 0
    while done == 0 or not all(event.query() for event in events):
        update()
        done += 1
    last = time.perf_counter()
    waiting.join()
    return done * count / (last - first) / 1e9, 2 * copies * size / (ended[0] - begun) / 1e9


def waits(device: Device, seconds: float) -> Iterator[Row]:
    """CPU time of all threads of the process during waits, over the time that passed: 1 is a core.

    Args:
        device: what is waited for.
        seconds: about how long it is kept busy.
    """
    values = {}
    stream = device.new_stream("delayed")
    device.delay(stream, seconds / 10)  # what is done once is done
    device.host_wait(stream.record())
    device.delay(stream, seconds)
    event = stream.record()
    values["an event"] = _cores(lambda: device.host_wait(event))

    model, optimizer, step = _training(device)
    for _ in range(6):
        step(0.0)
    optimizer.synchronize()
    values["step() and synchronize()"] = _cores(lambda: _step_and_wait(step, optimizer, seconds))
    step(0.0)
    inputs = _inputs(device)

    def update_and_read() -> None:
        step(seconds)
        with torch.no_grad():
            float(model(inputs).sum())

    values["step() and a forward"] = _cores(update_and_read)
    optimizer.synchronize()
    if device.kind == "cuda":
        device.delay(device.compute_stream(), seconds)
        values["torch.cuda.synchronize()"] = _cores(lambda: torch.cuda.synchronize())
    yield Row("CPU use of waits", "cores", values, f"about {seconds:g} s each")


def _cores(wait: Callable[[], object]) -> float:
    wall, cpu = time.perf_counter(), time.process_time()
    wait()
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


Step = Callable[[float], None]


def _training(device: Device) -> tuple[nn.Module, OffloadAdamW, Step]:
    """A small model whose state stays on the host, and a step with the device busy before it."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    made = _Stack(blocks)
    plain = torch.optim.AdamW(made.parameters(), lr=1e-4)
    model, optimizer = wrap(made, plain, device=device.torch_device, offload=True)
    inputs = _inputs(device)

    def step(seconds: float) -> None:
        loss = model(inputs).square().mean()
        if seconds:
            device.delay(device.compute_stream(), seconds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, optimizer, step


class _Stack(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _inputs(device: Device) -> Tensor:
    return torch.ones(8, WIDTH, device=device.torch_device)


def _step_and_wait(step: Step, optimizer: OffloadAdamW, seconds: float) -> None:
    step(seconds)
    optimizer.synchronize()


def imports(repeats: int) -> Row:
    """Seconds that `import trainstream` and its first use take once torch has been imported."""
    name = "trainstream" if find_spec("trainstream") else "ts_core"
    code = (
        "import time; t = [time.perf_counter()]; import torch; t.append(time.perf_counter()); "
        f"import {name}; t.append(time.perf_counter()); {name}.wrap; t.append(time.perf_counter());"
        " print(*[b - a for a, b in zip(t, t[1:])])"
    )
    found = []
    for _ in range(1 + repeats):  # the first one fills the system's caches
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            raise StateError(f"importing {name} in a process of its own failed: {done.stderr}")
        found.append([float(part) for part in done.stdout.split()[-3:]])
    torch_s, import_s, use_s = (median(each) for each in zip(*found[1:], strict=True))
    values = {"beyond torch's": import_s, f"and {name}.wrap": use_s, "torch's own": torch_s}
    return Row(f"import {name}", "s", values, f"median of {repeats}")
