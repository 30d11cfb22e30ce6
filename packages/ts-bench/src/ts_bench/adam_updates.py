"""What `ts-bench adam` compares: AdamW updates on the host, and plain passes over their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from ts_bench.deepspeed_folder import use_deepspeed_folder
from ts_core import _native
from ts_core._native_stream import stream_memory

LR, WEIGHT_DECAY = 1e-3, 1e-2
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
FP32 = "fp32"
MASTER = "bf16 + fp32 master"
NATIVE = "trainstream"
STREAM = "plain stream"
TORCH = "torch fused"
DEEPSPEED = "DeepSpeed CPUAdam"
STREAM_PART = 256  # elements per part of a stream: 1 KiB of each fp32 tensor
STREAM_PARTS_PER_TURN = 256  # a thread takes as many elements at once as in the native update


@dataclass(frozen=True)
class Update:
    """One contestant.

    Attributes:
        name: whose update it is, or `STREAM`.
        parameters: `FP32` or `MASTER` (bf16 parameter and gradient, fp32 master copy).
        moments: a key of `MOMENTS`.
        level: the SIMD level; "" where the library chooses its own.
        bytes_each: bytes read and written per parameter.
        run: does it once, on all threads it may use.
    """

    name: str
    parameters: str
    moments: str
    level: str
    bytes_each: float
    run: Callable[[], None]


class NativeState:
    """A parameter of `count` elements with all that a native update of it reads and writes."""

    def __init__(self, count: int, parameters: str, moments: str, threads: int) -> None:
        values = torch.randn(count)
        dtype = torch.float32 if parameters == FP32 else torch.bfloat16
        self.count, self.moments, self.threads, self.steps = count, moments, threads, 0
        self.master = None if parameters == FP32 else values
        self.param = values if parameters == FP32 else values.to(dtype)
        self.grad = torch.randn(count).mul_(1e-2).to(dtype)
        self.stored = [torch.zeros(count, dtype=MOMENTS[moments]) for _ in range(2)]
        scales = -(-count // _native.MOMENT_BLOCK) if moments == "int8" else 0
        self.scales = [torch.zeros(scales) for _ in range(2)]

    def regions(self) -> list[tuple[int, int, bool]]:
        """(address, bytes, written) of each tensor."""
        written = [self.param, *self.stored, *self.scales]
        if self.master is not None:
            written.append(self.master)
        told = [(t.data_ptr(), t.nbytes, True) for t in written if t.nbytes]
        return [(self.grad.data_ptr(), self.grad.nbytes, False), *told]

    def bytes_each(self) -> float:
        """Bytes that one update reads and writes per parameter.

        A bf16 parameter with a master copy is written only; a stream reads it too, as a processor
        does before it writes part of a cache line.
        """
        moved = sum(size * (2 if written else 1) for _, size, written in self.regions())
        if self.master is not None:
            moved -= self.param.nbytes
        return moved / self.count

    def update(self, level: str) -> None:
        """One AdamW step with the given SIMD level."""
        self.steps += 1
        dtype = str(self.param.dtype).removeprefix("torch.")
        _native.set_simd_level(level)
        _native.adamw_step(
            self.param.data_ptr(),
            dtype,
            self.grad.data_ptr(),
            dtype,
            self.stored[0].data_ptr(),
            self.stored[1].data_ptr(),
            0 if self.master is None else self.master.data_ptr(),
            self.count,
            step=self.steps,
            threads=self.threads,
            moments=self.moments,
            exp_avg_scale_ptr=self.scales[0].data_ptr(),
            exp_avg_sq_scale_ptr=self.scales[1].data_ptr(),
            lr=LR,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=WEIGHT_DECAY,
        )

    def stream(self, level: str) -> None:
        """Reads the same memory, and writes back as it was what an update changes."""
        _native.set_simd_level(level)
        stream_memory(
            self.regions(),
            parts=-(-self.count // STREAM_PART),
            parts_per_turn=STREAM_PARTS_PER_TURN,
            threads=self.threads,
        )


def native_updates(
    count: int, levels: list[str], moments: list[str], threads: int
) -> Iterator[Update]:
    """Native updates of every layout at each level, and a stream per layout at the first level."""
    for parameters in (FP32, MASTER):
        for kind in moments:
            state = NativeState(count, parameters, kind, threads)
            size = state.bytes_each()

            def stream(state: NativeState = state) -> None:
                state.stream(levels[0])

            yield Update(STREAM, parameters, kind, levels[0], size, stream)
            for level in levels:

                def update(state: NativeState = state, level: str = level) -> None:
                    state.update(level)

                yield Update(NATIVE, parameters, kind, level, size, update)


def torch_fused(count: int) -> Update:
    """torch.optim.AdamW(fused=True) on one fp32 parameter."""
    parameter = torch.nn.Parameter(torch.randn(count))
    parameter.grad = torch.randn(count).mul_(1e-2)
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> None:
        optimizer.step()

    return Update(TORCH, FP32, "float32", "", 28, step)


def deepspeed(count: int) -> Update | str:
    """DeepSpeed's CPUAdam on one fp32 parameter, or why it cannot run.

    DeepSpeed compiles it on first use, with g++ and ninja. Its threads are those of an OpenMP
    library of its own: set OMP_NUM_THREADS to change their number.
    """
    use_deepspeed_folder()
    try:
        adam = import_module("deepspeed.ops.adam")
    except ImportError as error:
        return f"cannot be imported: {error} (pip install deepspeed)"
    parameter = torch.nn.Parameter(torch.randn(count))
    parameter.grad = torch.randn(count).mul_(1e-2)
    try:
        optimizer = adam.DeepSpeedCPUAdam(
            [parameter], lr=LR, weight_decay=WEIGHT_DECAY, adamw_mode=True
        )
        before = parameter.detach()[:1000].clone()
        optimizer.step()
    except Exception as error:  # whatever its build raises is the reason to show
        return f"cannot run: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    if torch.equal(before, parameter.detach()[:1000]):
        return "its step changed nothing"

    def step() -> None:
        optimizer.step()

    return Update(DEEPSPEED, FP32, "float32", "", 28, step)
