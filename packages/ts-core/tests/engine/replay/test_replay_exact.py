"""Replayed equals eager bit for bit: streamed or not, kept or recomputed, with delays injected."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

from ts_core import memory_report, unwrap, wrap
from ts_core.engine.replay.cuda_recorder import CudaGraph, CudaRecorder
from ts_core.engine.replay.host_recorder import HostRecorder
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

STEPS = 4
# On a GPU placement and slots are tried out for longer; nothing is recorded before they settle.
GPU_STEPS = 16


def run(
    graphs: bool,
    *,
    full: bool = False,
    autocast: torch.dtype | None = None,
    length: int = 7,
    device: str = "host",
    steps: int = STEPS,
    **options: Any,
) -> tuple[TinyModel, TrainingRecord]:
    where = "cpu" if device == "host" else device
    model = tiny_model(depth=4, dropout=0.1, full=full).to(where)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        quantize="none",
        device=device,
        offload=True,
        accumulation_steps=2,
        cuda_graphs=graphs,
        **options,
    )
    with inject_delays(3, max_ms=1.0, share=0.3):
        record = train(
            model,
            optimizer,
            steps,
            accumulation=2,
            autocast=autocast,
            length=length,
            device=where,
        )
        optimizer.synchronize()
    return model, record


CASES: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"param_offload": True},
    "recomputed": {"recompute": True},
    "mixed": {"param_offload": [0, 2, 3], "recompute": [0, 1], "max_grad_norm": 1.0},
    "full": {"full": True, "param_offload": True},
    "autocast": {"autocast": torch.bfloat16, "param_offload": 0.5, "recompute": [1]},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_replayed_equals_eager(recorders: list[HostRecorder], options: dict[str, Any]) -> None:
    _, eager = run(False, **options)
    model, replayed = run(True, **options)
    assert eager.differences(replayed) == []
    report = memory_report(model)["replay"]
    # Two calls of each of the 8 are the first sight and the watched one.
    assert report["replayed_forwards"] == report["replayed_backwards"] == 4 * (2 * STEPS - 2)
    assert (report["recorded"], report["eager"]) == (4, {})  # a slot of its own for each block
    assert report["pool_bytes"] > 0 and report["scratch_bytes"] > 0
    assert (report["saved_bytes"] > 0) == (options.get("recompute") is not True)


def test_paged_activations_stay_eager_and_say_so(recorders: list[HostRecorder]) -> None:
    options: dict[str, Any] = {"activation_offload": 0.5, "min_offload_bytes": 0}
    _, eager = run(False, **options)
    model, replayed = run(True, **options)
    assert eager.differences(replayed) == []
    report = memory_report(model)
    assert report["replay"]["replayed_backwards"] == 2 * (2 * STEPS - 2)
    assert any("paged to host memory" in line for line in report["events"])


def test_without_a_gpu_it_is_off_and_says_so() -> None:
    model, _ = run(True)
    report = memory_report(model)
    assert report["replay"] is None
    assert any("cuda_graphs=True: off, as there is no GPU" in line for line in report["events"])


def test_the_peak_counts_anew_once_every_block_is_recorded(
    recorders: list[HostRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps before had activations of their own, in place of the recordings' memory."""
    from ts_core.device import HostDevice

    model = tiny_model(depth=3, full=True)
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        quantize="none",
        device="host",
        offload=True,
        cuda_graphs=True,
        recompute=True,
    )
    session = model._trainstream_session
    resets: list[int] = []
    monkeypatch.setattr(HostDevice, "reset_peak", lambda self: resets.append(session.steps))
    train(model, optimizer, 8)
    assert session.replay.complete()
    recorded = 3  # the first sight, the watched call, the recorded one
    assert [step for step in resets if step >= recorded] == [recorded]
    session.replay.forget()
    assert not session.replay.complete()
    train(model, optimizer, 6)
    assert session.replay.complete() and len([step for step in resets if step > recorded]) == 1


def test_unwrap_drops_what_was_recorded(recorders: list[HostRecorder]) -> None:
    model, _ = run(True)
    replay = model._trainstream_session.replay
    assert replay.size_bytes() > 0
    unwrap(model)
    assert replay.report()["saved_bytes"] == replay.report()["scratch_bytes"] == 0
    model(torch.zeros(2, 7, dtype=torch.long)).backward()


GPU: dict[str, Any] = {"device": "cuda", "activation_offload": False}


@pytest.mark.gpu
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_replayed_equals_eager_on_the_gpu(options: dict[str, Any]) -> None:
    """With real graphs; updates by the host in both, so that all else is the same."""
    options = {"recompute": False, "steps": GPU_STEPS, **options, **GPU}
    _, eager = run(False, **options)
    model, replayed = run(True, **options)
    report = memory_report(model)
    assert eager.differences(replayed) == [], "\n".join(report["events"])
    assert report["replay"]["replayed_backwards"] > 0, "\n".join(report["events"])


