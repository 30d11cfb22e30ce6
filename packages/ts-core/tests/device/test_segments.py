"""Segments of torch's allocator that grow: where they are asked for, and what becomes of it."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ts_core import ActivationOffloader, wrap
from ts_core.device import HostDevice, segments
from ts_core.doctor import facts
from ts_core.engine import wrapping
from ts_core.testing import tiny_model

ON = "expandable_segments:True"
OFF = "expandable_segments:False"


class FakeAllocator:
    """torch's settings, and memory that comes as they say."""

    def __init__(self) -> None:
        self.text = ""
        self.set: list[str] = []
        self.works = True
        self.refuses: RuntimeError | None = None  # settings
        self.raises: RuntimeError | None = None  # memory, once segments are to grow
        self.emptied = 0

    def change(self, text: str) -> None:
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        if self.refuses is not None:
            raise self.refuses
        self.text = text
        self.set.append(text)

    def allocate(self, *_: Any, **__: Any) -> Any:
        if ON in self.text and self.raises is not None:
            raise self.raises
        return torch.zeros(1)

    def snapshot(self) -> list[dict[str, Any]]:
        grows = self.works and ON in self.text
        everywhere = {"address": 0, "total_size": 1 << 62}
        elsewhere = {"address": 1 << 62, "total_size": 1, "is_expandable": True}
        return [{**everywhere, "is_expandable": grows}, elsewhere]

    def empty(self) -> None:
        self.emptied += 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    found = FakeAllocator()
    for name in segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    answers: dict[str, Any] = {
        "get_allocator_backend": lambda: "native",
        "memory_snapshot": found.snapshot,
        "empty_cache": found.empty,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", found.change, raising=False)
    monkeypatch.setattr(
        torch._C, "_accelerator_getAllocatorSettings", lambda: found.text, raising=False
    )
    monkeypatch.setattr(torch, "empty", found.allocate)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(segments, "own_stream", lambda device, role: None)
    monkeypatch.setattr(segments, "in_wsl", lambda: False)
    monkeypatch.setattr(segments, "_DECIDED", [])
    return found


def test_they_grow_from_the_first_time_on(allocator: FakeAllocator) -> None:
    said = segments.grow_segments(0)
    assert said is not None and "segments grow from here on" in said
    assert allocator.set == [ON] and allocator.emptied == 1
    assert segments.grow_segments(1) == said
    assert allocator.set == [ON]


@pytest.mark.parametrize("variable", segments.VARIABLES)
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("end", ["", ","])
def test_other_settings_of_the_user_stay(
    variable: str,
    readable: bool,
    end: str,
    allocator: FakeAllocator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some versions of torch reset those that a new text leaves out."""
    text = "max_split_size_mb:200,roundup_power2_divisions:[256:1,512:2]"
    monkeypatch.setenv(variable, text + end)
    if readable:
        allocator.text = text + end
    else:
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    assert segments.grow_segments(0) is not None
    assert allocator.set == [f"{text},{ON}"]


def test_settings_that_were_made_in_the_program_stay(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:200")
    allocator.text = "garbage_collection_threshold:0.5"
    assert segments.grow_segments(0) is not None
    assert allocator.set == [f"garbage_collection_threshold:0.5,{ON}"]


@pytest.mark.parametrize("variable", segments.VARIABLES)
@pytest.mark.parametrize("form", ["expandable_segments:False", "a:1, expandable_segments : False"])
def test_who_chose_ordinary_segments_keeps_them(
    variable: str, form: str, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, form)
    said = segments.grow_segments(0)
    assert said is not None and f"since {variable} says {OFF}" in said
    assert "free in pieces" in said
    assert allocator.set == []


def test_who_chose_so_in_the_program_keeps_them(allocator: FakeAllocator) -> None:
    allocator.text = OFF
    said = segments.grow_segments(0)
    assert said is not None and "since a setting of torch says" in said
    assert allocator.set == []


def test_nothing_is_told_where_they_grow_already(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", ON)
    assert segments.grow_segments(0) is None
    assert allocator.set == []


def test_another_allocator_has_none(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert segments.grow_segments(0) is None
    assert allocator.set == []


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("windows", "on Windows"),
        ("wsl", f"under WSL may refuse the memory (PYTORCH_CUDA_ALLOC_CONF={ON} tries it)"),
        ("rocm", "on ROCm"),
        ("old", "has no function for it"),
    ],
)
def test_where_torch_has_none_or_they_fail(
    where: str, words: str, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "windows":
        monkeypatch.setattr(sys, "platform", "win32")
    elif where == "wsl":
        monkeypatch.setattr(segments, "in_wsl", lambda: True)
    elif where == "rocm":
        monkeypatch.setattr(torch.version, "hip", "7.0")
    else:
        monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
        monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    said = segments.grow_segments(0)
    assert said is not None and words in said and "do not grow" in said
    assert allocator.set == [] and allocator.emptied == 0


def test_a_torch_without_the_old_function(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", allocator.set.append, raising=False
    )
    allocator.works = False
    segments.grow_segments(0)
    assert allocator.set == [ON, OFF]


@pytest.mark.parametrize("how", ["settings", "driver", "ordinary"])
def test_a_refusal_is_told_and_taken_back(how: str, allocator: FakeAllocator) -> None:
    """A driver that cannot map memory so says it at the first tensor."""
    allocator.text = "max_split_size_mb:200"
    if how == "settings":
        allocator.refuses = RuntimeError("no such setting\nat some line")
    elif how == "driver":
        allocator.raises = RuntimeError("CUDA driver error: unknown error\nat some line")
    else:
        allocator.works = False
    said = segments.grow_segments(0)
    assert said is not None and "since torch refuses it (" in said and "\n" not in said
    why = {"settings": "no such setting", "driver": "unknown error", "ordinary": "ordinary kind"}
    assert why[how] in said
    assert ON not in allocator.text
    if how != "settings":
        assert allocator.text == f"max_split_size_mb:200,{OFF}"


def test_a_full_gpu_says_nothing_against_it(allocator: FakeAllocator) -> None:
    allocator.raises = torch.OutOfMemoryError("out of memory")
    said = segments.grow_segments(0)
    assert said is not None and "segments grow from here on" in said
    assert allocator.text == ON


def test_the_cache_is_emptied_behind_all_work(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph still reads, or another GPU, must not be unmapped."""
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 100 * (index != 1))
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    segments.empty_cache()
    assert done == [0, 2, "emptied"]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device whose segments are told of."""

    class Told(HostDevice):
        def grow_segments(self) -> str | None:
            assert self.pool.limit is None  # trying it out is not to fail for the limit
            return "segments were spoken of"

    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: Told())
    yield "segments were spoken of"


@pytest.mark.parametrize("limit", [None, "1GiB"])
def test_wrap_asks_for_them_and_tells_it_once(limit: str | None, words: str) -> None:
    """A card without a limit is one itself."""
    model, _ = wrap(tiny_model(), lr=1e-2, quantize="none", host_arena=False, vram_limit=limit)
    assert model._trainstream_session.events.count(words) == 1


def test_an_activation_offloader_asks_for_them(words: str) -> None:
    model = tiny_model()
    device = wrapping._device_for(model, None)  # type: ignore[arg-type]
    offloader = ActivationOffloader(model, model.layers, device=device)
    assert offloader.events.count(words) == 1
    offloader.remove()


def test_on_the_host_device_there_is_nothing_to_tell() -> None:
    assert HostDevice().grow_segments() is None


def test_doctor_tells_of_them(allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts._segments() == "grow after wrap()"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", ON)
    assert facts._segments() == "grow"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", OFF)
    assert facts._segments() == f"stay as they are, since PYTORCH_ALLOC_CONF says {OFF}"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert facts._segments() == "those of the allocator 'cudaMallocAsync'"
    assert allocator.set == []


FRAGMENTS = """
import torch
from ts_core import wrap
from ts_core.testing import tiny_model

MIB = 1 << 20
model, _ = wrap(tiny_model(), lr=1e-2, device="cuda", quantize="none", vram_limit=1024 * MIB)
print(*model._trainstream_session.events, sep="\\n")

def take(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

whole = take(800)
del whole  # an ordinary segment stays, and is cut
parts = [take(100) for _ in range(8)]
for index, part in enumerate(parts):
    part.fill_(index)
del parts[1::2], part
try:
    more = take(300)
except torch.OutOfMemoryError:
    print("out of memory")
else:
    more.fill_(7)
    assert [int(part.max()) for part in parts] == [0, 2, 4, 6]
    assert [int(part.min()) for part in parts] == [0, 2, 4, 6]
    print("served")
more = None
try:
    take(700)
except torch.OutOfMemoryError:
    print("limited")
assert torch.cuda.max_memory_reserved() <= 1024 * MIB
"""


@pytest.mark.gpu
def test_on_a_gpu_what_is_free_in_pieces_serves_a_large_tensor(run_python: Any) -> None:
    """Within the limit, which holds."""
    out = run_python(FRAGMENTS, PYTORCH_CUDA_ALLOC_CONF=None, PYTORCH_ALLOC_CONF=None).stdout
    assert "segments grow from here on" in out
    assert out.splitlines()[-2:] == ["served", "limited"]


@pytest.mark.gpu
def test_on_a_gpu_ordinary_segments_do_not(run_python: Any) -> None:
    out = run_python(FRAGMENTS, PYTORCH_CUDA_ALLOC_CONF=OFF, PYTORCH_ALLOC_CONF=None).stdout
    assert f"do not grow, since PYTORCH_CUDA_ALLOC_CONF says {OFF}" in out
    assert out.splitlines()[-2:] == ["out of memory", "limited"]


@pytest.mark.gpu
def test_on_a_gpu_other_settings_stay(run_python: Any) -> None:
    run_python(
        """
import torch
from ts_core.device import CudaDevice

torch.zeros(1, device="cuda")  # the allocator is there already
print(CudaDevice(0).grow_segments())
found = torch.cuda.memory._snapshot()["allocator_settings"]
assert found["expandable_segments"] is True, found
assert found["max_split_size"] == 200 << 20, found
""",
        PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:200",
        PYTORCH_ALLOC_CONF=None,
    )


@pytest.mark.gpu
def test_on_a_gpu_graphs_replay_to_the_same_bits(run_python: Any) -> None:
    """Those of before and those of after, also when memory runs out and is put elsewhere."""
    run_python(
        """
import torch
from ts_core.device import CudaDevice
from ts_core.engine.replay.cuda_recorder import CudaRecorder

device = torch.device("cuda", 0)
given = torch.randn(2048, 2048, device=device)
results = [torch.empty_like(given) for _ in range(2)]

def work(result):
    wide = torch.cat([given, given * 3], 1)
    result.copy_((wide.relu() @ wide.t().sin()).cos())

def recorded(result):
    recorder = CudaRecorder(device)
    recorder.warm_up(lambda: work(result))
    return recorder, recorder.record(lambda: work(result))

first = recorded(results[0])
first[1].replay()
torch.cuda.synchronize()
wanted = results[0].clone()
gpu = CudaDevice(0)
print(gpu.grow_segments())
second = recorded(results[1])
assert any(
    segment["is_expandable"] and tuple(segment["segment_pool_id"]) != (0, 0)
    for segment in torch.cuda.memory_snapshot()
), "recordings are in ordinary segments"
gpu.set_limit(torch.cuda.memory_reserved() + (256 << 20))
for round in range(3):
    held = [torch.full((16 << 20,), 255, dtype=torch.uint8, device=device) for _ in range(12)]
    del held[::2]
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("the limit does not hold")
    for (recorder, graph), result in zip((first, second), results):
        result.zero_()
        graph.replay()
        assert torch.equal(result, wanted), round
""",
        PYTORCH_CUDA_ALLOC_CONF=None,
        PYTORCH_ALLOC_CONF=None,
    )


@pytest.mark.gpu
def test_on_a_gpu_recordings_that_still_run_keep_their_memory(run_python: Any) -> None:
    run_python(
        """
import torch
from ts_core.device import CudaDevice
from ts_core.engine.replay.cuda_recorder import CudaRecorder

device = torch.device("cuda", 0)
print(CudaDevice(0).grow_segments())
result = torch.zeros(1, device=device)

def work():
    wide = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    for _ in range(20):
        wide = wide * 1
    result.copy_(wide.sum()[None])

recorder = CudaRecorder(device)
recorder.warm_up(work)
graph = recorder.record(work)
result.zero_()
torch.cuda._sleep(200_000_000)
graph.replay()
recorder.forget()
del graph
torch.cuda.empty_cache()
assert result.item() == 64 << 20
""",
        PYTORCH_CUDA_ALLOC_CONF=None,
        PYTORCH_ALLOC_CONF=None,
    )