def on_the_gpu(
    model: TinyModel, graphs: bool, **changes: Any
) -> tuple[Any, Any, list[torch.nn.Parameter]]:
    """The model wrapped, its optimizer, and what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    inner = torch.optim.AdamW(trained, lr=1e-2)
    options = {"quantize": "none", "offload": True, "recompute": False, **GPU, **changes}
    model, optimizer = wrap(model, inner, cuda_graphs=graphs, **options)
    return model, optimizer, trained


@pytest.mark.gpu
def test_lengths_that_change_and_evaluation_between_steps_on_the_gpu() -> None:
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = tiny_model(depth=3, dropout=0.1).cuda()
        model, optimizer, trained = on_the_gpu(model, graphs)
        found = []
        for step in range(12):
            tokens = torch.arange(2 * (5 + step % 3), device="cuda").view(2, -1) % 37
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
            if step % 4 == 3:
                model.eval()
                with torch.no_grad():
                    found.append(model(tokens))
                model.train()
        optimizer.synchronize()
        results.append([*found, *(p.detach().clone() for p in trained)])
        report = memory_report(model)
    for k, (eager, replayed) in enumerate(zip(*results, strict=True)):
        assert torch.equal(eager, replayed), (k, report["events"])
    assert report["replay"]["replayed_backwards"] > 0, "\n".join(report["events"])


@pytest.mark.gpu
def test_a_block_that_cannot_be_captured_runs_eagerly_on_the_gpu() -> None:
    """It reads a value on the host, which no graph can."""
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = tiny_model(depth=3, dropout=0.0).cuda()
        own = model.layers[1].forward

        def forward(x: torch.Tensor, own: Any = own) -> torch.Tensor:
            out: torch.Tensor = own(x)
            return out * (1.0 if out.sum().item() > 0 else 0.5)

        model.layers[1].forward = forward
        model, optimizer, _ = on_the_gpu(model, graphs)
        results.append(train(model, optimizer, GPU_STEPS, device="cuda"))
        report = memory_report(model)
    assert results[0].differences(results[1]) == []
    assert report["replay"]["replayed_backwards"] > 0, "\n".join(report["events"])
    assert report["replay"]["eager"], report["events"]


@pytest.mark.gpu
def test_a_capture_has_room_where_the_allocator_holds_unused_memory() -> None:
    """Under a cap that other tensors once filled; torch frees nothing while it captures."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    recorder = CudaRecorder(device)
    source = torch.ones(1 << 20, device=device)
    result = torch.zeros(1 << 20, device=device)

    def work() -> None:
        wide = source.expand(64, -1) * 2.0  # 256 MiB
        result.copy_(wide.sum(0))

    recorder.warm_up(work)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.memory_reserved(device) + (400 << 20)
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        filling = torch.empty(300 << 20, dtype=torch.uint8, device=device)
        del filling  # the allocator keeps it
        recorded = recorder.record(work)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
    assert not recorder.broken
    result.zero_()
    source.fill_(3.0)
    recorded.replay()
    assert torch.equal(result, torch.full_like(result, 384.0))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_what_a_capture_began_never_comes_late_on_the_gpu(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch writes on the captured stream as a capture begins (the seed and offset of dropout)
    comes 50 ms later, as on a GPU that others keep busy; and a replay gets to its dropout 50 ms
    after it has set them. (A capture takes a few.)"""
    lag = 90_000_000  # cycles
    begin = torch.cuda.CUDAGraph.capture_begin
    captures: list[Any] = []

    def late(self: Any, *args: Any, **kwargs: Any) -> None:
        captures.append(torch.cuda.current_stream())
        torch.cuda._sleep(lag)
        begin(self, *args, **kwargs)

    def slow(x: torch.Tensor, own: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(lag)
        out: torch.Tensor = own(x)
        return out

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    results = []
    for graphs in (False, True):
        model = tiny_model(depth=2, dropout=0.5).cuda()
        for layer in model.layers:
            layer.forward = functools.partial(slow, own=layer.forward)
        model, optimizer, _ = on_the_gpu(model, graphs, recompute=recompute)
        results.append(train(model, optimizer, GPU_STEPS, device="cuda"))
        report = memory_report(model)
    assert captures and torch.cuda.default_stream() not in captures
    assert results[0].differences(results[1]) == [], report["events"]
    assert report["replay"]["replayed_backwards"] > 0, report["events"]


@pytest.mark.gpu
def test_after_a_capture_that_fails_random_numbers_are_drawn_on_the_gpu() -> None:
    """A block does what no capture allows, which no look at its operators shows."""
    results = []
    for graphs in (False, True):
        model = tiny_model(depth=3, dropout=0.1).cuda()
        own = model.layers[1].forward

        def forward(x: torch.Tensor, own: Any = own) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
            out: torch.Tensor = own(x)
            return out

        model.layers[1].forward = forward
        model, optimizer, _ = on_the_gpu(model, graphs)
        results.append(train(model, optimizer, GPU_STEPS, device="cuda"))
        report = memory_report(model)
    assert results[0].differences(results[1]) == []
    assert not report["replay"]["on"]
    assert any("recording failed" in line for line in report["replay"]["eager"]), report["events"]


def test_replays_of_several_threads_come_one_after_another() -> None:
    """Each sets the random numbers' seed and offset for its own launch."""
    inside, most, over = 0, 0, threading.Event()

    class Graph:
        def replay(self) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            over.wait(0.02)
            inside -= 1

    graphs = [CudaGraph(Graph()) for _ in range(4)]  # type: ignore[arg-type]
    threads = [threading.Thread(target=graph.replay) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
